"""Options of a server and of sampling. Imports neither torch nor a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

UNLIMITED = 1 << 40
Way = Literal["join", "keep", "refuse"]  # what becomes of several system messages of a chat
WAYS: tuple[Way, ...] = get_args(Way)
GREEDY_BELOW = 1e-5  # the temperature below which sampling is greedy


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of what a server accepts."""

    sequences: int = 32  # running sequences
    waiting: int = 256  # waiting sequences
    step_tokens: int = 256  # tokens of one forward pass
    context: int = UNLIMITED  # tokens of prompt and answer
    prompt: int = UNLIMITED  # tokens of a prompt
    # Tokens of all KV caches. Without a limit, experts are evicted as the caches grow.
    kv_tokens: int = UNLIMITED
    kept_bytes: int | None = None  # bytes of kept chunks of prompts; 0 keeps none, None takes the default


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's sampling options."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keeps the likeliest tokens until their probabilities sum to this; 1 keeps all
    top_k: int = 0  # how many of the likeliest tokens to keep; 0 keeps all
    min_p: float = 0.0  # keeps tokens at least this fraction as likely as the likeliest; 0 keeps all
    seed: int | None = None  # seed of the random numbers; None draws a seed
    # Subtracted from the logits of generated tokens: `presence` once, `frequency` for each occurrence.
    presence: float = 0.0
    frequency: float = 0.0
    # For tokens of prompt and answer: divides positive logits, multiplies negative logits; 1 changes nothing.
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)  # token -> what is added to its logit
    top_logprobs: int | None = None  # alternatives reported with each token; None reports no probabilities

    def with_given(self, **given: Any) -> Sampling:
        """Return these options with what is given; None keeps this object's value."""
        made = replace(self, **{name: value for name, value in given.items() if value is not None})
        temperature = 0.0 if made.temperature < GREEDY_BELOW else made.temperature
        return replace(made, temperature=temperature, top_k=max(0, made.top_k))


DEFAULTS = Sampling()


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a server."""

    name: str  # the model's name for clients
    host: str = "127.0.0.1"  # the host that the server listens on
    keys: tuple[str, ...] = ()  # API keys, one of which clients must send; none asks for no key
    body: int = 4 << 20  # the most bytes of a request's body
    limits: Limits = field(default_factory=Limits)  # upper limits of what the server accepts
    template: str | None = None  # a chat template that replaces the tokenizer's own
    system_messages: Way = "join"
    prefix_dir: Path | None = None  # where kept prompts stay over restarts, in at most `prefix_dir_bytes` bytes
    prefix_dir_bytes: int = 10 << 30
    own_sampling: bool = True  # whether the model's generation_config.json sets defaults of sampling
