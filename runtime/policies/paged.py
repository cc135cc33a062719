"""`paged`: the lossless version, in memory while a layer runs; how much stays on the device (fluxmoe, section 4.3).

Of all experts, a share x is uncompressed on the device, a share y compressed on the device, and a share z in the
backing store alone: x + y + z = 1. A version that is not entropy-coded has no compressed form: y is 0, and what the
device holds is served as it is. The policy is pure; paging/ moves the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from moepack.pack.errors import InputError
from moepack.pack.spec import Version, lossless

from .contract import Event, Interval, Key, Ladder, LiveOptions, Needs, Setting, Wanted, live_entry
from .placements import Placement, Where, paged_places

RESIDENT = 0  # a placement: the index into the ladder of experts that are uncompressed on the device
RATE = 200.0  # megabytes a second of copies, as in hotness.py


@dataclass(frozen=True, slots=True)
class PagedOptions(LiveOptions):
    """Options of `paged`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "stagger": ("yes", "no"),
        "ahead": ("yes", "no"),
        "lo": ("stored", "pinned"),
    }

    alpha: float = 0.0  # the initial share of experts in device memory, up to 1; 0 chooses by bandwidths (equation 8)
    # The share of experts kept uncompressed in device memory, if there is room; 0 as in the paper's prototype, which
    # leaves memory to the KV cache first
    resident: float = 0.0
    theta: float = 0.9  # alpha grows if computing time / loading time is below theta, and falls if it is above 1
    interval: float = 0.5  # seconds between changes of alpha
    stagger: str = "yes"  # "yes": alpha changes by one expert of every layer; "no": by as many of one layer, to compare
    ahead: str = "yes"  # whether prompts load the next layer's experts while a layer runs
    # Where experts are that the device does not hold: in the backing store, or on a GPU entropy-coded in pinned host
    # memory. Then no step waits for the host, alpha is what fits or what is asked for, and nothing is loaded ahead
    lo: str = "stored"
    rate: float = RATE  # megabytes a second read from the store to become resident; 0 sets no limit
    spare_blocks = 0

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not (0 <= self.alpha <= 1 and 0 <= self.resident <= 1 and 0 < self.theta <= 1):
            raise ValueError("alpha and resident must be from 0 to 1, theta above 0 and at most 1")
        if not self.interval >= 0:
            raise ValueError("interval must be at least 0")
        for field in fields(self) if self.lo == "pinned" else ():
            if field.name in ("theta", "stagger", "ahead") and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} needs a window and its rates, and lo=pinned has none")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder: the lossless version on the device, packed there where it has such a form, and stored."""
        found = lossless(versions)
        if found is None:
            raise InputError(f"has no lossless version to page: here are {', '.join(v.name for v in versions)}")
        if self.lo == "pinned" and not found.entropy_coded:
            raise InputError(
                f"lo=pinned needs entropy-coded weights, and {found.name} is not: name hotness:lo={found.name}@pinned"
            )
        other = Where.STORED if self.lo == "pinned" else Where.PACKED_PINNED
        return [tuple(Placement(found, where) for where in (Where.DEVICE, *paged_places(found)) if where is not other)]

    @property
    def keeps_low(self) -> bool:
        """Whether `lo` is "pinned": the coded bytes of all experts stay there."""
        return self.lo == "pinned"


