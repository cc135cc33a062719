"""An answer as a list of items of one kind each: reasoning, text, calls. Both interfaces show answers so."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from moepack.pack.manifest.strict_json import JsonObject
from moepack.server.batching.jobs import JobEvent
from moepack.server.http.replies import Reply, sse
from moepack.server.tools.parts import AnswerPart


@dataclass(slots=True)
class Item:
    """One item of an answer, as written so far."""

    kind: str  # "reasoning", "content" or "call"
    index: int
    id: str
    call: str = ""  # the call's id
    name: str = ""  # the function's name
    text: str = ""  # the text, or the call's arguments as JSON


class ItemReply(Reply):
    """The answer to a chat as items. Subclasses write items and the events of a stream."""

    prefix, kinds, done = "", ("", ""), b""

    def _setup(self) -> None:
        self._items: list[Item] = []
        self._open = False  # whether the last item goes on
        self._ended = False  # whether no item follows the last
        self._id = f"{self.prefix}_{secrets.token_hex(16)}"
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
        """Yield a stream's events as the job's events arrive."""
        yield [*self._first()]
        async for batch in batches:
            if made := [one for _, event in batch for one in self._events(event)]:
                yield made
        yield [*self._last()]

    @property
    def _read(self) -> int:
        """Tokens of the prompt."""
        return len(self.choices[0].prompt)

    @property
    def _made(self) -> int:
        """Tokens of the answer."""
        return self.choices[0].generated

    def _events(self, event: JobEvent) -> Iterator[dict[str, object]]:
        """Append an event to the items; yield what a stream says of it."""
        self.choices[0].hear(event)
        self._stop = event.stop
        for part in self._said[0].hear(event):
            yield from self._take(part)
        if event.finish is not None:
            if not self._items:  # an answer has an item, if an empty one
                yield from self._take(AnswerPart("content", ""))
            self._ended = True
            yield from self._close()

    def _take(self, part: AnswerPart) -> Iterator[dict[str, object]]:
        begins = part.kind == "call" or not self._open
        kind = "call" if part.kind == "arguments" else part.kind
        if begins or self._items[-1].kind != kind:
            yield from self._close()
            item = Item(kind, len(self._items), secrets.token_hex(16))
            if kind == "call":
                item.call, item.name = self._said[0].calls[sum(i.kind == "call" for i in self._items)].id, part.text
            self._items.append(item)
            self._open = True
            yield from self._begin(item)
        if part.kind != "call" and part.text:
            self._items[-1].text += part.text
            yield self._more(self._items[-1], part.text)

    def _close(self) -> Iterator[dict[str, object]]:
        if self._open:
            self._open = False
            yield from self._end(self._items[-1])

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
