"""Build answers in the OpenAI interface's shapes: whole ones, and chunks of streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moepack.server.batching.jobs import JobEvent
from moepack.server.batching.sampling import Scored
from moepack.server.batching.tokens import Tokens

from .templates import Templates


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it was generated."""

    prompt: Sequence[int]
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    of_prompt: tuple[Scored, ...] = ()
    finish: str | None = None
    generated: int = 0

    def hear(self, event: JobEvent) -> None:
        """Append an event."""
        self.text += event.text
        self.scored += event.scored
        self.of_prompt = event.prompt or self.of_prompt
        self.finish, self.generated = event.finish, event.generated


class Head:
    """The fields that all chunks of an answer share."""

    def __init__(self, kind: str, model: str, prefix: str) -> None:
        made, unique = int(time.time()), secrets.token_hex(16)
        self._fields = {"id": f"{prefix}-{unique}", "object": kind, "created": made, "model": model}

    def __call__(self, choices: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        """An answer or chunk with these choices, and `usage` if that is given."""
        return {**self._fields, "choices": choices, **usage}


def usage(choices: Sequence[Choice], count: int) -> dict[str, int]:
    """Count the tokens read and generated; a prompt counts once for all its `count` answers."""
    read, made = sum(len(c.prompt) for c in choices[::count]), sum(c.generated for c in choices)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def sse(value: Any) -> bytes:
    """Format one server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode(errors="replace")


# --- chats


def chat_logprobs(tokens: Tokens, scored: Sequence[Scored]) -> dict[str, Any]:
    """Log probabilities of an answer's tokens, as chat completions list them."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.shown(token), "logprob": logprob, "bytes": list(tokens.raw(token))}

    content = [{**one(s.token, s.logprob), "top_logprobs": [one(*pair) for pair in s.top]} for s in scored]
    return {"content": content, "refusal": None}


def chat_choice(index: int, choice: Choice, tokens: Tokens, wants_scores: bool, has_tools: bool) -> dict[str, Any]:
    """One whole choice of a chat completion."""
    text, calls = Templates.calls(choice.text) if has_tools else (choice.text, [])
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(tokens, choice.scored) if wants_scores else None,
        "finish_reason": "tool_calls" if calls and choice.finish == "stop" else choice.finish,
    }


def chat_piece(
    index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One chunk of a chat completion's choice."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


# --- completions


def completion_logprobs(tokens: Tokens, scored: Sequence[Scored], start: int = 0) -> dict[str, Any]:
    """Log probabilities of tokens, as completions list them; `start` is the offset of their text."""
    shown = [tokens.shown(s.token) for s in scored]
    offsets, at = [], start
    for text in shown:
        offsets.append(at)
        at += len(text)
    top: list[dict[str, float] | None] = []
    for s in scored:
        best: dict[str, float] = {}
        for token, logprob in s.top:  # likeliest first; of two tokens with equal text the likelier stays
            best.setdefault(tokens.shown(token), logprob)
        if s.logprob is not None:
            best.setdefault(tokens.shown(s.token), s.logprob)
        top.append(None if s.logprob is None else best)
    return {
        "tokens": shown, "token_logprobs": [s.logprob for s in scored], "top_logprobs": top, "text_offset": offsets,
    }  # fmt: skip


def completion_choice(index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """One choice of a completion, or a chunk of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
