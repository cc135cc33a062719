"""Answers in the shapes of the OpenAI interface: whole ones, and the pieces of streams. Pure."""

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
    """One answer as far as it came."""

    prompt: Sequence[int]
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    of_prompt: tuple[Scored, ...] = ()
    finish: str | None = None
    generated: int = 0

    def hear(self, event: JobEvent) -> None:
        """More of it."""
        self.text += event.text
        self.scored += event.scored
        self.of_prompt = event.prompt or self.of_prompt
        self.finish, self.generated = event.finish, event.generated


@dataclass(frozen=True, slots=True)
class Head:
    """What all pieces of an answer begin with."""

    kind: str
    model: str
    prefix: str
    id: str = ""
    created: int = 0

    @classmethod
    def of(cls, kind: str, model: str, prefix: str) -> Head:
        """A new one."""
        return cls(kind, model, prefix, f"{prefix}-{secrets.token_hex(16)}", int(time.time()))

    def __call__(self, choices: list[dict[str, Any]], usage: Any = "none") -> dict[str, Any]:
        """An answer, or a piece of one, of these choices; with its usage where that is not "none"."""
        out = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}
        return out if usage == "none" else {**out, "usage": usage}


def usage(prompts: Sequence[int], choices: Sequence[Choice]) -> dict[str, int]:
    """How many tokens were read and made; a prompt counts once, however many answers it has."""
    made = sum(choice.generated for choice in choices)
    return {"prompt_tokens": sum(prompts), "completion_tokens": made, "total_tokens": sum(prompts) + made}


def sse(value: Any) -> bytes:
    """One event of a stream."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode(errors="replace")


# --- chats


def chat_logprobs(tokens: Tokens, scored: Sequence[Scored]) -> dict[str, Any]:
    """Tokens of an answer with their logarithmic probabilities."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.shown(token), "logprob": logprob, "bytes": list(tokens.raw(token))}

    content = [{**one(s.token, s.logprob), "top_logprobs": [one(*pair) for pair in s.top]} for s in scored]
    return {"content": content, "refusal": None}


def chat_choice(index: int, choice: Choice, tokens: Tokens, wants_scores: bool, has_tools: bool) -> dict[str, Any]:
    """One whole answer in a conversation."""
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
    """A piece of one."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


# --- completions


def completion_logprobs(tokens: Tokens, scored: Sequence[Scored], start: int = 0) -> dict[str, Any]:
    """Tokens with their logarithmic probabilities, as completions list them; `start` characters stand before them."""
    shown = [tokens.shown(s.token) for s in scored]
    offsets, at = [], start
    for text in shown:
        offsets.append(at)
        at += len(text)
    top: list[dict[str, float] | None] = []
    for s in scored:
        best: dict[str, float] = {}
        for token, logprob in s.top:  # the likeliest first: of two that look alike, it stays
            best.setdefault(tokens.shown(token), logprob)
        if s.logprob is not None:
            best.setdefault(tokens.shown(s.token), s.logprob)
        top.append(None if s.logprob is None else best)
    return {
        "tokens": shown, "token_logprobs": [s.logprob for s in scored], "top_logprobs": top, "text_offset": offsets,
    }  # fmt: skip


def completion_choice(index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """One answer to a prompt, or a piece of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
