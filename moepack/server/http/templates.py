"""Render conversations with the model's chat template, and parse tool calls from its answers."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError, bad

from .parse import Dialogue

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)  # the form of Hermes, Qwen and others


def render(tokens: Tokens, asked: Dialogue) -> list[int]:
    """Render a conversation as prompt tokens. Raises ApiError if the template is missing or refuses."""
    template = tokens.tokenizer.chat_template
    if not template:
        why = "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
        raise ApiError(400, why, "messages", "no_chat_template")
    if asked.tools and "<tool_call>" not in (template if isinstance(template, str) else json.dumps(template)):
        raise bad("tools", "this model's template does not say how it calls tools", "unsupported")
    try:
        text = tokens.tokenizer.apply_chat_template(
            asked.messages,
            tools=asked.tools or None,
            tokenize=False,
            **{"add_generation_prompt": True, **asked.template},
        )
    except Exception as error:  # a template is a program and may raise anything
        why = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise bad("messages", f"the chat template refuses them: {why}") from None
    return tokens.encode(str(text), asked.special, "messages")


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into text and tool calls. A call that cannot be parsed stays text."""
    calls: list[dict[str, Any]] = []

    def found(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            made = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return match[0]
        if not isinstance(made["name"], str):
            return match[0]
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": made})
        return ""

    rest = _CALL.sub(found, text)
    return (rest.strip() if calls else text), calls
