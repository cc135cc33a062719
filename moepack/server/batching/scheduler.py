"""Continuous batching: one thread owns the model, and sequences join and leave between steps.

Each step reads one token of every decoding sequence, then prompt tokens until it has `step_tokens`. How prompts share
these, who joins and who is preempted follows from what is fair between client requests (fairness.py). Where steps wait
for experts' bytes, sequences may decode in turns (turns.py). A sequence takes what the engine keeps of its prompt, and
waits while another one reads the same chunk. If the budget has no room, kept chunks leave, then a sequence is
preempted: it gives up its cache and is read again later.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moepack.pack.errors import NotFiniteError
from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.server.errors import ApiError, failed, not_finite, prompt_too_long, stopping, too_long
from moepack.server.options import UNLIMITED, Limits

from .engine import CacheSlot, Engine, StepInput
from .fairness import UnreadPrompt, claims, gives_way, joins, shares
from .jobs import Job, JobEvent
from .packed_cache import NotPackable
from .prefixes import CHUNK
from .sampling import Sampler, Scored, likeliest_of, scored
from .text import Pieces, Stops
from .tokens import Tokens
from .turns import Turns

log = logging.getLogger("moepack.server")
HEADROOM = 32  # tokens of an answer that must fit before a sequence joins; with less it would soon be preempted
SCORED = 32  # the most prompt tokens of a sequence in a step if their logits are wanted, [tokens, vocabulary]


@dataclass(slots=True)
class Totals:
    """Counts since the server's start."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0  # answers that have begun
    first_seconds: float = 0.0  # the sum of the times from their arrival to their first token
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    not_finite: int = 0  # those of `failed` whose logits were NaN or infinite
    preempted: int = 0
    prefix_queries: int = 0  # tokens of prompts that were looked for among kept chunks
    prefix_hits: int = 0  # those of them that were found


@dataclass(slots=True, eq=False)
class _Sequence:
    """The state of one job."""

    job: Job
    request: int  # number of its client request, in the order of arrival
    number: int  # its own number, in the order of arrival
    tokens: list[int]  # token ids of the prompt and of the answer so far
    pieces: Pieces
    stops: Stops
    sampler: Sampler | None = None  # made when the sequence first runs
    slot: CacheSlot | None = None  # the sequence's cache; None while the sequence waits
    keys: tuple[bytes, ...] = ()  # the prompt's `chunk_keys`; none if all of it must be read
    cached: int = 0  # tokens of the prompt that were taken from kept chunks
    made: int = 0  # tokens generated
    served: int = 0  # the step that last read a token of it
    shown: int = 0  # characters of the answer that were posted
    decoded: int = 0  # characters of the answer so far
    # Scored tokens not posted yet, each with the position where its text begins.
    untold: list[tuple[Scored, int]] = field(default_factory=list)
    prompt: list[Scored] = field(default_factory=list)  # scored tokens of the prompt, as far as the prompt was read

    @property
    def left(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.tokens) - (self.slot.length if self.slot is not None else 0)

    @property
    def decodes(self) -> bool:
        """Whether the next token comes after reading the last one, and not a prompt."""
        return self.left <= 1 and self.made > 0

    @property
    def soon(self) -> int:
        """Tokens of cache that the sequence soon takes beyond those it has."""
        ahead = min(HEADROOM, self.job.max_tokens - self.made)
        return ahead if self.slot and self.slot.length else ahead + len(self.tokens)


