"""How a server behaves, what it takes on, how tokens are sampled: records that import neither torch nor a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes on at a time.

    Attributes:
        sequences: that are answered at once.
        waiting: that wait for it.
        step_tokens: of one forward pass.
        context: tokens of prompt and answer.
        prompt: tokens of a prompt.
        kv_tokens: of all caches together; without end, they take what experts can be pushed out of.
    """

    sequences: int = 32
    waiting: int = 256
    step_tokens: int = 256
    context: int = 1 << 40
    prompt: int = 1 << 40
    kv_tokens: int = 1 << 40


@dataclass(frozen=True, slots=True)
class Options:
    """How a server is to behave.

    Attributes:
        name: of the model, as clients ask for it.
        host: what it listens on.
        key: that clients are to send; None for none.
        body: bytes of a request's, at the most.
        template: a chat template in place of the tokenizer's own.
        limits: what it takes on at a time.
    """

    name: str
    host: str = "127.0.0.1"
    key: str | None = None
    body: int = 4 << 20
    template: str | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: the least set of likeliest tokens with this probability; 1 is all.
        top_k: the likeliest tokens; 0 is all.
        min_p: tokens at least this share as likely as the likeliest; 0 is all.
        seed: of its random numbers; None for one that nobody knows.
        presence, frequency: taken from the logits of tokens that were generated, once and for each time.
        repetition: divides (or, below zero, multiplies) the logits of tokens in prompt and answer; 1 is none.
        bias: added to the logits of these tokens.
        top_logprobs: how many alternatives are reported with every token; None: not even its own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
