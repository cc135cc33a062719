"""Answers of the Responses interface: the response object, and the events of a stream in their published order."""

from __future__ import annotations

import time
from collections.abc import Iterator

from moepack.server.errors import ApiError
from moepack.server.http.said import Item

from .items import ItemReply

_IDS = {"reasoning": "rs", "content": "msg", "call": "fc"}
_TEXTS = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}


class ResponseReply(ItemReply):
    """The answer to one request."""

    prefix = "resp_"

    def whole(self) -> dict[str, object]:
        """The response object, as far as it is made."""
        asked, said, sampling = self._asked, self._said[0], self._asked.sampling
        status = {None: "in_progress", "length": "incomplete"}.get(said.finish, "completed")
        usage = {
            "input_tokens": self._read, "input_tokens_details": {"cached_tokens": self.choices[0].cached},
            "output_tokens": self._made, "output_tokens_details": {"reasoning_tokens": said.reasoning_tokens},
            "total_tokens": self._read + self._made,
        }  # fmt: skip
        return {
            "id": self._head["id"], "object": "response", "created_at": self._head["created"], "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None, "model": self._head["model"], "output": [self._item(item) for item in self._items],
            "usage": None if said.finish is None else usage, **asked.repeated,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_logprobs": 0,
            "presence_penalty": sampling.presence, "frequency_penalty": sampling.frequency,
            "previous_response_id": None, "store": False, "background": False, "service_tier": "default",
            "truncation": "disabled",
        }  # fmt: skip

    def _item(self, item: Item) -> dict[str, object]:
        """Format an item; one that is open has no text yet."""
        finish, is_open = self._said[0].finish, item is self._open
        cut = finish == "length" and self._ended and item is self._items[-1]
        status = "in_progress" if is_open else "incomplete" if cut else "completed"
        text = "" if is_open else item.text
        head = {"id": f"{_IDS[item.kind]}_{item.id}", "status": status}
        if item.kind == "call":
            return {**head, "type": "function_call", "call_id": item.call, "name": item.name, "arguments": text}
        content = [] if is_open else [self._part(item, text)]
        if item.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, item: Item, text: str) -> dict[str, object]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    # --- a stream

    def _event(self, kind: str, **more: object) -> dict[str, object]:
        self._count = getattr(self, "_count", -1) + 1
        return {"type": f"response.{kind}", "sequence_number": self._count, **more}

    def _first(self) -> Iterator[dict[str, object]]:
        yield self._event("created", response=self.whole())
        yield self._event("in_progress", response=self.whole())

    def _begin(self, item: Item) -> Iterator[dict[str, object]]:
        yield self._event("output_item.added", output_index=item.index, item=self._item(item))
        if item.kind != "call":
            yield self._event("content_part.added", **self._at(item), part=self._part(item, ""))

    def _more(self, item: Item, text: str) -> dict[str, object]:
        return self._event(f"{_TEXTS[item.kind]}.delta", **self._at(item), delta=text, **_logprobs(item))

    def _end(self, item: Item) -> Iterator[dict[str, object]]:
        at = self._at(item)
        if item.kind == "call":
            yield self._event(f"{_TEXTS[item.kind]}.done", **at, name=item.name, arguments=item.text)
        else:
            yield self._event(f"{_TEXTS[item.kind]}.done", **at, text=item.text, **_logprobs(item))
            yield self._event("content_part.done", **at, part=self._part(item, item.text))
        yield self._event("output_item.done", output_index=item.index, item=self._item(item))

    def _last(self) -> Iterator[dict[str, object]]:
        made = self.whole()
        yield self._event("incomplete" if made["status"] == "incomplete" else "completed", response=made)

    def _at(self, item: Item) -> dict[str, object]:
        part: dict[str, object] = {} if item.kind == "call" else {"content_index": 0}
        return {"item_id": f"{_IDS[item.kind]}_{item.id}", "output_index": item.index, **part}

    def failure(self, error: ApiError) -> dict[str, object]:
        """The event that ends a stream with an error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        made = {**self.whole(), "status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("failed", response=made)


def _logprobs(item: Item) -> dict[str, object]:
    return {"logprobs": []} if item.kind == "content" else {}
