"""Build answers in the OpenAI interface's shapes: whole ones, and chunks of streams."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moepack.server.batching.jobs import JobEvent
from moepack.server.batching.sampling import Scored
from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError
from moepack.server.tools.parts import AnswerReader

from .parse import Request
from .said import Item, Said
from .toolbox import said_call


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as generated so far."""

    prompt: Sequence[int]
    echo: str = ""  # the prompt's text, if the answer begins with it, until the first event
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None
    generated: int = 0
    cached: int = 0  # tokens of the prompt that were taken from kept chunks

    def hear(self, event: JobEvent) -> tuple[str, list[Scored]]:
        """Append an event, and return the new text and the newly scored tokens."""
        text, self.echo = self.echo + event.text, ""
        new = [*event.prompt, *event.scored]
        self.text += text
        self.scored += new
        self.finish, self.generated, self.cached = event.finish, event.generated, event.cached
        return text, new


class Reply:
    """The answer to one request, as generated so far. Subclasses format the choices of each kind of request."""

    done: ClassVar[bytes] = b"data: [DONE]\n\n"  # what ends a stream
    prefix: ClassVar[str]  # prefix of the answer's id
    kinds: ClassVar[tuple[str, str]]  # the `object` of a whole answer and of a stream's chunk

    def __init__(
        self, asked: Request, prompts: Sequence[list[int]], tokens: Tokens, model: str,
        reader: Callable[[], AnswerReader],
    ) -> None:  # fmt: skip
        """Begin the answer; `reader` makes what reads each choice of a chat."""
        self._asked, self._tokens = asked, tokens
        self._wants_scores = asked.sampling.top_logprobs is not None
        echoed = asked.prompts if asked.echo else [""] * len(prompts)
        each = zip(prompts, (p if isinstance(p, str) else tokens.decode(p) for p in echoed), strict=True)
        self.choices = [Choice(prompt, echo) for prompt, echo in each for _ in range(asked.count)]
        several = asked.chat is None or asked.chat.tools.several
        self._said = [] if asked.chat is None else [Said(reader(), several) for _ in self.choices]
        self._setup()
        self._head = {
            "id": self.prefix + secrets.token_hex(16), "object": self.kinds[asked.stream],
            "created": int(time.time()), "model": model,
        }  # fmt: skip

    def _setup(self) -> None:
        """Prepare what a subclass keeps."""

    def event(self, value: dict[str, object]) -> bytes:
        """Format one event of a stream."""
        return sse(value)

    def failure(self, error: ApiError) -> dict[str, object]:
        """The event that ends a stream with an error."""
        return error.body()

    def whole(self) -> dict[str, object]:
        """The whole answer."""
        made = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head, "choices": made, "usage": self._usage()}

    async def chunks(
        self, batches: AsyncIterator[list[tuple[int, JobEvent]]]
    ) -> AsyncIterator[list[dict[str, object]]]:
        """Yield a stream's chunks as events arrive, in batches."""
        # a stream that ends with its usage has the field throughout
        empty: dict[str, object] = {"usage": None} if self._asked.usage else {}
        async for batch in batches:
            pieces = [piece for index, event in batch for piece in self._pieces(index, self.choices[index], event)]
            if pieces:
                if self._asked.continuous:
                    empty = {"usage": self._usage()}
                yield [{**self._head, "choices": [piece], **empty} for piece in pieces]
        if self._asked.usage:
            yield [{**self._head, "choices": [], "usage": self._usage()}]

    def hear(self, index: int, event: JobEvent) -> None:
        """Append an event of a whole answer."""
        self._pieces(index, self.choices[index], event)

    def _usage(self) -> dict[str, object]:
        """Count the tokens read and generated; a prompt counts once for all its answers."""
        read = sum(len(choice.prompt) for choice in self.choices[:: self._asked.count])
        cached = sum(choice.cached for choice in self.choices[:: self._asked.count])
        made = sum(choice.generated for choice in self.choices)
        return {
            "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        """Format one choice of a whole answer."""
        raise NotImplementedError

    def _pieces(self, index: int, choice: Choice, event: JobEvent) -> list[dict[str, object]]:
        """Append an event to a choice; return the choice's entries in the next chunks."""
        raise NotImplementedError


def sse(value: dict[str, object], name: str | None = None) -> bytes:
    """Format one server-sent event; `name` is its event type, if any."""
    head = "" if name is None else f"event: {name}\n"
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {text}\n\n".encode(errors="replace")


class ChatReply(Reply):
    """The answer to a chat completion."""

    prefix, kinds = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def _usage(self) -> dict[str, object]:
        spent = sum(said.reasoning_tokens for said in self._said)
        return {**super()._usage(), "completion_tokens_details": {"reasoning_tokens": spent}}

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        said = self._said[index]
        content = said.text("content") or (None if said.calls else "")
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if reasoning := said.text("reasoning"):
            message["reasoning_content"] = reasoning
        if said.calls:
            message["tool_calls"] = [said_call(item.call, item.name, item.text) for item in said.calls]
        logprobs = self._logprobs(choice.scored)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": said.finish}

    def _setup(self) -> None:
        self._begun: set[int] = set()  # choices of which a stream has told the role

    def _pieces(self, index: int, choice: Choice, event: JobEvent) -> list[dict[str, object]]:
        """See Reply. The role comes with the first token, so that its arrival is the time to first token."""
        role = [] if index in self._begun else [_chat_piece(index, {"role": "assistant", "content": ""})]
        self._begun.add(index)
        _, scored = choice.hear(event)
        said = self._said[index]
        deltas = [_delta(said, item, text) for item, text in said.hear(event)]
        if scored and not deltas:
            deltas = [{}]
        logprobs = [self._logprobs(scored), *[self._logprobs(())] * len(deltas)]
        out = role + [_chat_piece(index, delta, None, p) for delta, p in zip(deltas, logprobs, strict=False)]
        return [*out, _chat_piece(index, {}, said.finish)] if said.finish else out

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, object] | None:
        if not self._wants_scores:
            return None
        tokens = self._tokens

        def one(token: int, logprob: float | None) -> dict[str, object]:
            return {"token": tokens.shown(token), "logprob": logprob, "bytes": list(tokens.raw(token))}

        content = [{**one(s.token, s.logprob), "top_logprobs": [one(*pair) for pair in s.top]} for s in scored]
        return {"content": content, "refusal": None}


