"""An answer as a list of items of one kind each: reasoning, text, calls. Both interfaces show answers so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from moepack.pack.manifest.strict_json import JsonObject
from moepack.server.batching.jobs import JobEvent
from moepack.server.http.replies import Reply, sse
from moepack.server.http.said import Item


class ItemReply(Reply):
    """The answer to a chat as items. Subclasses write items and the events of a stream."""

    kinds, done = ("", ""), b""

    def _setup(self) -> None:
        self._open: Item | None = None  # the item that goes on
        self._ended = False  # whether no item follows the last
        self._stop: str | None = None  # the stop string that ended the answer

    def event(self, value: JsonObject) -> bytes:
        """Format one event of a stream, under the name that it has inside too."""
        return sse(value, value["type"])

    def hear(self, index: int, event: JobEvent) -> None:
        """Append an event of a whole answer."""
        for _ in self._events(event):
            pass

    async def chunks(
        self, batches: AsyncIterator[list[tuple[int, JobEvent]]]
    ) -> AsyncIterator[list[dict[str, object]]]:
        """Yield a stream's events as the job's events arrive.

        None comes before the first token: only then are all the counts known that the first events have.
        """
        made: list[dict[str, object]] = []
        began = False
        async for batch in batches:
            if not began:
                began = True
                self.choices[0].cached = batch[0][1].cached
                made = [*self._first()]
            made += [one for _, event in batch for one in self._events(event)]
            if made:
                yield made
            made = []
        yield [*self._last()]

    @property
    def _read(self) -> int:
        """Tokens of the prompt."""
        return len(self.choices[0].prompt)

    @property
    def _made(self) -> int:
        """Tokens of the answer."""
        return self.choices[0].generated

    @property
    def _items(self) -> list[Item]:
        return self._said[0].items

    def _events(self, event: JobEvent) -> Iterator[dict[str, object]]:
        """Append an event to the items; yield what a stream says of it."""
        said = self._said[0]
        self.choices[0].hear(event)
        self._stop = event.stop
        for item, text in said.hear(event):
            yield from self._go_on(item)
            if text:
                yield self._more(item, text)
        if event.finish is not None:
            if not said.items:  # an answer has an item, if an empty one
                yield from self._go_on(said.add("content"))
            self._ended = True
            yield from self._close()

    def _go_on(self, item: Item) -> Iterator[dict[str, object]]:
        """Begin an item, unless it is open."""
        if item is not self._open:
            yield from self._close()
            self._open = item
            yield from self._begin(item)

    def _close(self) -> Iterator[dict[str, object]]:
        ended = self._open
        self._open = None
        if ended is not None:
            yield from self._end(ended)

    # --- what an interface says

    def _first(self) -> Iterator[dict[str, object]]:
        """Yield the events that begin a stream."""
        raise NotImplementedError

    def _begin(self, item: Item) -> Iterator[dict[str, object]]:
        """Yield the events that begin an item."""
        raise NotImplementedError

    def _more(self, item: Item, text: str) -> dict[str, object]:
        """Return the event of more text of an item."""
        raise NotImplementedError

    def _end(self, item: Item) -> Iterator[dict[str, object]]:
        """Yield the events that end an item."""
        raise NotImplementedError

    def _last(self) -> Iterator[dict[str, object]]:
        """Yield the events that end a stream."""
        raise NotImplementedError
