"""Options of a server and of sampling. Imports neither torch nor a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a server accepts."""

    sequences: int = 32  # running sequences
    waiting: int = 256  # waiting sequences
    step_tokens: int = 256  # tokens of one forward pass
    context: int = UNLIMITED  # tokens of prompt and answer
    prompt: int = UNLIMITED  # tokens of a prompt
    # Tokens of all KV caches. Unlimited, experts are evicted as the caches grow.
    kv_tokens: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a server."""

    name: str  # the model's name for clients
    host: str = "127.0.0.1"  # the host it listens on
    key: str | None = None  # the API key that clients must send; None for none
    body: int = 4 << 20  # the most bytes of a request's body
    template: str | None = None  # a chat template that replaces the tokenizer's own
    limits: Limits = field(default_factory=Limits)  # the most that it accepts


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a request's tokens."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keeps the fewest likeliest tokens with this probability together; 1 keeps all
    top_k: int = 0  # keeps so many of the likeliest tokens; 0 keeps all
    min_p: float = 0.0  # keeps tokens with at least this share of the best probability; 0 keeps all
    seed: int | None = None  # of the random numbers; None draws one
    # `presence`, `frequency`: penalty on the logits of generated tokens, once and for each occurrence.
    presence: float = 0.0
    frequency: float = 0.0
    # Divides positive logits of tokens in prompt and answer, multiplies negative ones; 1 changes nothing.
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)  # token -> what is added to its logit
    top_logprobs: int | None = None  # alternatives reported with each token; None reports no probabilities