class Scheduler:
    """Run jobs on a thread. Any thread may call `submit`, `stop` and `close`, and read `limits` and `totals`."""

    def __init__(
        self, engine: Engine, tokens: Tokens, limits: Limits, post: Callable[[list[tuple[Job, JobEvent]]], None]
    ) -> None:
        """Prepare; `start` starts the thread, on which `post` receives each step's events."""
        self.limits = limits
        self.totals = Totals()
        self.turns = Turns[_Sequence]()
        self._engine = engine
        self._tokens = tokens
        self._post = post
        self._arrived: list[_Sequence] = []
        self._waiting: list[_Sequence] = []  # by number
        self._running: list[_Sequence] = []
        self._events: list[tuple[Job, JobEvent]] = []
        self._requests = itertools.count()
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        self._closing = self._dropping = False
        self._token_limit = limits.step_tokens  # tokens of the next pass; fewer after the budget refused one
        self._crowded = False  # a sequence was preempted: none joins until a pass succeeds
        self._refusing = False  # the budget refused a pass: no chunk is kept until one succeeds
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="moepack-scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # --- from any thread

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._waiting) + len(self._arrived)

    @property
    def cached_tokens(self) -> int:
        """Upper bound of the tokens that running sequences' caches hold after the next step."""
        return sum(len(s.tokens) for s in tuple(self._running))

    def health(self) -> dict[str, object]:
        """Return `ok`, whether the scheduler works, and `error`, why the last pass failed if it did.

        `not_finite` are the sequences that ended because their logits were. They leave `ok` as it is: a prompt that
        reaches a damaged expert does not stop the answers to others, and a restart would not help.
        """
        working = self._thread.is_alive() and self._error is None
        return {"ok": working, "error": self._error, "not_finite": self.totals.not_finite}

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the longest sequence that limits and budget hold now; None if nothing bounds them."""
        context = min(self.limits.context, self.limits.kv_tokens)
        held = self._engine.most_tokens(context) if self._engine.lacks(context) else context
        return held if held < UNLIMITED else None

    def most_answer(self, prompt: int) -> int:
        """The most tokens that can follow a prompt of `prompt` tokens.

        Raises:
            ApiError: if the prompt can never be served; the message names the most tokens that can.
        """
        limits = self.limits
        context = min(self.limits.context, self.limits.kv_tokens)
        if prompt > (most := min(limits.prompt, context - 1)):
            raise prompt_too_long(prompt, most, f"{context} tokens")
        if self._engine.lacks(prompt + 1):
            held = self._engine.most_tokens(prompt)
            raise prompt_too_long(prompt, held - 1, f"{held} tokens, which the memory budget holds now")
        room = context - prompt
        return self._engine.most_tokens(context) - prompt if self._engine.lacks(context) else room

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs of one client request, or none if this raises.

        Raises:
            ApiError: if the queue is full, or the server is stopping.
        """
        request = next(self._requests)
        arrived = [
            _Sequence(
                job,
                request,
                next(self._numbers),
                list(job.prompt),
                Pieces(functools.partial(self._tokens.decode, special=job.shows_special), job.prompt),
                Stops(job.stops),
                keys=() if job.wants_prompt else self._engine.keys(job.prompt),
            )
            for job in jobs
        ]
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise stopping()
            if self.waiting + len(jobs) > max(self.limits.waiting, len(jobs) * (not self.waiting)):
                raise ApiError(429, f"{self.waiting} sequences wait already: try again later", None, "queue_full")
            self._arrived += arrived
            self._condition.notify()

    def stop(self) -> None:
        """Refuse new jobs and drop waiting ones. The thread ends once no sequence runs."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def close(self) -> None:
        """Stop at once, and drop the sequences that still run."""
        self._dropping = True
        self.stop()
        if self._thread.ident:
            self._thread.join()

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._arrived or self._waiting or self._running or self._closing):
                    self._condition.wait()
                arrived = self._arrived
                self._arrived = []
                for one in arrived:
                    self._wait(one)
            if self._closing:
                self._drop(self._waiting, stopping())
                if self._dropping:
                    self._drop(self._running, stopping("this server was stopped"))
                if not self._running:
                    self._post_events()
                    self._engine.close()  # which may write for a while
                    return
            self._drop_cancelled()
            self._admit()
            items = self._plan()
            if items:
                self._step(items)
            self._post_events()

    def _post_events(self) -> None:
        events = self._events
        self._events = []
        if events:
            self._post(events)

    def _drop(self, sequences: list[_Sequence], error: Exception) -> None:
        """End sequences with an error, and empty the list."""
        for one in sequences:
            self._remove(one)
            self.totals.failed += 1
            self._events.append((one.job, JobEvent(error=error, generated=one.made, cached=one.cached)))
        sequences.clear()

    def _remove(self, one: _Sequence) -> None:
        if one.slot is not None:
            self._engine.remove(one.slot)
            one.slot = None

    def _evict_all(self) -> bool:
        """Remove all kept chunks, and return whether there were any."""
        found = self._engine.evict()
        while self._engine.evict():
            pass
        return found

    def _drop_cancelled(self) -> None:
        """Remove the sequences whose clients have gone."""
        for held in (self._running, self._waiting):
            for one in [s for s in held if s.job.cancelled]:
                self.totals.cancelled += 1
                held.remove(one)
                self._remove(one)

    def _admit(self) -> None:
        if self._crowded and self._running:
            return
        while self._waiting:
            one = self._waiting[joins(_requests(self._waiting), _requests(self._running))]
            if not self._makes_room(one):
                return
            self._waiting.remove(one)
            try:
                if one.sampler is None:
                    mask = one.job.grammar() if one.job.grammar is not None else None
                    one.sampler = Sampler(one.job.sampling, one.job.prompt, self._engine.device, mask)
                prompt = len(one.job.prompt)
                one.slot = self._engine.add(one.soon, one.keys, prompt, prompt + one.job.max_tokens)
            except Exception as error:
                self._drop([one], error)
                continue
            self._running.append(one)

    def _makes_room(self, one: _Sequence) -> bool:
        """Evict kept chunks, and preempt others where this one's request runs nothing, until it may join."""
        while self._running:
            joining = [s.soon for s in (*self._running, one)]
            has_place = len(self._running) < self.limits.sequences
            if has_place and self._has_room([], joining, one.soon):
                return True
            fits = has_place and self._has_room([], joining, one.soon, kept=False)
            if fits and self._engine.evict(one.keys):
                continue
            if not claims(one.request, _requests(self._running)):
                return False
            self._preempt()
        return True

    def _has_room(
        self, items: Sequence[StepInput], joining: Sequence[int] = (), more: int = 0, kept: bool = True
    ) -> bool:
        """Whether budget and limits hold a step, `joining` caches, and `more` tokens; if not `kept`, without chunks."""
        tokens = self.cached_tokens + more + (self._engine.kept_tokens(items) if kept else 0)
        return tokens <= self.limits.kv_tokens and self._engine.fits(items, joining, kept)

    def _plan(self) -> list[tuple[_Sequence, StepInput]]:
        """Choose the next inputs.

        Until they fit, evict kept chunks, then keep fewer of theirs, then preempt sequences. If evicting all chunks
        would not help, none is evicted.
        """
        # The most chunks of a sequence that are kept
        keeps = 0 if self._refusing else self.limits.step_tokens // CHUNK + 1
        while True:
            planned = self._next_inputs(keeps)
            items = [item for _, item in planned]
            if self._has_room(items):
                return planned
            if self._has_room(items, kept=False):
                keeps = max(0, keeps - (not self._engine.evict()))
            elif len(self._running) < 2:
                return planned
            else:
                self._preempt()
                self._crowded = True

    def _preempt(self) -> None:
        one = self._running.pop(gives_way(_requests(self._running)))
        self._remove(one)
        if not one.made:  # all of the prompt is read again
            one.cached = 0
            one.prompt.clear()
        self._wait(one)
        self.totals.preempted += 1

    def _wait(self, one: _Sequence) -> None:
        """Return a sequence to its place in the queue."""
        bisect.insort(self._waiting, one, key=lambda one: one.number)

    def _next_inputs(self, keeps: int) -> list[tuple[_Sequence, StepInput]]:
        reading = [one for one in self._running if not one.decodes]
        at_once = None if reading else self._engine.at_once()
        ready = self.turns.choose(self._decoding(), time.monotonic(), at_once)
        decode, given = shares(len(ready), [self._prompt(one, keeps) for one in reading], self._token_limit)
        if decode < len(ready):
            ready = sorted(ready, key=lambda one: one.served)[:decode]
        planned = [(one, self._input(one, 1, keeps)) for one in ready]
        planned += [(reading[n], self._input(reading[n], count, keeps)) for n, count in given]
        return planned

    def _prompt(self, one: _Sequence, keeps: int) -> UnreadPrompt:
        """What a sequence has yet to read."""
        item = self._input(one, one.left, keeps)
        left = len(item.tokens)
        count = self._engine.keeps_next(item)
        return UnreadPrompt(one.request, left, SCORED if self._scores(one) else left, one.keys[:count] or None)

    def _input(self, one: _Sequence, count: int, keeps: int) -> StepInput:
        """Return the next tokens of a sequence, at most `count`, beyond those that are kept."""
        slot = one.slot
        assert slot is not None
        taken = self._engine.kept_ahead(slot, one.left - 1) if one.left > 1 else 0
        start = slot.length + taken
        end = min(start + count, len(one.tokens))
        wanted = end - start if self._scores(one) else int(end == len(one.tokens))
        return StepInput(slot, one.tokens[start:end], wanted, end <= len(one.job.prompt), taken, keeps)

    def _decoding(self) -> list[_Sequence]:
        return [one for one in self._running if one.decodes]

    def _scores(self, one: _Sequence) -> bool:
        return one.job.wants_prompt and len(one.prompt) < len(one.job.prompt)

    def _step(self, planned: list[tuple[_Sequence, StepInput]]) -> None:
        ready = len(self._decoding())
        began = time.monotonic()
        waited = self._engine.waited()
        try:
            out = self._engine.run([item for _, item in planned])
            planned = planned[: len(out)]  # the others wait for the next step
            likeliest: list[int | None] = [None] * len(out)
            if self._engine.at_once() is not None:  # where passes are replayed: one wait for all tokens
                likeliest = likeliest_of([one.sampler for one, _ in planned], out)
        except BudgetExceeded as error:
            self._refused(planned, error)
            return
        except NotPackable:
            for one in self._running:  # from now on each sequence has passes of its own, and is read again
                one.slot = None
                self._wait(one)
            self._running.clear()
            return
        except Exception as error:
            log.exception("a forward pass failed")
            self._error = f"{type(error).__name__}: {error}"
            lost = [one for one, _ in planned]
            self._running = [one for one in self._running if one not in lost]
            self._drop(lost, failed("the model failed on this request"))
            self._evict_all()  # without a budget, memory may have been short
            return
        self._token_limit = self.limits.step_tokens
        self._error = None
        self._crowded = self._refusing = False
        self.totals.steps += 1
        for one, _ in planned:
            one.served = self.totals.steps
        if not any(item.is_prompt for _, item in planned):
            seconds = time.monotonic() - began
            waited = self._engine.waited() - waited
            self.turns.record(len(planned), ready, seconds, waited)
        for (one, item), logits, token in zip(planned, out, likeliest, strict=True):
            if item.is_prompt and not one.made:
                self.totals.prompt_tokens += len(item.tokens)
                one.cached += item.taken
                if self._engine.most_kept and not one.left and not one.job.wants_prompt:
                    self.totals.prefix_queries += len(one.job.prompt)
                    self.totals.prefix_hits += one.cached
            try:
                self._read_logits(one, item, logits, token)
            except NotFiniteError as error:
                self.totals.not_finite += 1
                log.error("a sequence of %d tokens failed: %s", len(one.tokens), error)
                self._running.remove(one)
                self._drop([one], not_finite(str(error)))
                self._engine.forget(one.keys)
            except Exception as error:
                if not isinstance(error, ApiError):
                    log.exception("a sequence failed")
                    error = failed("the model's answer could not be read")
                self._running.remove(one)
                self._drop([one], error)

    def _refused(self, planned: list[tuple[_Sequence, StepInput]], error: BudgetExceeded) -> None:
        """Handle a pass that the budget refused.

        Evict all kept chunks, else halve the tokens of the next pass, else preempt, else drop the sequence.
        """
        read = sum(len(item.tokens) for _, item in planned)
        self._refusing = True
        if self._evict_all():
            return
        if read > len(planned):
            self._token_limit = max(len(planned), read // 2)
        elif len(self._running) > 1:
            self._preempt()
            self._crowded = True
        else:
            self._drop([self._running.pop()], too_long(str(error)))

    def _read_logits(self, one: _Sequence, item: StepInput, logits: Tensor | None, likeliest: int | None) -> None:
        """Score prompt tokens, or choose the next token, by the logits of a sequence's last pass."""
        if logits is None:
            return
        prompt: tuple[Scored, ...] = ()
        if self._scores(one):  # each token by the logits of the token before it
            top = one.job.sampling.top_logprobs or 0
            start = item.slot.length - len(item.tokens)
            if not start:
                one.prompt.append(Scored(one.job.prompt[0]))
            for row, token in zip(logits, one.job.prompt[start + 1 :], strict=False):
                one.prompt.append(scored(row, token, top))
            if one.left:
                return
            prompt = tuple(one.prompt)
        if one.job.max_tokens:
            self._append_token(one, logits[-1], prompt, likeliest)
        else:
            self._finish(one, "length", prompt)

    def _append_token(self, one: _Sequence, logits: Tensor, prompt: tuple[Scored, ...], likeliest: int | None) -> None:
        assert one.sampler is not None
        chosen = one.sampler.choose(logits, likeliest)
        job = one.job
        now = time.monotonic()
        if not job.first:
            job.first = now
            self.totals.first_tokens += 1
            self.totals.first_seconds += now - job.submitted
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
            self._events.append(
                (job, JobEvent(text, self._released(one, one.shown), prompt, generated=one.made, cached=one.cached))
            )

    def _released(self, one: _Sequence, until: int) -> tuple[Scored, ...]:
        """Remove and return unposted scored tokens whose text begins before character `until` of the answer."""
        out = tuple(scored for scored, begins in one.untold if begins < until)
        one.untold = [pair for pair in one.untold if pair[1] >= until]
        return out

    def _finish(self, one: _Sequence, why: str, prompt: tuple[Scored, ...], text: str = "", cut: bool = False) -> None:
        if not cut:
            more, cut = one.stops.push(one.pieces.end())
            more += "" if cut else one.stops.end()
            text = text + more
            one.shown = one.shown + len(more)
            why = "stop" if cut else why
        tokens = self._released(one, one.shown if cut else 1 << 60)
        self._running.remove(one)
        self._remove(one)
        self.totals.finished += 1
        self._events.append((one.job, JobEvent(text, tokens, prompt, why, one.stops.found, None, one.made, one.cached)))


def _requests(sequences: Sequence[_Sequence]) -> list[int]:
    return [one.request for one in sequences]
