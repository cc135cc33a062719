"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from moepack.server.batching.tokens import Tokens
from moepack.server.errors import bad

from .models import Body, Flag, List, Object, Text, Whole, read
from .parse import ChatMessages, check_tokens
from .templates import ChatTemplate


class Tokenized(Body):
    """A request to tokenize a text, or to detokenize tokens."""

    model: Text | None = None

    def answer(self, tokens: Tokens, template: ChatTemplate, context: int | None) -> Object:
        """The answer; `context` is the most tokens of a sequence, None if that is not limited."""
        raise NotImplementedError


class TextBody(Tokenized):
    """A text to turn into tokens."""

    prompt: Text
    return_token_strs: Flag = False
    add_special_tokens: Flag = True

    def answer(self, tokens: Tokens, template: ChatTemplate, context: int | None) -> Object:
        """See Tokenized."""
        ids = tokens.encode(self.prompt, self.add_special_tokens, "prompt")
        return _listed(tokens, ids, self.return_token_strs, context)


class DialogueBody(ChatMessages, Tokenized):
    """A conversation to turn into tokens."""

    return_token_strs: Flag = False
    add_special_tokens: Flag = False
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False

    def answer(self, tokens: Tokens, template: ChatTemplate, context: int | None) -> Object:
        """See Tokenized."""
        goes_on = self.continue_final_message
        begins = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        if goes_on and begins:
            raise bad("continue_final_message", "needs add_generation_prompt: false")
        asked = self.dialogue()
        arguments = {**asked.template, "add_generation_prompt": begins, "continue_final_message": goes_on}
        _, ids = template.render(replace(asked, template=arguments, special=self.add_special_tokens))
        return _listed(tokens, ids, self.return_token_strs, context)


class DetokenizeBody(Tokenized):
    """Tokens to turn into a text, special ones included."""

    tokens: List[Annotated[Whole, Field(ge=0)]]

    def answer(self, tokens: Tokens, template: ChatTemplate, context: int | None) -> Object:
        """See Tokenized."""
        return {"prompt": tokens.decode(self.tokens, special=True)}


def tokenize(given: Object, vocabulary: int) -> Tokenized:
    """Parse a request to /tokenize. An ApiError names the field that is wrong or unsupported."""
    return read(DialogueBody if given.get("prompt") is None else TextBody, given)


def detokenize(given: Object, vocabulary: int) -> Tokenized:
    """Parse a request to /detokenize. An ApiError names the field that is wrong or unsupported."""
    body = read(DetokenizeBody, given)
    check_tokens("tokens", body.tokens, vocabulary)
    return body


def _listed(tokens: Tokens, ids: list[int], strings: bool, context: int | None) -> Object:
    names = tokens.tokenizer.convert_ids_to_tokens(ids) if strings else None
    return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names}
