"""How a server is to behave, and what it takes on. Data; imports nothing that is slow."""

from __future__ import annotations

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
