"""Options of a server and of sampling. Imports neither torch nor a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a server accepts.

    Attributes:
        sequences: running sequences.
        waiting: waiting sequences.
        step_tokens: tokens of one forward pass.
        context: tokens of prompt and answer.
        prompt: tokens of a prompt.
        kv_tokens: tokens of all KV caches. Unlimited, experts are evicted as the caches grow.
    """

    sequences: int = 32
    waiting: int = 256
    step_tokens: int = 256
    context: int = UNLIMITED
    prompt: int = UNLIMITED
    kv_tokens: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a server.

    Attributes:
        name: the model's name for clients.
        host: the host it listens on.
        key: the API key that clients must send; None for none.
        body: the most bytes of a request's body.
        template: a chat template that replaces the tokenizer's own.
        limits: the most that it accepts.
    """

    name: str
    host: str = "127.0.0.1"
    key: str | None = None
    body: int = 4 << 20
    template: str | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a request's tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p: keeps the fewest likeliest tokens with this probability together; 1 keeps all.
        top_k: keeps so many of the likeliest tokens; 0 keeps all.
        min_p: keeps tokens with at least this share of the best probability; 0 keeps all.
        seed: of the random numbers; None draws one.
        presence, frequency: penalty on the logits of generated tokens, once and for each occurrence.
        repetition: divides positive logits of tokens in prompt and answer, multiplies negative ones; 1 changes nothing.
        bias: token -> what is added to its logit.
        top_logprobs: alternatives reported with each token; None reports no probabilities.
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
