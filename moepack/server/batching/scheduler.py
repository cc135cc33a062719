"""Continuous batching: one thread that owns the model; sequences join and leave between steps.

Each step reads one token of every sequence that is being answered, and of prompts as many as are left of
`step_tokens`, so that a long prompt does not hold others up. Where the budget has no room for all caches, the youngest
sequence gives its own up and is read again later. Knows no HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.server.errors import ApiError
from moepack.server.options import Limits

from .engine import Engine, Item, Slot
from .jobs import Event, Job
from .packed_cache import NotPackable
from .sampling import Sampler, Scored, scored
from .text import Pieces, Stops
from .tokens import Tokens

log = logging.getLogger("moepack.server")
HEADROOM = 32  # tokens of an answer for which there is room before a sequence joins: else it would soon leave again
SCORED = 32  # tokens of a prompt whose logits are wanted that a step reads: a row of them for each


@dataclass(slots=True)
class Totals:
    """What was done since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A job while it is known here.

    Attributes:
        tokens: of prompt and answer so far.
        slot: its cache; None while it waits.
        made: tokens generated.
        shown, decoded: characters of the answer that were told, and that there are.
        untold: tokens still to report, with the beginning of their text.
        prompt: those of the prompt, as far as they were read.
    """

    job: Job
    tokens: list[int]
    sampler: Sampler | None = None
    pieces: Pieces | None = None
    stops: Stops | None = None
    slot: Slot | None = None
    made: int = 0
    shown: int = 0
    decoded: int = 0
    untold: list[tuple[Scored, int]] = field(default_factory=list)
    prompt: list[Scored] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens that its cache has still to read."""
        return len(self.tokens) - (self.slot.length if self.slot is not None else 0)


