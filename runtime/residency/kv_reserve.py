"""KV caches at run time: the bytes of live caches, and a reserve in the budget for those beyond the workload.

`room` encloses every forward pass (forward_wrapper.py). While caches hold no more than the tokens asked for while
loading, the reserve is empty. Beyond them it grows in steps, ahead of need, so that experts are evicted meanwhile; it
shrinks some time after caches have died. A pass that needs more bytes than are reserved waits until experts are evicted
or other passes end, or it is refused before it runs.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from moepack.families.arguments import cache_of, caches_in, inputs, uses_cache
from moepack.pack.errors import InputError
from moepack.pack.spec import align
from moepack.runtime.kv.sizes import cache_bytes, static_length
from moepack.runtime.kv.static import cached_tokens
from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.runtime.planning.fixed import MeasuredNeeds
from moepack.runtime.planning.outputs import Outputs
from moepack.runtime.step.context import PackedCache

from .followed import Followed
from .kv_queue import PassClaim, PassQueue
from .reserves import Reserve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STEP = 128  # the reserve grows by the bytes of this many tokens a sequence at a time: seconds of decoding
LINGER = 0.5  # seconds until unneeded bytes are given back: the next request may need them at once
PATIENCE = 30.0  # seconds as the first in the queue after which a pass is refused
LOOK = 0.005, 0.05  # seconds between a waiting pass's checks without a wake-up: the first in the queue, the others
UNCOUNTED = "the cache of continuous batching is not counted in a budget: load the bundle without one"


class KvBudget:
    """Keeps a model's caches, and the other memory of its passes, inside the budget."""

    def __init__(
        self,
        config: PreTrainedConfig,
        needs: MeasuredNeeds,
        reserve: Reserve,
        budget: int,
        outputs: Outputs | None = None,
    ) -> None:
        """Start from the bytes in `needs`, measured for the workload; `reserve` provides all bytes beyond.

        `config` is the model's. Error messages name `budget`. `outputs` computes the size of unmeasured outputs.
        """
        # how many passes waited for room, and the seconds of that
        self.waits = 0
        self.waited = 0.0
        self._config = config
        self.needs = needs
        self._reserve = reserve
        self._budget = budget
        self.shape = needs.kv  # how a sequence's cache grows
        self._outputs = outputs if needs.workload.prefill_tokens else None
        self._passes: set[PassClaim] = set()
        self._queue = PassQueue()
        self._caches: Followed[int] = Followed(self._queue.wake)  # bytes of live caches
        self.closed = False
        self._lock = threading.RLock()
        self._needed_at = 0.0

    def lacks(self, size: int, tokens: int, length: int) -> int:
        """Return the bytes that the budget lacks for caches of `size` bytes and a pass, with every expert at the base.

        The pass reads `tokens` tokens, and its longest sequence has `length` tokens.
        """
        beside = max(0, self.needs.beside(tokens, length, 1) - self.needs.activations)
        return max(0, size - self.needs.kv_bytes + beside - self._reserve.most)

    @property
    def used(self) -> int:
        """Bytes of live caches; a cache in a running pass counts at its size after the pass."""
        with self._lock:
            return self._used(self._passes)

    def _used(self, passes: Iterable[PassClaim]) -> int:
        self._caches.bury()
        ahead = {p.cache for p in passes}
        held = sum(size for key, (_, size) in self._caches.items() if key not in ahead)
        return held + sum(p.size for p in passes)

    def settle(self) -> None:
        """Give back bytes that caches no longer need, and wake waiting passes. Any thread may call it."""
        with self._lock:
            needed = self._beyond()
            step = self._step(1)
            total = self._reserve.held + self._reserve.coming
            now = time.monotonic()
            keep = align(needed, step) + step if needed else 0
            if total <= keep + step * bool(needed):
                self._needed_at = now
            elif now - self._needed_at > LINGER:
                self._reserve.shrink(total - keep)
            self._queue.wake()

    def recount(self, cache: object) -> None:
        """Count a live cache again, whose bytes became fewer outside a pass, and give back what is not needed."""
        with self._lock:
            if self._caches.of(cache) is not None:
                self._follow(cache)
            self.settle()

    def _beyond(self, also: PassClaim | None = None) -> int:
        """Return the bytes needed beyond those of the workload, for all running passes and for `also`.

        The workload includes the activations of one pass only. Here the activations of all passes count.
        """
        with self._lock:
            passes = [*self._passes, also] if also is not None else [*self._passes]
            beside = max(0, sum(p.beside for p in passes) - self.needs.activations)
            return max(0, self._used(passes) - self.needs.kv_bytes + beside)

    def _step(self, batch: int) -> int:
        return max(1, STEP * batch * self.needs.kv.token_bytes)

    # --- passes

    def end_interrupted(self) -> None:
        """End the claims of this thread that an interruption left. None of its passes runs."""
        me = threading.get_ident()
        with self._lock:
            left = [claim for claim in (*self._passes, *self._queue.waiting) if claim.thread == me]
            for claim in left:
                self._passes.discard(claim)
                self._queue.leave(claim)
            if left:
                self.settle()

    @contextlib.contextmanager
    def room(self, given: dict[str, object]) -> Iterator[Callable[[object], None]]:
        """Enclose a forward pass with these arguments: wait until its cache and activations have room.

        Yields a function to call with the pass's result.

        Raises:
            BudgetExceeded: when there is no room.
        """
        ids = inputs(given)
        batch, tokens = (int(n) for n in ids.shape[:2]) if ids is not None else (1, 0)
        cache = cache_of(given)
        length = tokens
        size = 0
        if type(cache).__name__ == "PagedAttentionCache":
            raise InputError(UNCOUNTED)
        if cache is not None:
            size, length = self._after_pass(cache, tokens, batch)
        elif uses_cache(self._config, given):
            size = self.needs.kv.bytes(tokens, batch)
        returned = self._outputs.bytes(self._config, given, tokens, length, batch) if self._outputs else 0
        beside = self.needs.beside(tokens, length, batch) + returned
        mine = PassClaim(None if cache is None else id(cache), size, beside, returned)
        try:
            self._provide(mine, tokens, length, batch)
        finally:
            with self._lock:
                self._queue.leave(mine)
        caches = {} if cache is None else {id(cache): cache}

        def done(out: object) -> None:
            caches.update((id(made), made) for made in caches_in(out))

        try:
            yield done
        finally:
            with self._lock:
                self._passes.discard(mine)
                for left in caches.values():
                    self._follow(left)
                self.settle()

    def _follow(self, cache: object) -> None:
        """Count a cache until it dies; one that takes no weak references counts only during a pass."""
        self._caches.bury()
        self._caches.follow(cache, cache_bytes(cache))

    def _after_pass(self, cache: object, tokens: int, batch: int) -> tuple[int, int]:
        """Return the bytes and tokens that a cache will have after a pass. A `PackedCache` knows them itself."""
        if isinstance(cache, PackedCache):
            return cache.needed()
        from moepack.runtime.kv.growing import growth  # which imports transformers

        kv = self.needs.kv
        now = cache_bytes(cache)
        if whole := static_length(cache):
            return max(now, kv.bytes(whole, batch)), whole
        before = cached_tokens(cache) or 0
        after = before + tokens
        grows = kv.bytes(after, batch) - kv.bytes(before, batch)
        added, token, alone = growth(cache)
        if tokens != 1:
            return (max(now, kv.bytes(after, batch)) if alone else now + grows), after
        others = 0 if alone else grows - token  # of layers that do not append in place
        with self._lock:
            beyond = self._used(self._passes) + others + added - self.needs.kv_bytes
        if beyond > self._reserve.most:  # nothing ahead of need: the token may fit without
            added = growth(cache, spare=1)[0]
        return now + max(0, others + added), after

    # --- growing

    def _provide(self, mine: PassClaim, tokens: int, length: int, batch: int) -> None:
        """Reserve a pass's bytes, ask for more ahead of need, and count the pass as running.

        While there are too few bytes, wait until experts are evicted, or other passes and caches end.
        """
        while True:
            with self._lock:
                if self._may_run(mine, batch):
                    self._queue.leave(mine)
                    self._passes.add(mine)
                    break
                if self.closed:
                    raise InputError("this model was closed: load the bundle again")
                if self._is_hopeless(mine):
                    if not self._passes:
                        self._reserve.shrink(self._reserve.coming)
                    raise self._refused(mine, tokens, length, batch)
                self.waits += self._queue.enter(mine)
            if mine.first is not None:
                self._reserve.advance()
            mine.wait(LOOK[mine.first is None] if not self._reserve.one_at_a_time else 0.001)
        if mine.began is not None:
            self.waited += time.perf_counter() - mine.began

    def _may_run(self, mine: PassClaim, batch: int) -> bool:
        """Grow the reserve for a pass if need be; return whether the bytes are reserved and the pass may run now.

        A live cache dies only after further passes with it, so a pass with a live cache need not be next in the queue.
        """
        reserve = self._reserve
        step = self._step(batch)
        needed = self._beyond(mine)
        if needed and needed <= reserve.most:
            total = reserve.held + reserve.coming
            wanted = min(reserve.most, align(needed, step) + step)
            if needed + step // 2 > total and wanted > total:
                for size in filter(None, (wanted - total, max(0, needed - total))):
                    with contextlib.suppress(MemoryError):
                        reserve.grow(size)
                        break
            self._needed_at = time.monotonic()
        if needed > reserve.held:
            return False
        return mine.cache in self._caches or self._queue.is_next(mine, self._is_blocked, PATIENCE / 2)

    def _is_blocked(self, mine: PassClaim) -> bool:
        """Return whether a pass lacks room beside running passes and live caches, even with all experts at the base."""
        return self._beyond(mine) > self._reserve.most

    def _is_hopeless(self, mine: PassClaim) -> bool:
        """Return whether to refuse a pass: it is too large, waited too long or is blocked by caches that cannot die."""
        needs = self.needs
        late = mine.first is not None and time.perf_counter() - mine.first > PATIENCE
        if late or mine.size - needs.kv_bytes + max(0, mine.beside - needs.activations) > self._reserve.most:
            return True
        return self._is_blocked(mine) and not self._passes and not self._may_end(mine)

    def _may_end(self, mine: PassClaim) -> bool:
        """Return whether other caches may die while a pass waits. They cannot if only its own thread could drop them.

        If the pass has a live cache, blocked passes may wait for that cache: it does not wait for theirs.
        """
        own = threading.current_thread()
        threads = threading.enumerate()
        if self._reserve.one_at_a_time or all(t is own or t.name.startswith("moepack-") for t in threads):
            return False
        goes_on = mine.cache in self._caches
        stuck = {p.cache for p in self._queue.waiting if self._is_blocked(p)} if goes_on else set()
        return any(key != mine.cache and key not in stuck for key in self._caches)

    def _refused(self, mine: PassClaim, tokens: int, length: int, batch: int) -> BudgetExceeded:
        kv = self.shape
        needs = self.needs
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        if mine.began is not None and not self._is_blocked(mine):
            waited = time.perf_counter() - mine.began
            return BudgetExceeded(
                f"a forward pass over {length} tokens of {sequences} waited {waited:.0f} s for experts or other passes "
                "to leave it room: try again, or load with a larger budget"
            )
        with self._lock:
            caches = self._used([*self._passes, mine]) - mine.size  # bytes of all others
            beside = sum(p.beside for p in self._passes)
        room = self._reserve.most + needs.kv_bytes - caches
        per = (mine.size / kv.bytes(length, batch)) if mine.size else 0.0

        def takes(length: int) -> float:
            read = min(tokens, length)
            here = needs.beside(read, length, batch) + mine.returned * read // max(1, tokens)
            return float(per * kv.bytes(length, batch) + max(0, beside + here - needs.activations))

        fitting = bisect.bisect_right(range(1, length + 1), float(room), key=takes)
        more = max(0, beside + mine.beside - needs.activations)
        running = f"; {len(self._passes)} other passes run" if self._passes else ""
        return BudgetExceeded(
            f"a forward pass over {length} tokens of {sequences} needs {mine.size} bytes of KV cache and {more} "
            "more than is held back for activations: beside the experts at their least and other caches the budget of "
            f"{self._budget} bytes has {max(0, room)}, which holds {fitting} tokens{running}"
        )
