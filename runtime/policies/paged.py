"""`paged`: the lossless version, decoded before its layer runs; how much stays in memory (fluxmoe, section 4.3). Pure.

Of all experts, a share x is uncompressed in memory, a share y compressed in memory, and a share z in the backing store
alone: x + y + z = 1. Passes wait for what they need (`LayerReached`). What they decode stays until its memory is
needed, at least two layers' experts (the paper's window). A version that is not entropy-coded has no compressed form:
y is 0, and all of the memory holds what was read.

With `lo=pinned` a GPU decodes in place, no pass waits, and coded bytes move beside passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.spec import Version, lossless

from .contract import (
    Changes,
    Event,
    Interval,
    Key,
    Ladder,
    LayerReached,
    LiveOptions,
    LivePolicy,
    Needs,
    Setting,
    Wanted,
    bytes_of_layers,
    live_entry,
)
from .heat import busiest
from .mixed_cache import MixedCache
from .placements import STORED, Placement, Where

# placements: indices into the ladder of experts in memory
DECODED = 0
CODED = 1
WINDOW = 2  # layers whose decoded experts memory always holds (fluxmoe, section 3.1)
STALE = 4  # passes without use after which an expert leaves before others
MOST = 0.5  # a pass that needs this share of a layer's experts, or more, probably needs most of the next layer's too
NEWCOMERS = 2  # experts whose coded bytes begin to come each time that their layer is reached


@dataclass(frozen=True, slots=True)
class PagedOptions(LiveOptions):
    """Options of `paged`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "stagger": ("yes", "no"),
        "ahead": ("yes", "no"),
        "lo": ("stored", "pinned"),
    }
    keeps_low = True
    spare_blocks = 0
    layers_held = WINDOW

    # The initial share of experts whose bytes are in memory, coded, up to 1; 0 chooses by bandwidths (equation 8), and
    # all that fit where nothing is coded
    alpha: float = 0.0
    # The share of experts kept uncompressed in memory, if there is room; 0 as in the paper's prototype, which leaves
    # memory to the KV cache first
    resident: float = 0.0
    theta: float = 0.9  # alpha grows if computing time / loading time is below theta, and falls if it is above 1
    interval: float = 0.5  # seconds between changes of alpha
    stagger: str = "yes"  # "yes": alpha changes by one expert of every layer; "no": by as many of one layer, to compare
    ahead: str = "yes"  # whether prompts have the next layer's experts loaded while a layer runs
    # Where experts are that memory does not hold: in the backing store, or on a GPU entropy-coded in pinned host
    # memory. Then no pass waits, alpha is what fits or what is asked for, and nothing is loaded ahead
    lo: str = "stored"

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not (0 <= self.alpha <= 1 and 0 <= self.resident <= 1 and 0 < self.theta <= 1):
            raise ValueError("alpha and resident must be from 0 to 1, theta above 0 and at most 1")
        if not self.interval >= 0:
            raise ValueError("interval must be at least 0")
        for field in fields(self) if self.lo == "pinned" else ():
            if field.name in ("theta", "stagger", "ahead") and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} needs passes that wait, and no pass waits under lo=pinned")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder: the lossless version in memory, coded there where it has such a form, and its `lo`."""
        found = lossless(versions)
        if found is None:
            raise InputError(f"has no lossless version to page: here are {', '.join(v.name for v in versions)}")
        coded = (Placement(found, Where.PACKED),) if found.entropy_coded else ()
        if self.lo == "stored":
            return [(Placement(found), *coded, STORED)]
        if not coded:
            raise InputError(
                f"lo=pinned needs entropy-coded weights, and {found.name} is not: name hotness:lo={found.name}@pinned"
            )
        return [(Placement(found), *coded, Placement(found, Where.PACKED_PINNED))]

    @property
    def on_demand(self) -> bool:
        """Whether `lo` is `stored`."""
        return self.lo == "stored"

    @property
    def by_rates(self) -> bool:
        """Whether `lo` is `stored`: alpha follows the bandwidths of memory and the backing store."""
        return self.lo == "stored"


