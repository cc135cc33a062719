"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moepack.server.batching.tokens import Tokens
from moepack.server.errors import bad
from moepack.server.tools.forms import Manners

from .fields import Fields
from .parse import Dialogue, conversation
from .templates import render


class TokenizeRequest:
    """A text or a conversation to turn into tokens. An ApiError names the field that is wrong or unsupported."""

    def __init__(self, fields: Fields, vocabulary: int = 0) -> None:
        self.model = fields.text("model")
        self.text, self.strings = fields.text("prompt"), fields.flag("return_token_strs")
        self.special = fields.flag("add_special_tokens", self.text is not None)
        self.chat = self._chat(fields) if self.text is None else None
        fields.end()

    def _chat(self, fields: Fields) -> Dialogue:
        asked, goes_on = conversation(fields), fields.flag("continue_final_message")
        begins = fields.flag("add_generation_prompt", not goes_on)
        if goes_on and begins:
            raise bad("continue_final_message", "needs add_generation_prompt: false")
        more = {"add_generation_prompt": begins, "continue_final_message": goes_on}
        return replace(asked, template={**asked.template, **more}, special=self.special)

    def answer(self, tokens: Tokens, manners: Manners, context: int | None) -> dict[str, Any]:
        """The answer; `context` is the most tokens of a sequence, None if that is not limited."""
        if self.chat is None:
            ids = tokens.encode(self.text or "", self.special, "prompt")
        else:
            _, ids = render(tokens, manners, self.chat)
        names = tokens.tokenizer.convert_ids_to_tokens(ids) if self.strings else None
        return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names}


class DetokenizeRequest:
    """Tokens to turn into a text, special ones included. An ApiError names the field that is wrong or unsupported."""

    def __init__(self, fields: Fields, vocabulary: int) -> None:
        self.model = fields.text("model")
        given = fields.take("tokens")
        if not isinstance(given, list) or not all(type(t) is int and 0 <= t < vocabulary for t in given):
            raise bad("tokens", f"must be a list of tokens: they go from 0 to {vocabulary - 1}")
        self.tokens: list[int] = given
        fields.end()

    def answer(self, tokens: Tokens, manners: Manners, context: int | None) -> dict[str, Any]:
        """The answer."""
        return {"prompt": tokens.decode(self.tokens, special=True)}
