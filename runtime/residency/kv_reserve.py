"""The KV cache at run time: what live caches take, and a reserve in the budget that stays at or above it.

`room` is around every forward pass (passes.py). Within the tokens asked for while loading nothing happens. Beyond them
the reserve grows in steps, ahead of need, so that experts can be pushed out meanwhile; it shrinks some time after
caches have died. A pass that needs more than is reserved waits for experts to leave, or for other passes to end, or is
refused before it runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from moepack.pack.errors import InputError
from moepack.runtime.planning.fixed import Needs
from moepack.runtime.planning.kv_cache import cache_bytes, static_length

from .reserves import Reserve

STEP = 128  # tokens of every sequence by which the reserve grows at a time: seconds of decoding
LINGER = 0.5  # seconds after which bytes that no cache needs are given back: the next request may come at once
PATIENCE = 30.0  # seconds that a pass waits for experts to leave before it is refused


@dataclass(slots=True, eq=False)
class _Pass:
    """A forward pass that is running: its cache and the bytes that will have, and what it takes beside."""

    cache: int | None
    size: int
    beside: int


class KvWatch:
    """Watches a model's caches, and what its passes take at once.

    Attributes:
        waits: passes that waited for room: for experts to leave, or for other passes to end.
        waited: seconds they did.
    """

    def __init__(self, config: Any, needs: Needs, reserve: Reserve, budget: int) -> None:
        """For a model of this config; `room` is to be around each of its passes."""
        self.waits, self.waited = 0, 0.0
        self._config, self._needs, self._reserve, self._budget = config, needs, reserve, budget
        self._caches: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._dead: deque[int] = deque()  # a weak reference's callback may run anywhere: it takes no lock
        self._passes: set[_Pass] = set()
        self._queue: list[_Pass] = []  # those that wait, the first come first
        self.closed, self._last_end = False, 0.0
        self._lock = threading.RLock()
        self._needed_at = 0.0

    @property
    def used(self) -> int:
        """Bytes of live caches, those that running passes will leave included."""
        with self._lock:
            return self._used(self._passes)

    def _used(self, passes: Iterable[_Pass]) -> int:
        self._bury()
        ahead = {p.cache for p in passes}
        held = sum(size for key, (_, size) in self._caches.items() if key not in ahead)
        return held + sum(p.size for p in passes)

    def settle(self) -> None:
        """Give back what caches no longer need. Any thread may call it, at any time."""
        with self._lock:
            needed, step = self._beyond(), self._step(1)
            total, now = self._reserve.held + self._reserve.coming, time.monotonic()
            keep = _up(needed, step) + step if needed else 0
            if total <= keep + step * bool(needed):
                self._needed_at = now
            elif now - self._needed_at > LINGER:
                self._reserve.shrink(total - keep)

    def _bury(self) -> None:
        while self._dead:
            key = self._dead.popleft()
            if key in self._caches and self._caches[key][0]() is None:
                del self._caches[key]

    def _beyond(self, also: _Pass | None = None) -> int:
        """Bytes needed beyond those asked for while loading, with all passes that run and one more.

        One pass within the workload finds its activations held back. Of several at once, what all of them take counts.
        """
        with self._lock:
            passes = [*self._passes, also] if also is not None else [*self._passes]
            beside = max(0, sum(p.beside for p in passes) - self._needs.activations)
            return max(0, self._used(passes) - self._needs.kv_bytes + beside)

    def _step(self, batch: int) -> int:
        return max(1, STEP * batch * self._needs.kv.token_bytes)

    # --- passes

    @contextlib.contextmanager
    def room(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
        """Around a forward pass with these arguments: its cache and activations have room before it begins.

        What it yields is told the pass's result.

        Raises:
            InputError: when they cannot have it.
        """
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        batch, tokens = (int(n) for n in ids.shape[:2]) if ids is not None and ids.ndim >= 2 else (1, 0)
        cache, length, size = _cache(kwargs), tokens, 0
        if cache is not None:
            size, length = self._foretold(cache, tokens, batch)
        elif _uses_cache(self._config, kwargs):
            size = self._needs.kv.bytes(tokens, batch)
        mine = _Pass(None if cache is None else id(cache), size, self._needs.beside(tokens, length, batch))
        try:
            self._provide(mine, tokens, length, batch)
        finally:
            with self._lock:
                if mine in self._queue:
                    self._queue.remove(mine)
        caches = {} if cache is None else {id(cache): cache}

        def done(out: Any) -> None:
            found = out if isinstance(out, tuple) else (getattr(out, "past_key_values", None),)
            caches.update((id(made), made) for made in found if hasattr(made, "get_seq_length"))

        try:
            yield done
        finally:
            with self._lock:
                self._passes.discard(mine)
                self._last_end = time.perf_counter()
                for key, left in caches.items():
                    self._follow(key, left)
                self.settle()

    def _follow(self, key: int, cache: Any) -> None:
        try:
            reference = weakref.ref(cache, partial(_died, self._dead, key))
        except TypeError:  # a kind that cannot be followed: counted while it is in a pass
            return
        self._bury()
        self._caches[key] = reference, cache_bytes(cache)

    def _foretold(self, cache: Any, tokens: int, batch: int) -> tuple[int, int]:
        """Bytes and tokens of a cache after a pass."""
        kv, now = self._needs.kv, cache_bytes(cache)
        before = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        whole = static_length(cache)
        if whole:
            return max(now, kv.bytes(whole, batch)), whole
        after = before + tokens
        return now + kv.bytes(after, batch) - kv.bytes(before, batch), after

    # --- growing

    def _provide(self, mine: _Pass, tokens: int, length: int, batch: int) -> None:
        """See that what a pass needs is reserved, and ask for more where that comes near; then it counts as running.

        Where it is not, the pass waits: for experts to leave, or for passes that run to give theirs back.
        """
        reserve, step = self._reserve, self._step(batch)
        began: float | None = None
        while True:
            with self._lock:
                needed = self._beyond(mine)
                possible = needed <= reserve.most
                if needed and possible:
                    total = reserve.held + reserve.coming
                    wanted = min(reserve.most, _up(needed, step) + step)
                    if needed + step // 2 > total and wanted > total:
                        self._grow(wanted - total, max(0, needed - total))
                    self._needed_at = time.monotonic()
                if needed <= reserve.held and (not self._queue or self._queue[0] is mine):
                    self._passes.add(mine)
                    break
                if self.closed:
                    raise InputError("this model was closed: load the bundle again")
                since = max(began or 0.0, self._last_end)  # while passes end, it may still be this one's turn
                over = began is not None and time.perf_counter() - since > PATIENCE
                if over or not (possible or self._passes or self._queue):
                    if not self._passes:
                        reserve.shrink(reserve.coming)
                    raise self._refused(mine, tokens, length, batch)
                if began is None:
                    began = time.perf_counter()
                    self.waits += 1
                    self._queue.append(mine)
            reserve.advance()
            time.sleep(0.0005)
        if began is not None:
            self.waited += time.perf_counter() - began

    def _grow(self, wanted: int, least: int) -> None:
        for size in (wanted, least):
            try:
                if size:
                    self._reserve.grow(size)
                return
            except MemoryError:
                continue

    def _refused(self, mine: _Pass, tokens: int, length: int, batch: int) -> InputError:
        kv, needs = self._needs.kv, self._needs
        with self._lock:
            caches = self._used([*self._passes, mine]) - mine.size  # the others'
            beside = sum(p.beside for p in self._passes)
        room = self._reserve.most + needs.kv_bytes - caches
        per = (mine.size / kv.bytes(length, batch)) if mine.size else 0.0

        def takes(middle: int) -> float:
            here = needs.beside(min(tokens, middle), middle, batch)
            return per * kv.bytes(middle, batch) + max(0, beside + here - needs.activations)

        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if takes(middle) <= room else (low, middle - 1)
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        more = max(0, beside + mine.beside - needs.activations)
        running = f"; {len(self._passes)} other passes run" if self._passes else ""
        return InputError(
            f"a forward pass over {length} tokens of {sequences} needs {mine.size} bytes of KV cache and {more} "
            "more than is held back for activations: beside the experts at their least and other caches the budget of "
            f"{self._budget} bytes has {max(0, room)}, which holds {low} tokens{running}"
        )


def _died(dead: deque[int], key: int, _: object) -> None:
    dead.append(key)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _cache(kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get("past_key_values")
    return kwargs.get("cache_params") if cache is None else cache


def _uses_cache(config: Any, kwargs: dict[str, Any]) -> bool:
    wanted = kwargs.get("use_cache")
    return bool(getattr(config.get_text_config(), "use_cache", True) if wanted is None else wanted)