class Paged:
    """The budget-aware residency planner (fluxmoe, Algorithm 2), staggered over layers.

    tau_comp, the seconds that decoding steps took without waits, is measured. tau_load is computed from the bytes that
    the steps needed of each source, and from the bandwidths measured while loading (equations 6, 9, 10). So their ratio
    rho = tau_comp / tau_load reflects the steps' routing, with reuse. If rho is above 1, alpha falls by one expert a
    layer; if rho is below theta, alpha grows likewise; between them (the dead zone) nothing changes. At every rho a
    layer's experts fit its capacity, which is what the KV cache leaves.

    Beyond the paper, a change that would move rho across the dead zone is dropped: alpha would oscillate. A layer's
    experts stay in the order of calibration's traffic, so a change moves the experts with the least and swaps none.
    """

    def __init__(self, setting: Setting, options: PagedOptions | None = None) -> None:
        """Start at `alpha`. Without measured rates all experts that fit are wanted on the device; rho stays `None`."""
        self.options = options = options or PagedOptions()
        self.needs = Needs(interval=min(0.1, options.interval / 4), timings=True, pages_ahead=options.ahead == "yes")
        self._setting = setting
        self._packed = setting.base - 1  # the placement of experts in memory: RESIDENT where there is no packed form
        self._order = [np.argsort(-np.array(row), kind="stable").tolist() for row in setting.traffic]
        alpha = options.alpha
        rates = setting.rates[self._packed :]
        if not alpha:
            alpha = rates[0] / sum(rates) if rates and rates[0] < float("inf") else 1.0
        self.held = [max(1, round(alpha * n)) for n in setting.experts]  # experts of each layer wanted on the device
        self.rho: float | None = None  # as of the last interval with decoding steps
        self._before: list[tuple[int, int]] = []
        self._steps = 0
        self._computed = 0.0
        self._loaded = [[0, 0] for _ in setting.experts]
        self._last: float | None = None
        self._turn = 0

    @property
    def alpha(self) -> float:
        """The share of experts wanted in device memory."""
        return sum(self.held) / sum(self._setting.experts)

    def decide(self, event: Event) -> Wanted | None:
        """Change alpha when an interval has passed; return the placements that fit, or `None` if they are the same."""
        if not isinstance(event, Interval):
            return None
        if self._last is None:
            self._last = event.time
        self._steps += event.steps
        self._computed += event.computed
        for mine, new in zip(self._loaded, event.loaded, strict=False):
            mine[:] = [a + b for a, b in zip(mine, new[self._packed :], strict=True)]
        if self._steps and event.time - self._last >= self.options.interval:
            self._last = event.time
            self._adjust(event.capacity)
            self._steps = 0
            self._computed = 0.0
            self._loaded = [[0, 0] for _ in self._loaded]
        placed = [self._fit(p, room) for p, room in enumerate(event.capacity)]
        if self._setting.rates:
            self.held = [max(1, n) for _, n in placed]  # growth starts from what fits
        if placed == self._before:
            return None
        self._before = placed
        wanted = {}
        for rank in range(max(self._setting.experts)):
            for p, (resident, held) in enumerate(placed):
                if rank < held:
                    wanted[p, self._order[p][rank]] = RESIDENT if rank < resident else self._packed
        return wanted

    def _fit(self, p: int, room: int) -> tuple[int, int]:
        """Return how many experts of a layer fit `room` bytes: uncompressed ones, and all in memory (equation 12)."""
        whole = self._setting.sizes[p][RESIDENT]
        packed = self._setting.sizes[p][self._packed]
        held = min(self.held[p], max(0, room) // packed)
        resident = min(held, round(self.options.resident * self._setting.experts[p]))
        return min(resident, max(0, room - held * packed) // max(1, whole - packed)), held

    def _adjust(self, capacity: Sequence[int]) -> None:
        rates = self._setting.rates
        if not rates:
            return
        loads = [[size / self._steps for size in row] for row in self._loaded]
        compute = self._computed / self._steps
        loading = self._seconds(loads)
        self.rho = compute / loading if loading else float("inf")
        if self.options.theta <= self.rho <= 1 or not (loading or self._packed):
            return  # without a packed form and loads, what a step would load of an expert is not known
        by, longest = (-1, compute / self.options.theta) if self.rho > 1 else (1, loading)
        changes = self._changes(by, capacity)
        if self._seconds(self._moved(loads, changes)) <= longest:
            self.held = [held + change for held, change in zip(self.held, changes, strict=True)]
            self._turn = (int(np.argmax(np.abs(changes))) + 1) % len(changes)

    def _seconds(self, loads: Sequence[Sequence[float]]) -> float:
        return pass_seconds(loads, self._setting.rates[self._packed :], self._setting.together)

    def _changes(self, by: int, capacity: Sequence[int]) -> list[int]:
        """Return the change in each layer's number of experts: one in each, or all of them in one layer, in turn."""
        experts = self._setting.experts
        most = [
            min(n, max(0, room) // row[self._packed])
            for n, room, row in zip(experts, capacity, self._setting.sizes, strict=True)
        ]
        free = [max(0, m - h) if by > 0 else max(0, h - 1) for m, h in zip(most, self.held, strict=True)]
        if self.options.stagger == "yes":
            return [by if n else 0 for n in free]
        turns = [(self._turn + i) % len(free) for i in range(len(free))]
        chosen = next((p for p in turns if free[p]), 0)
        return [by * min(free[p], len(free)) if p == chosen else 0 for p in range(len(free))]

    def _moved(self, loads: Sequence[Sequence[float]], changes: Sequence[int]) -> list[list[float]]:
        """Return the bytes a step loads, by layer and source, after these changes, if all experts are equally busy."""
        out = []
        for (packed, stored), n, held, change in zip(loads, self._setting.experts, self.held, changes, strict=True):
            if self._packed == RESIDENT:  # an expert in memory loads nothing
                out.append([packed, stored - change * stored / max(1, n - held)])
                continue
            size = min(max(change * (packed + stored) / n, -packed), stored)
            out.append([packed + size, stored - size])
        return out

    def worth(self, key: Key) -> float:
        """Return an expert's share of its layer's traffic in calibration."""
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