def calibrated(setting: Setting) -> Callable[[Key], float]:
    """Return a function from an expert to its share of its layer's traffic in calibration."""
    shares = [np.array(row) / sum(row) for row in setting.traffic]
    return lambda key: float(shares[key[0]][key[1]])


class Shares:
    """How many experts of each layer have their coded bytes in memory: the residency planner (fluxmoe, Algorithm 2).

    tau_comp, the seconds that decoding steps took without waits, is measured. tau_load is computed from the bytes for
    which the steps waited, by source, and from the sources' bandwidths (equations 6, 9, 10; on one processor their
    times add up). So their ratio rho = tau_comp / tau_load reflects the steps' routing, with reuse. If rho is above 1,
    alpha falls by one expert a layer; if rho is below theta, alpha grows likewise; between them (the dead zone) nothing
    changes. At every rho a layer's experts fit its bytes, which are what the KV cache leaves.

    Beyond the paper, a change that would move rho across the dead zone is dropped: alpha would oscillate. A layer's
    experts stay in the order of calibration's traffic, so a change moves the experts with the least and swaps none.
    """

    def __init__(self, setting: Setting, options: PagedOptions) -> None:
        """Start at `alpha`, or by the bandwidths; without these all that fit are wanted, and rho stays `None`."""
        self.options = options
        self.order = [np.argsort(-np.array(row), kind="stable").tolist() for row in setting.traffic]
        self.rho: float | None = None  # as of the last interval with decoding steps
        self._setting = setting
        self._rates = tuple(setting.rates[CODED:])
        alpha = options.alpha
        if not alpha:
            alpha = self._rates[0] / sum(self._rates) if self._rates else 1.0
        self.held = [max(1, round(alpha * n)) for n in setting.experts]  # experts of each layer wanted in memory
        self._clear()
        self._last: float | None = None
        self._turn = 0

    def _clear(self) -> None:
        self._steps = 0
        self._computed = 0.0
        self._loaded = [[0, 0] for _ in self._setting.experts]

    @property
    def alpha(self) -> float:
        """The share of experts wanted in memory."""
        return sum(self.held) / sum(self._setting.experts)

    def fit(self, capacity: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many experts of each layer fit its bytes: uncompressed ones, and all in memory (equation 12)."""
        return [self._fit(p, room) for p, room in enumerate(capacity)]

    def _fit(self, p: int, room: int) -> tuple[int, int]:
        whole = self._setting.sizes[p][DECODED]
        coded = self._setting.sizes[p][CODED]
        held = min(self.held[p], max(0, room) // coded)
        resident = min(held, round(self.options.resident * self._setting.experts[p]))
        return min(resident, max(0, room - held * coded) // max(1, whole - coded)), held

    def placed(self, fitting: Sequence[tuple[int, int]]) -> dict[Key, int]:
        """Return the placements of as many experts of each layer as `fit` returned: one of each layer in turn."""
        wanted: dict[Key, int] = {}
        for rank in range(max(self._setting.experts)):
            for p, (resident, held) in enumerate(fitting):
                if rank < held:
                    wanted[p, self.order[p][rank]] = DECODED if rank < resident else CODED
        return wanted

    def measured(self, event: Interval, capacity: Sequence[int]) -> None:
        """Add an interval's sums, and change alpha once `options.interval` has passed; `capacity` are layers' bytes."""
        if self._last is None:
            self._last = event.time
        self._steps += event.steps
        self._computed += event.computed
        for mine, new in zip(self._loaded, event.loaded, strict=False):
            mine[:] = [a + b for a, b in zip(mine, new[CODED:], strict=True)]
        if self._steps and event.time - self._last >= self.options.interval:
            self._last = event.time
            self._adjust(capacity)
            self._clear()
        if self._rates:
            self.held = [max(1, held) for _, held in self.fit(capacity)]  # growth starts from what fits

    def _adjust(self, capacity: Sequence[int]) -> None:
        if not self._rates:
            return
        loads = [[size / self._steps for size in row] for row in self._loaded]
        compute = self._computed / self._steps
        loading = pass_seconds(loads, self._rates)
        self.rho = compute / loading if loading else float("inf")
        if self.options.theta <= self.rho <= 1:
            return
        by, longest = (-1, compute / self.options.theta) if self.rho > 1 else (1, loading)
        changes = self._changes(by, capacity)
        if pass_seconds(self._moved(loads, changes), self._rates) <= longest:
            self.held = [held + change for held, change in zip(self.held, changes, strict=True)]
            self._turn = (int(np.argmax(np.abs(changes))) + 1) % len(changes)

    def _changes(self, by: int, capacity: Sequence[int]) -> list[int]:
        """Return the change in each layer's number of experts: one in each, or all of them in one layer, in turn."""
        experts = self._setting.experts
        sizes = self._setting.sizes
        most = [min(n, max(0, room) // row[CODED]) for n, room, row in zip(experts, capacity, sizes, strict=True)]
        free = [max(0, m - h) if by > 0 else max(0, h - 1) for m, h in zip(most, self.held, strict=True)]
        if self.options.stagger == "yes":
            return [by if n else 0 for n in free]
        turns = [(self._turn + i) % len(free) for i in range(len(free))]
        chosen = next((p for p in turns if free[p]), 0)
        return [by * min(free[p], len(free)) if p == chosen else 0 for p in range(len(free))]

    def _moved(self, loads: Sequence[Sequence[float]], changes: Sequence[int]) -> list[list[float]]:
        out = []
        for (coded, stored), n, change in zip(loads, self._setting.experts, changes, strict=True):
            size = min(max(change * (coded + stored) / n, -coded), stored)
            out.append([coded + size, stored - size])
        return out


def pass_seconds(layers: Sequence[Sequence[float]], rates: Sequence[float]) -> float:
    """Return the seconds of loading that a pass needs (fluxmoe, equations 6, 9 and 10).

    `layers` are bytes by layer and source, `rates` bytes a second by source. Sources share a processor's cores, so that
    their times add up, where a bus and a GPU would take the time of the slower one.
    """
    return sum(size / rate for sizes in layers for size, rate in zip(sizes, rates, strict=True))


class _Decoded(MixedCache):
    """Decoded experts. Layers run in turn, so that the last one used is needed again the latest: it leaves first.

    Before it leave experts that were prefetched in vain, and those that the last STALE passes did not use: both are at
    the front of `held`. Least recently used would never find an expert where a pass needs more than there is room for.
    """

    def __init__(self, sizes: Sequence[int], most: Sequence[Sequence[int]] | None) -> None:
        """Start empty. `sizes` [layers] are an expert's bytes; `most` as in `MixedCache`."""
        super().__init__([[size, 0] for size in sizes], most=most)
        self.layers_run = 0
        self._when: dict[Key, int] = {}

    def leaving(self) -> Iterator[Key]:
        keys = list(self.held)
        oldest = self.layers_run - STALE * len(self._sizes)
        first = 0
        while first < len(keys) and (not self._used[keys[first]] or self._when[keys[first]] < oldest):
            yield keys[first]
            first += 1
        yield from reversed(keys[first:])

    def _put(self, key: Key, placement: int) -> None:
        super()._put(key, placement)
        self._when[key] = self.layers_run

    def _touched(self, layer: int, wants: dict[int, int]) -> Changes:  # type: ignore[override]
        self._when |= {(layer, expert): self.layers_run for expert in wants}
        return super()._touched(layer, wants)

    def drop(self, key: Key) -> int:
        self._when.pop(key, None)
        return super().drop(key)


class Paged:
    """Experts decoded, or read, when their layer is reached; a pass that needs many has the next layer's prefetched."""

    def __init__(self, setting: Setting, options: PagedOptions) -> None:
        self.needs = Needs(options.interval / 4, layers=True, timings=True)
        self._setting = setting
        self._options = options
        self._base = setting.base
        self._is_coded = setting.base > CODED
        self.shares = Shares(setting, options) if self._is_coded else None
        sizes = [int(row[DECODED]) for row in setting.sizes]
        self._window = bytes_of_layers(setting.sizes, setting.experts, WINDOW)
        self._sizes = np.array([row[CODED] if self._is_coded else 0 for row in setting.sizes], np.int64)
        self._whole = np.array(sizes, np.int64)
        self._cache = _Decoded(sizes, setting.most)
        self._all = sum(n * size for n, size in zip(setting.experts, sizes, strict=True))
        # [layers, the most experts of one]: whose coded bytes are in memory, or on their way; and which experts are the
        # share that is kept uncompressed. Single arrays, because their bytes are summed several times a layer
        shape = len(setting.experts), max(setting.experts)
        self._coded = np.zeros(shape, np.bool_)
        self._stays = np.zeros(shape, np.bool_)
        self._began = False
        self.worth = calibrated(setting)

    @property
    def alpha(self) -> float:
        """The share of experts wanted in memory."""
        return self.shares.alpha if self.shares is not None else 1.0

    def decide(self, event: Event) -> Wanted | None:
        """Return what a layer needs and what leaves for it; before any token, the experts of the shares x and y."""
        if isinstance(event, LayerReached):
            return self._reached(event)
        if not isinstance(event, Interval):
            return None
        if self.shares is not None:
            self.shares.measured(event, self._beside(event.capacity))
        if self._began:
            return None
        self._began = True
        return self._first(event.capacity)

    def _beside(self, capacity: Sequence[int]) -> list[int]:
        """Return the bytes that each layer's experts may take beside the window."""
        share = -(-self._window // len(capacity))
        return [room - share for room in capacity]

    def _first(self, capacity: Sequence[int]) -> dict[Key, int]:
        if self.shares is None:
            order = busiest([np.array(row) for row in self._setting.traffic])
            return self._cache.fill(dict.fromkeys(order, DECODED), self._room(capacity))
        wanted = self.shares.placed(self.shares.fit(self._beside(capacity)))
        for key, placement in wanted.items():
            (self._stays if placement == DECODED else self._coded)[key] = True
        return wanted

    def _taken(self) -> int:
        coded = np.count_nonzero(self._coded, axis=1) @ self._sizes
        return int(coded + np.count_nonzero(self._stays, axis=1) @ self._whole)

    def _room(self, capacity: Sequence[int]) -> int:
        room = sum(capacity) - self._taken()
        if self._is_coded or not self._options.alpha:
            return room
        return min(room, max(self._window, int(self._options.alpha * self._all)))

    def _reached(self, event: LayerReached) -> Changes:
        self._began = True  # a policy made anew after an interruption has nothing to place before passes
        layer = event.layer
        used = event.counts.nonzero()[0]
        if event.placed is not None and event.coming is not None:
            self._see(layer, np.array(event.placed), np.array(event.coming))
        self._cache.layers_run += 1
        gone = self._yield(sum(event.capacity), {(layer, int(e)) for e in used})
        needed = [e for e in used[np.argsort(-event.counts[used], kind="stable")].tolist() if not self._stays[layer][e]]
        beside = self._newcomers(event, gone, set(needed)) if self.shares is not None else {}
        room = self._room(event.capacity)
        wants = dict.fromkeys(needed, DECODED)
        cached = self._cache.serve(layer, wants, room, event.placed, event.coming)
        later = layer + 1
        if self._options.ahead == "yes" and len(used) >= MOST * len(event.counts) and later < len(self._coded):
            stays = self._stays[later]
            # What yields now is not decoded ahead: one answer would keep the bytes that are counted as gone beneath it
            soon = {e: DECODED for e in self._order(later) if not stays[e] and (later, e) not in gone}
            cached |= self._cache.foresee(later, soon, room, cached)
        changes = Changes(gone | {key: self._at(key, v) for key, v in cached.items()})
        changes.beside = beside
        return changes

    def _order(self, layer: int) -> list[int]:
        if self.shares is not None:
            return list(self.shares.order[layer])
        return list(range(self._setting.experts[layer]))

    def _at(self, key: Key, cached: int) -> int:
        if cached == DECODED:
            return DECODED
        return CODED if self._coded[key[0]][key[1]] else self._base

    def _see(self, layer: int, placed: npt.NDArray[np.int64], coming: npt.NDArray[np.int64]) -> None:
        """Note where a layer's experts are, some of which the KV cache may have pushed out."""
        if self._is_coded:
            coded = self._coded[layer, : len(placed)]
            coded &= placed != self._base
            coded |= (placed == CODED) | (coming == CODED)
        stays = self._stays[layer, : len(placed)]
        stays &= (placed == DECODED) | (coming == DECODED)

    def _yield(self, room: int, needed: set[Key]) -> dict[Key, int]:
        """Put experts at the base until the window has room; the shares x and then y yield, the coldest first.

        Coded bytes of a decoded expert stay beneath it, so both go. What this layer needs stays: coded, and decoded, it
        takes less than the window.
        """
        gone: dict[Key, int] = {}
        for rows, sizes in ((self._stays, self._whole), (self._coded, self._sizes)):
            over = self._taken() + self._window - room
            if over <= 0:
                break
            keys = [(p, e) for p, row in enumerate(rows) for e in np.flatnonzero(row).tolist()]
            for key in sorted(set(keys) - needed, key=self.worth):
                if over <= 0:
                    break
                rows[key[0]][key[1]] = False
                over -= int(sizes[key[0]])
                if key in self._cache.held:
                    self._cache.drop(key)
                gone[key] = self._base
        return gone

    def _newcomers(self, event: LayerReached, gone: dict[Key, int], needed: set[int]) -> dict[Key, int]:
        """Let a layer's coded experts become as many as the planner wants; return those that come beside passes."""
        assert self.shares is not None
        layer = event.layer
        count = self._setting.experts[layer]
        coded = self._coded[layer, :count]
        placed = event.placed
        coming = event.coming
        wanted = np.zeros(count, np.bool_)
        wanted[self.shares.order[layer][: self.shares.held[layer]]] = True
        for expert in np.flatnonzero(coded & ~wanted).tolist():
            if expert not in needed and (layer, expert) not in self._cache.held:
                coded[expert] = False
                gone[layer, expert] = self._base
        if placed is None or coming is None:
            return {}
        absent = np.flatnonzero(wanted & ~coded & ~self._stays[layer, :count] & (np.array(placed) == self._base))
        beside: dict[Key, int] = {}
        room = sum(event.capacity) - self._taken() - self._window
        for expert in absent.tolist():
            if len(beside) == NEWCOMERS or room < self._sizes[layer]:
                break
            if expert not in needed and coming[expert] < 0 and (layer, expert) not in self._cache.held:
                coded[expert] = True
                beside[layer, expert] = CODED
                room -= int(self._sizes[layer])
        return beside


class PagedInPlace:
    """Coded bytes on a GPU, as many as fit; all are in pinned host memory, and no pass waits."""

    def __init__(self, setting: Setting, options: PagedOptions) -> None:
        self.needs = Needs(min(0.1, options.interval / 4))
        self.shares = Shares(setting, options)
        self.worth = calibrated(setting)
        self._before: list[tuple[int, int]] = []

    @property
    def alpha(self) -> float:
        """The share of experts wanted on the device."""
        return self.shares.alpha

    def decide(self, event: Event) -> Wanted | None:
        """Return the placements that fit, those with the most traffic in calibration; `None` if they are the same."""
        if not isinstance(event, Interval):
            return None
        placed = self.shares.fit(event.capacity)
        if placed == self._before:
            return None
        self._before = placed
        return self.shares.placed(placed)


def _make(setting: Setting, options: PagedOptions) -> LivePolicy:
    return Paged(setting, options) if options.on_demand else PagedInPlace(setting, options)


ENTRY = live_entry("paged", PagedOptions, _make)
