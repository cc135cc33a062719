"""Jobs, each of which is one sequence to generate, and the events that report a job's progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moepack.server.options import Sampling

from .grammar import JsonMask
from .sampling import Scored


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Progress of a job since its last event."""

    text: str = ""  # new text of the answer
    scored: tuple[Scored, ...] = ()  # tokens of the new text with log probabilities, if the job asks for them
    # Tokens of the prompt with log probabilities, in one event alone, if the job asks for them; the first has none.
    prompt: tuple[Scored, ...] = ()
    finish: str | None = None  # "stop", "length", or None while the job runs
    stop: str | None = None  # the stop string that ended the answer
    error: Exception | None = None  # the reason if the job ends without an answer
    generated: int = 0  # tokens generated so far, including those that a stop string cut off
    cached: int = 0  # tokens of the prompt that were not read, because an earlier request's were kept


@dataclass(eq=False, slots=True)
class Job:
    """One sequence to generate."""

    prompt: list[int]  # token ids
    max_tokens: int  # the most tokens to generate
    sampling: Sampling  # how to choose the tokens
    tell: Callable[[JobEvent], None]  # receives every event, through the scheduler's `post`
    stops: tuple[str, ...] = ()  # strings that end the answer; the answer leaves them out
    ends: frozenset[int] = frozenset()  # tokens that end the answer
    # Makes the mask of allowed tokens, on the scheduler's thread; None allows all.
    grammar: Callable[[], JsonMask] | None = None
    shows_special: bool = False  # whether the answer's text has special tokens in it
    wants_prompt: bool = False  # whether to report the prompt's own tokens
    # Whether the client has gone. Any thread may set this.
    cancelled: bool = False
    # `submitted`, `first`, `last`: seconds of time.monotonic at submission, first token, last token; 0.0 until then.
    submitted: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
