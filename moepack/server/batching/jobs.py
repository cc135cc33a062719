"""One sequence to generate, and what is told of it while it is: the scheduler's words with whoever asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .sampling import Mask, Sampling, Scored


@dataclass(frozen=True, slots=True)
class Event:
    """What has become of a job since the last one.

    Attributes:
        text: more of the answer.
        scored: its tokens, where they are reported.
        prompt: those of the prompt, once, where they are reported; the first has no probability.
        finish: "stop", "length", or None while it goes on.
        error: why it ends without an answer.
        generated: tokens so far, those that a stop string cut off included.
    """

    text: str = ""
    scored: tuple[Scored, ...] = ()
    prompt: tuple[Scored, ...] = ()
    finish: str | None = None
    error: Exception | None = None
    generated: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """One sequence that somebody wants.

    Attributes:
        prompt: its tokens.
        max_tokens: that may be added.
        sampling: how they are chosen.
        stops: strings that end the answer, and are not in it.
        ends: tokens that end it.
        grammar: makes what limits it, on the scheduler's thread; None for no limit.
        wants_prompt: whether the prompt's own tokens are reported.
        tell: is given every event, on the scheduler's `post`.
        cancelled: nobody waits for it any more. Any thread may set it.
        submitted, first, last: when it was asked for, when its first and last tokens came; 0.0 before.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    tell: Callable[[Event], None]
    stops: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    grammar: Callable[[], Mask] | None = None
    wants_prompt: bool = False
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
