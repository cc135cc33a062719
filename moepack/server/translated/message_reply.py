"""Answers of the Messages interface: the message, and the events of a stream in their published order."""

from __future__ import annotations

from collections.abc import Iterator

from moepack.server.errors import ApiError
from moepack.server.http.said import Item
from moepack.server.http.toolbox import as_object

from .items import ItemReply

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageReply(ItemReply):
    """The answer to one request."""

    prefix = "msg_"

    def whole(self) -> dict[str, object]:
        """The message."""
        return self._message([self._block(item, item.text) for item in self._items], self._reason())

    def _message(self, content: list[dict[str, object]], reason: str | None) -> dict[str, object]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        usage = {**self._spent(), "cache_creation": None, "inference_geo": None, "service_tier": "standard"}
        return {**head, "content": content, **self._stopped(reason), "usage": usage}

    def _stopped(self, reason: str | None) -> dict[str, object]:
        return {"stop_reason": reason, "stop_sequence": self._stop, "stop_details": None, "container": None}

    def _reason(self) -> str | None:
        finish = self._said[0].finish
        if finish is None:
            return None
        if finish == "length" and self._made < (self._asked.max_tokens or 0):
            return "model_context_window_exceeded"
        return REASONS.get(finish, "end_turn" if self._stop is None else "stop_sequence")

    def _spent(self) -> dict[str, object]:
        thought, cached = self._said[0].reasoning_tokens, self.choices[0].cached
        return {  # as Anthropic counts, input_tokens are those that were read
            "input_tokens": self._read - cached, "output_tokens": self._made,
            "output_tokens_details": {"thinking_tokens": thought} if thought else None,
            "cache_creation_input_tokens": None, "cache_read_input_tokens": cached, "server_tool_use": None,
        }  # fmt: skip

    def _block(self, item: Item, text: str) -> dict[str, object]:
        if item.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        if item.kind == "content":
            # Anthropic's schema wants the field, and the AI SDK refuses a null in it.
            return {"type": "text", "text": text, "citations": []}
        try:
            given = as_object(text)
        except (ApiError, ValueError):  # cut off, or of a model that no grammar held
            given = {}
        caller = {"type": "direct"}
        return {"type": "tool_use", "id": item.call, "name": item.name, "input": given, "caller": caller}

    # --- a stream

    def _first(self) -> Iterator[dict[str, object]]:
        yield {"type": "message_start", "message": self._message([], None)}
        yield {"type": "ping"}

    def _begin(self, item: Item) -> Iterator[dict[str, object]]:
        yield {"type": "content_block_start", "index": item.index, "content_block": self._block(item, "")}

    def _more(self, item: Item, text: str) -> dict[str, object]:
        kinds = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}
        kind, name = kinds.get(item.kind, ("input_json_delta", "partial_json"))
        return {"type": "content_block_delta", "index": item.index, "delta": {"type": kind, name: text}}

    def _end(self, item: Item) -> Iterator[dict[str, object]]:
        yield {"type": "content_block_stop", "index": item.index}

    def _last(self) -> Iterator[dict[str, object]]:
        yield {"type": "message_delta", "delta": self._stopped(self._reason()), "usage": self._spent()}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> dict[str, object]:
        """The event that ends a stream with an error."""
        return error.anthropic()
