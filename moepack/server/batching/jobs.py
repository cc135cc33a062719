"""A job, one sequence to generate, and the events that report its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moepack.server.options import Sampling

from .grammar import JsonMask
from .sampling import Scored


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Progress of a job since its last event.

    Attributes:
        text: new text of the answer.
        scored: tokens of that text with their probabilities, if the job reports them.
        prompt: tokens of the prompt with their probabilities, once, if the job reports them; the first has none.
        finish: "stop", "length", or None while the job runs.
        error: the reason if the job ends without an answer.
        generated: tokens generated so far, including those that a stop string cut off.
    """

    text: str = ""
    scored: tuple[Scored, ...] = ()
    prompt: tuple[Scored, ...] = ()
    finish: str | None = None
    error: Exception | None = None
    generated: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """One sequence to generate.

    Attributes:
        prompt: token ids.
        max_tokens: the most tokens to generate.
        sampling: how to choose them.
        tell: receives every event, through the scheduler's `post`.
        stops: strings that end the answer; the answer leaves them out.
        ends: tokens that end the answer.
        grammar: makes the mask of allowed tokens, on the scheduler's thread; None allows all.
        wants_prompt: whether to report the prompt's own tokens.
        cancelled: the client has gone. Any thread may set it.
        submitted, first, last: monotonic seconds of submission, first token and last token; 0.0 before.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    tell: Callable[[JobEvent], None]
    stops: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    grammar: Callable[[], JsonMask] | None = None
    wants_prompt: bool = False
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
