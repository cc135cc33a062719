"""Render conversations with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator

from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError, bad
from moepack.server.options import Way
from moepack.server.tools.forms import Manners

from .models import Object
from .parse import Dialogue
from .system_messages import Places, check_single, joined, places_of
from .toolbox import Listed


def source(template: object) -> str:
    """Return the text of a tokenizer's chat template, or of all of several; "" without one."""
    return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False) if template else ""


def manners_of(tokens: Tokens) -> Manners:
    """Return how the model of a tokenizer writes calls and reasoning."""
    added = tokens.tokenizer.added_tokens_decoder
    special = [str(token) for token in added.values() if token.special]
    return Manners(source(tokens.tokenizer.chat_template), {str(t): int(n) for n, t in added.items()}, special)


class ChatTemplate:
    """A model's chat template. Any thread may call any method.

    Attributes:
        manners: how the model writes calls and reasoning.
    """

    def __init__(self, tokens: Tokens, system: Way = "join") -> None:
        """Read the template of a tokenizer; `system` says what becomes of several system messages."""
        self.manners = manners_of(tokens)
        self._tokens = tokens
        self._system = system
        self._source = source(tokens.tokenizer.chat_template)
        # what switches reasoning on and off, as Qwen and GLM, and as DeepSeek
        self._switch = "enable_thinking" if "enable_thinking" in self._source else "thinking"
        places = Places()
        if system == "join" and self._source:
            places = places_of(lambda messages: self._applied(messages, None, {"add_generation_prompt": True}))
        self._places = places

    def render(self, asked: Dialogue) -> tuple[str, list[int]]:
        """Render a conversation as a prompt, and its tokens.

        Raises:
            ApiError: if the template is missing or refuses the conversation.
        """
        field = asked.names.prompt
        if not self._source:
            why = "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
            raise ApiError(400, why, field, "no_chat_template")
        if asked.shown and self.manners.form is None:
            raise bad("tools", "this model's template does not say how it calls tools", "unsupported")
        given: Object = {"add_generation_prompt": True, **self._thought(asked), **asked.template}
        messages = asked.messages
        if self._system == "refuse":
            check_single(messages, asked.origins)
        elif self._system == "join":
            messages = joined(messages, self._places)
        try:
            text = self._applied(messages, asked.shown or None, given)
        except Exception as error:  # a template is a program and may raise anything
            why = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise bad(field, f"the chat template refuses them: {why}") from None
        return text, self._tokens.encode(text, asked.special, field)

    def unfollowed(self, asked: Dialogue) -> Iterator[str]:
        """Yield the fields that ask for reasoning, or for none, of which this template leaves no choice."""
        has_switch = self._switch in self._source
        if asked.thinks is not None and not has_switch and asked.thinks is not self.manners.reasons:
            yield "thinking"
        follows = has_switch or "reasoning_effort" in self._source or asked.thinks is False
        if asked.effort is not None and not follows and (asked.effort != "none" or self.manners.reasons):
            yield asked.names.effort

    def _thought(self, asked: Dialogue) -> Object:
        """Return the template's own arguments for whether and how much to reason."""
        found: Object = {}
        if asked.thinks is not None:
            found[self._switch] = asked.thinks
        if asked.effort is None or asked.thinks is False:
            return found
        if "reasoning_effort" in self._source:
            found["reasoning_effort"] = asked.effort
        elif asked.thinks is None:
            found[self._switch] = asked.effort != "none"
        return found

    def _applied(self, messages: list[Object], tools: Listed | None, given: Object) -> str:
        tokenizer = self._tokens.tokenizer
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **given))