def _delta(said: Said, item: Item, text: str) -> dict[str, object]:
    """The change of a message by new text of an item."""
    if item.kind != "call":
        return {"content" if item.kind == "content" else "reasoning_content": text}
    more = {"function": {"arguments": text}} if text else said_call(item.call, item.name, "")
    return {"tool_calls": [{"index": said.calls.index(item), **more}]}


def _chat_piece(
    index: int, delta: dict[str, object], finish: str | None = None, logprobs: dict[str, object] | None = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class CompletionReply(Reply):
    """The answer to a completion."""

    prefix, kinds = "cmpl-", ("text_completion", "text_completion")

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        logprobs = self._logprobs(choice.scored)
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _pieces(self, index: int, choice: Choice, event: JobEvent) -> list[dict[str, object]]:
        start = len(choice.text)
        text, scored = choice.hear(event)
        logprobs = self._logprobs(scored, start)
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": event.finish}]

    def _logprobs(self, scored: Sequence[Scored], start: int = 0) -> dict[str, object] | None:
        """Format log probabilities of tokens; `start` is where their text begins in the answer, in characters."""
        if not self._wants_scores:
            return None
        shown = [self._tokens.shown(s.token) for s in scored]
        top: list[dict[str, float] | None] = []
        for s in scored:
            best: dict[str, float] = {}
            for token, logprob in s.top:  # likeliest first; of two tokens with equal text the likelier stays
                best.setdefault(self._tokens.shown(token), logprob)
            if s.logprob is not None:
                best.setdefault(self._tokens.shown(s.token), s.logprob)
            top.append(None if s.logprob is None else best)
        offsets = list(itertools.accumulate(map(len, shown), initial=start))[:-1]
        return {
            "tokens": shown, "token_logprobs": [s.logprob for s in scored], "top_logprobs": top, "text_offset": offsets,
        }  # fmt: skip
