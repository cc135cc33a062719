"""Render conversations with the model's chat template."""

from __future__ import annotations

import json
from typing import Any

from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError, bad
from moepack.server.tools.forms import Manners

from .parse import Dialogue


def source(template: object) -> str:
    """Return the text of a tokenizer's chat template, or of all of several; "" without one."""
    return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False) if template else ""


def manners_of(tokens: Tokens) -> Manners:
    """Return how the model of a tokenizer writes calls and reasoning."""
    added = tokens.tokenizer.added_tokens_decoder
    special = [str(token) for token in added.values() if token.special]
    return Manners(source(tokens.tokenizer.chat_template), {str(t): int(n) for n, t in added.items()}, special)


def render(tokens: Tokens, manners: Manners, asked: Dialogue) -> tuple[str, list[int]]:
    """Render a conversation as a prompt, and its tokens. Raises ApiError if the template is missing or refuses."""
    template = tokens.tokenizer.chat_template
    if not template:
        why = "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
        raise ApiError(400, why, "messages", "no_chat_template")
    if asked.shown and manners.form is None:
        raise bad("tools", "this model's template does not say how it calls tools", "unsupported")
    given: dict[str, Any] = {"add_generation_prompt": True, **_thought(asked, source(template)), **asked.template}
    try:
        text = tokens.tokenizer.apply_chat_template(asked.messages, tools=asked.shown or None, tokenize=False, **given)
    except Exception as error:  # a template is a program and may raise anything
        why = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise bad("messages", f"the chat template refuses them: {why}") from None
    return str(text), tokens.encode(str(text), asked.special, "messages")


def _thought(asked: Dialogue, template: str) -> dict[str, object]:
    """Return the template's own arguments for whether and how much to reason."""
    switch = "enable_thinking" if "enable_thinking" in template else "thinking"  # as Qwen and GLM, and as DeepSeek
    found: dict[str, object] = {} if asked.thinks is None else {switch: asked.thinks}
    if asked.effort is None:
        return found
    if "reasoning_effort" in template:
        return {**found, "reasoning_effort": asked.effort}
    if switch in template:
        return {**found, switch: asked.effort != "none"}
    raise bad("reasoning_effort", "this model's template has no such choice", "unsupported")