class Scheduler:
    """Answers jobs. `submit`, `close` and the numbers may be used from any thread.

    Attributes:
        limits: what it takes on.
        totals: what it has done.
    """

    def __init__(
        self, engine: Engine, tokens: Tokens, limits: Limits, post: Callable[[list[tuple[Job, Event]]], None]
    ) -> None:
        """`post` is given a step's events, on the scheduler's thread."""
        self.limits, self.totals = limits, Totals()
        self._engine, self._tokens, self._post = engine, tokens, post
        self._arrived: deque[_Sequence] = deque()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._events: list[tuple[Job, Event]] = []
        self._bell = threading.Condition()
        self._closing = self._dropping = False
        self._most = limits.step_tokens  # of the next pass: less after one that the budget refused
        self._crowded = False  # somebody gave way: nobody joins before a pass got through
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="moepack-scheduler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    # --- from any thread

    @property
    def running(self) -> int:
        """Sequences that are being answered."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for that."""
        return len(self._waiting) + len(self._arrived)

    def health(self) -> dict[str, object]:
        """Whether it works: `ok`, and the last pass's `error`, if it failed."""
        return {"ok": self._thread.is_alive() and self._error is None, "error": self._error}

    def most_answer(self, prompt: int) -> int:
        """Tokens that can follow a prompt of so many.

        Raises:
            ApiError: when it can never be served, with the number of tokens that could.
        """
        limits, context = self.limits, min(self.limits.context, self.limits.kv_tokens)
        if prompt > min(limits.prompt, context - 1):
            most = min(limits.prompt, context - 1)
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens: this server takes {most} at the most",
                None,
                "context_length_exceeded",
            )
        if not self._engine.holds(prompt + 1):
            fits = self._engine.most_tokens(prompt)
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens: the memory budget holds {fits} tokens of a sequence, prompt and "
                "answer together",
                None,
                "context_length_exceeded",
            )
        room = context - prompt
        return room if self._engine.holds(context) else self._engine.most_tokens(context) - prompt

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs on, all or none.

        Raises:
            ApiError: when the queue is full, or the server is stopping.
        """
        with self._bell:
            if self._closing or not self._thread.is_alive():
                raise ApiError(503, "this server is stopping", None, "stopping")
            if self.waiting + len(jobs) > max(self.limits.waiting, len(jobs) * (not self.waiting)):
                raise ApiError(429, f"{self.waiting} sequences wait already: try again later", None, "queue_full")
            self._arrived.extend(_Sequence(job, list(job.prompt)) for job in jobs)
            self._bell.notify()

    def stop(self) -> None:
        """Take nothing on any more and drop what waits; the thread ends once nothing runs."""
        with self._bell:
            self._closing = True
            self._bell.notify()

    def close(self, grace: float) -> bool:
        """`stop`, let what runs finish for `grace` seconds, then drop that too; whether all of it finished."""
        until = time.monotonic() + grace
        self.stop()
        if not self._thread.ident:
            return True
        self._thread.join(max(0.0, until - time.monotonic()))
        finished = not self._thread.is_alive()
        self._dropping = True
        self._thread.join()
        return finished

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._bell:
                while not (self._arrived or self._waiting or self._running or self._closing):
                    self._bell.wait()
                self._waiting.extend(self._arrived)
                self._arrived.clear()
            if self._closing:
                self._drop(self._waiting, ApiError(503, "this server is stopping", None, "stopping"))
                self._waiting.clear()
                if self._dropping:
                    self._drop(self._running, ApiError(503, "this server was stopped", None, "stopping"))
                    self._running.clear()
                if not self._running:
                    self._tell()
                    return
            self._leave()
            self._admit()
            items = self._plan()
            if items:
                self._step(items)
            self._tell()

    def _tell(self) -> None:
        events, self._events = self._events, []
        if events:
            self._post(events)

    def _drop(self, sequences: Sequence[_Sequence] | deque[_Sequence], error: Exception) -> None:
        for one in sequences:
            self._remove(one)
            self.totals.failed += 1
            self._events.append((one.job, Event(error=error, generated=one.made)))

    def _remove(self, one: _Sequence) -> None:
        if one.slot is not None:
            self._engine.remove(one.slot)
            one.slot = None

    def _leave(self) -> None:
        """Whom nobody waits for any more leaves."""
        for held in (self._running, self._waiting):
            for one in [s for s in held if s.job.cancelled]:
                held.remove(one)
                self._remove(one)
                self.totals.cancelled += 1

    def _admit(self) -> None:
        joining = [len(s.tokens) + HEADROOM for s in self._running if s.slot is not None and not s.slot.length]
        if self._crowded and self._running:
            return
        while self._waiting and len(self._running) < self.limits.sequences:
            one = self._waiting[0]
            need = len(one.tokens) + min(HEADROOM, one.job.max_tokens - one.made)
            if self._running and (
                self._cached() + need > self.limits.kv_tokens
                or not self._engine.fits([], [*joining, *self._growing(), need])
            ):
                return
            self._waiting.popleft()
            try:
                self._begin(one, need)
            except Exception as error:
                self._drop([one], error)
                continue
            joining.append(need)
            self._running.append(one)

    def _cached(self) -> int:
        """Tokens that the caches of all who run will hold after the next step, at the most."""
        return sum(len(s.tokens) for s in self._running)

    def _growing(self) -> list[int]:
        """Room that sequences which run will soon ask for, as if it were caches of their own: a step ahead of need."""
        return [HEADROOM] * sum(1 for s in self._running if s.slot is not None and s.slot.length)

    def _begin(self, one: _Sequence, need: int) -> None:
        job = one.job
        if one.sampler is None:
            mask = job.grammar() if job.grammar is not None else None
            one.sampler = Sampler(job.sampling, job.prompt, self._engine.device, mask)
            one.pieces, one.stops = Pieces(self._tokens.decode, job.prompt), Stops(job.stops)
        one.slot = self._engine.add(need)

    def _plan(self) -> list[tuple[_Sequence, Item]]:
        """What the next pass reads; the youngest leave until the budget has room for it."""
        while True:
            planned = self._wanted()
            room = self._cached() <= self.limits.kv_tokens and self._engine.fits([item for _, item in planned])
            if room or len(self._running) < 2:
                return planned
            self._preempt()

    def _preempt(self) -> None:
        one = self._running.pop()
        self._remove(one)
        if self._scores(one):
            one.prompt.clear()
        self._waiting.appendleft(one)
        self._crowded = True
        self.totals.preempted += 1

    def _wanted(self) -> list[tuple[_Sequence, Item]]:
        planned, room = [], self._most
        for one in self._running:
            if one.left == 1 and room:
                planned.append((one, self._item(one, 1)))
                room -= 1
        for one in self._running:
            if one.left > 1 and room:
                count = min(one.left, room, SCORED if self._scores(one) else room)
                planned.append((one, self._item(one, count)))
                room -= count
        return planned

    def _scores(self, one: _Sequence) -> bool:
        return one.job.wants_prompt and len(one.prompt) < len(one.job.prompt)

    def _item(self, one: _Sequence, count: int) -> Item:
        slot = one.slot
        assert slot is not None
        ends = slot.length + count == len(one.tokens)
        wanted = count if self._scores(one) else int(ends)
        return Item(
            slot, one.tokens[slot.length : slot.length + count], wanted, slot.length + count <= len(one.job.prompt)
        )

    def _step(self, planned: list[tuple[_Sequence, Item]]) -> None:
        try:
            out = self._engine.run([item for _, item in planned])
        except BudgetExceeded as error:
            self._refused(planned, error)
            return
        except NotPackable:
            for one in self._running:  # each is read again, in passes of its own
                one.slot = None
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()
            return
        except Exception as error:
            log.exception("a forward pass failed")
            self._error = f"{type(error).__name__}: {error}"
            failed = [one for one, _ in planned]
            self._running = [one for one in self._running if one not in failed]
            self._drop(failed, ApiError(500, "the model failed on this request", None, "internal_error"))
            return
        self._most, self._error, self._crowded = self.limits.step_tokens, None, False
        self.totals.steps += 1
        for (one, item), logits in zip(planned, out, strict=True):
            if item.is_prompt and not one.made:
                self.totals.prompt_tokens += len(item.tokens)
            try:
                self._heard(one, item, logits)
            except Exception as error:
                if not isinstance(error, ApiError):
                    log.exception("a sequence failed")
                    error = ApiError(500, "the model's answer could not be read", None, "internal_error")
                self._running.remove(one)
                self._drop([one], error)

    def _refused(self, planned: list[tuple[_Sequence, Item]], error: BudgetExceeded) -> None:
        """The budget has no room for this pass after all: fewer tokens, then fewer sequences."""
        read = sum(len(item.tokens) for _, item in planned)
        if read > len(planned):
            self._most = max(len(planned), read // 2)
        elif len(self._running) > 1:
            self._preempt()
        else:
            one = self._running.pop()
            self._drop([one], ApiError(400, str(error), None, "context_length_exceeded"))

    def _heard(self, one: _Sequence, item: Item, logits: Tensor | None) -> None:
        """A pass over a sequence's next tokens has ended."""
        slot = one.slot
        assert slot is not None
        if logits is None:
            return
        prompt: tuple[Scored, ...] = ()
        if self._scores(one):
            self._score(one, slot.length - len(item.tokens), logits)
            if slot.length < len(one.tokens):
                return
            prompt = tuple(one.prompt)
        if not one.job.max_tokens:
            self._finish(one, "length", prompt)
            return
        assert one.sampler is not None
        self._took(one, one.sampler.choose(logits[-1]), prompt)

    def _score(self, one: _Sequence, start: int, logits: Tensor) -> None:
        """The probabilities of a prompt's tokens: of each from what stands before it."""
        top = one.job.sampling.top_logprobs
        if not start:
            one.prompt.append(Scored(one.job.prompt[0]))
        for row, token in zip(logits, one.job.prompt[start + 1 :], strict=False):
            one.prompt.append(scored(row, token, top if top is not None else 0))

    def _took(self, one: _Sequence, chosen: Scored, prompt: tuple[Scored, ...]) -> None:
        job, now = one.job, time.monotonic()
        assert one.pieces is not None and one.stops is not None and one.sampler is not None
        job.first = job.first or now
        job.last = now
        one.made += 1
        self.totals.generated_tokens += 1
        if chosen.token in job.ends:
            self._finish(one, "stop", prompt)
            return
        one.tokens.append(chosen.token)
        piece = one.pieces.push(chosen.token)
        if job.sampling.top_logprobs is not None:
            one.untold.append((chosen, one.decoded))
        one.decoded += len(piece)
        text, stopped = one.stops.push(piece)
        one.shown += len(text)
        if stopped:
            self._finish(one, "stop", prompt, text, cut=True)
        elif one.sampler.is_done:
            self._finish(one, "stop", prompt, text)
        elif one.made >= job.max_tokens:
            self._finish(one, "length", prompt, text)
        elif text or prompt:
            self._events.append((job, Event(text, self._released(one, one.shown), prompt, generated=one.made)))

    def _released(self, one: _Sequence, until: int) -> tuple[Scored, ...]:
        """Tokens whose text begins before `until`, and were not told yet."""
        out = tuple(scored for scored, begins in one.untold if begins < until)
        one.untold = [pair for pair in one.untold if pair[1] >= until]
        return out

    def _finish(self, one: _Sequence, why: str, prompt: tuple[Scored, ...], text: str = "", cut: bool = False) -> None:
        assert one.pieces is not None and one.stops is not None
        if not cut:
            more, cut = one.stops.push(one.pieces.end())
            more += "" if cut else one.stops.end()
            text, one.shown, why = text + more, one.shown + len(more), "stop" if cut else why
        tokens = self._released(one, one.shown if cut else 1 << 60)
        self._running.remove(one)
        self._remove(one)
        self.totals.finished += 1
        self._events.append((one.job, Event(text, tokens, prompt, why, None, one.made)))
