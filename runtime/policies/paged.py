"""`paged`: experts have memory while their layer runs; how many stay on the device, and how (fluxmoe, section 4.3).

The experts' lossless version is in three parts: uncompressed and resident (x), compressed and resident (y), in the
backing store (z), with x + y + z = 1. Pure; paging/ moves the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moepack.pack.errors import InputError
from moepack.pack.spec import Version

from .contract import Event, Interval, Key, Ladder, LiveOptions, Needs, Setting, Wanted, live_entry
from .placements import Placement, Where

RESIDENT, PACKED, STORED = range(3)  # the ladder
RATE = 200.0  # megabytes a second, as in hotness.py


@dataclass(frozen=True, slots=True)
class PagedOptions(LiveOptions):
    """Options of `paged`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "share": ("even",), "stagger": ("yes", "no"), "ahead": ("yes", "no")
    }  # fmt: skip

    alpha: float = 0.0  # the initial share of experts in device memory, above 0 up to 1; 0: by bandwidth (equation 8)
    # The share of experts kept there uncompressed, where there is room; 0 as in the paper's prototype, which leaves
    # memory to the KV cache first
    resident: float = 0.0
    theta: float = 0.9  # alpha grows below this ratio of computing time to loading time, and falls above 1
    interval: float = 0.5  # seconds between changes of alpha
    stagger: str = "yes"  # "yes": a change is one expert of every layer; "no": as many experts of one, for comparison
    ahead: str = "yes"  # whether prompts load the next layer's experts while one layer runs
    rate: float = RATE  # megabytes a second read from the store to become resident; 0 for no limit
    spare_blocks = 0

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not (0 <= self.alpha <= 1 and 0 <= self.resident <= 1 and 0 < self.theta <= 1):
            raise ValueError("alpha and resident are from 0 to 1, theta above 0 up to 1")
        if not self.interval >= 0:
            raise ValueError("interval is from 0")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder: the lossless version in its three places."""
        found = next((v for v in versions if v.entropy_coded), None)
        if found is None:
            raise InputError(f"has no lossless version to page: here are {', '.join(v.name for v in versions)}")
        return [tuple(Placement(found, where) for where in (Where.DEVICE, Where.PACKED, Where.STORED))]


class Paged:
    """The budget-aware residency planner (fluxmoe, Algorithm 2), staggered over layers.

    tau_comp is measured: seconds that decoding steps took without waits. tau_load follows from the bytes that the steps
    needed, by their source, and from the bandwidths measured while loading (6, 9, 10). rho = tau_comp / tau_load then
    reflects the steps' routing, reuse included. Above 1 alpha falls, below theta it grows, by one expert a layer;
    between them nothing changes. At every rho a layer's experts fit its capacity, which is what the KV cache leaves.

    Beyond the paper, a change is dropped when it would move rho across the dead zone: alpha would oscillate. A layer's
    experts stay in the order of calibration's traffic, so that a change moves the coldest and no two swap.
    """

    def __init__(self, setting: Setting, options: PagedOptions | None = None) -> None:
        """Start at `alpha`. Without rates all experts that fit are wanted on the device, and rho stays None."""
        self.options = options = options or PagedOptions()
        self.needs = Needs(interval=min(0.1, options.interval / 4), timings=True, pages_ahead=options.ahead == "yes")
        self._setting = setting
        self._order = [np.argsort(-np.array(row), kind="stable").tolist() for row in setting.traffic]
        alpha = options.alpha
        if not alpha:
            alpha = setting.rates[PACKED] / sum(setting.rates[PACKED:]) if setting.rates else 1.0
        self.held = [max(1, round(alpha * n)) for n in setting.experts]  # experts of each layer wanted on the device
        self.rho: float | None = None  # as of the last interval with decoding steps
        self._before: list[tuple[int, int]] = []
        self._steps, self._computed = 0, 0.0
        self._loaded = [[0, 0] for _ in setting.experts]
        self._last: float | None = None
        self._turn = 0

    @property
    def alpha(self) -> float:
        """The share of experts wanted in device memory."""
        return sum(self.held) / sum(self._setting.experts)

    def decide(self, event: Event) -> Wanted | None:
        """Change alpha when an interval has passed, and keep what fits."""
        if not isinstance(event, Interval):
            return None
        if self._last is None:
            self._last = event.time
        self._steps += event.steps
        self._computed += event.computed
        for mine, new in zip(self._loaded, event.loaded, strict=False):
            mine[:] = [a + b for a, b in zip(mine, new[PACKED:], strict=True)]
        if self._steps and event.time - self._last >= self.options.interval:
            self._last = event.time
            self._adjust(event.capacity)
            self._steps, self._computed = 0, 0.0
            self._loaded = [[0, 0] for _ in self._loaded]
        placed = [self._fit(p, room) for p, room in enumerate(event.capacity)]
        self.held = [max(1, n) for _, n in placed]  # growth starts from what fits
        if placed == self._before:
            return None
        self._before = placed
        wanted = {}
        for rank in range(max(self._setting.experts)):
            for p, (resident, held) in enumerate(placed):
                if rank < held:
                    wanted[p, self._order[p][rank]] = RESIDENT if rank < resident else PACKED
        return wanted

    def _fit(self, p: int, room: int) -> tuple[int, int]:
        """Return how many experts of a layer are uncompressed, and how many in memory, in `room` bytes (12)."""
        whole, packed = self._setting.sizes[p][RESIDENT], self._setting.sizes[p][PACKED]
        held = min(self.held[p], max(0, room) // packed)
        resident = min(held, round(self.options.resident * self._setting.experts[p]))
        return min(resident, max(0, room - held * packed) // max(1, whole - packed)), held

    def _adjust(self, capacity: Sequence[int]) -> None:
        rates = self._setting.rates
        if not rates:
            return
        loads = [[size / self._steps for size in row] for row in self._loaded]
        compute, loading = self._computed / self._steps, self._seconds(loads)
        self.rho = compute / loading if loading else float("inf")
        if self.options.theta <= self.rho <= 1:
            return
        by, longest = (-1, compute / self.options.theta) if self.rho > 1 else (1, loading)
        changes = self._changes(by, capacity)
        if self._seconds(self._moved(loads, changes)) <= longest:
            self.held = [held + change for held, change in zip(self.held, changes, strict=True)]
            self._turn = (int(np.argmax(np.abs(changes))) + 1) % len(changes)

    def _seconds(self, loads: Sequence[Sequence[float]]) -> float:
        return pass_seconds(loads, self._setting.rates[PACKED:], self._setting.together)

    def _changes(self, by: int, capacity: Sequence[int]) -> list[int]:
        """Return the change in each layer's experts: one in each, or as many in one layer, in turns."""
        experts = self._setting.experts
        most = [min(n, max(0, room) // row[PACKED])
                for n, room, row in zip(experts, capacity, self._setting.sizes, strict=True)]  # fmt: skip
        free = [max(0, m - h) if by > 0 else max(0, h - 1) for m, h in zip(most, self.held, strict=True)]
        if self.options.stagger == "yes":
            return [by if n else 0 for n in free]
        turns = [(self._turn + i) % len(free) for i in range(len(free))]
        chosen = next((p for p in turns if free[p]), 0)
        return [by * min(free[p], len(free)) if p == chosen else 0 for p in range(len(free))]

    def _moved(self, loads: Sequence[Sequence[float]], changes: Sequence[int]) -> list[list[float]]:
        """Return the steps' loads after these changes, if a layer's experts were all equally busy."""
        out = []
        for (packed, stored), n, change in zip(loads, self._setting.experts, changes, strict=True):
            size = min(max(change * (packed + stored) / n, -packed), stored)
            out.append([packed + size, stored - size])
        return out

    def worth(self, key: Key) -> float:
        """Rate an expert by its share of calibration's traffic."""
        row = self._setting.traffic[key[0]]
        return float(row[key[1]]) / float(sum(row))


def pass_seconds(layers: Sequence[Sequence[float]], rates: Sequence[float], together: bool = True) -> float:
    """Return the seconds of loading that a pass needs (fluxmoe, equations 6, 9 and 10).

    `layers` are bytes by layer and source: device memory with compressed experts, or the host. `rates` are bytes a
    second by source. Sources that work `together`, as a bus and a GPU, take the time of the slowest; the times of
    sources that share a processor's cores add up.
    """
    times = ([size / rate for size, rate in zip(sizes, rates, strict=True)] for sizes in layers)
    return sum(max(row, default=0.0) if together else sum(row) for row in times)


ENTRY = live_entry("paged", PagedOptions, Paged)
