"""From a bundle, a policy and a budget to a plan: a map that never changes, or a ladder of placements and what fits.

Reads the bundle's calibration tables; capacity.py does the arithmetic. Decides nothing that happens while serving.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moepack.pack.reader import Bundle
from moepack.pack.spec import PAGE, Version, align
from moepack.runtime.allocation.knapsack import BudgetError, Table
from moepack.runtime.allocation.ladder import Ladder
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.policies.contract import Interval, LiveOptions, LivePolicy, Setting, Sums, Versions, Wanted
from moepack.runtime.policies.contract import Ladder as Placements
from moepack.runtime.policies.placements import PAGED, Placement, Where
from moepack.runtime.policies.registry import Policy

from . import paging
from .capacity import base_bytes, bytes_by_loss, even_bytes
from .choice import ladders_of
from .exceeded import TooSmallError
from .fixed import Fixed
from .paging import LOADERS, measure_rates, window_size

ROOMY = 32  # of the bytes beyond the least that would do, a workspace has one in so many
FEW = 256  # tokens with which an expert's own loss counts as much as its layer's


@dataclass(frozen=True, slots=True)
class Plan:
    """What is served in a budget.

    Attributes:
        ladder: the placements that are served, the best first; the other fields count in it. The last is the base.
        blocks: [layers][placements], bytes of a block, on the device or the host; 0 for what is absent.
        sizes: the same on the device alone: 0 for what is on the host.
        experts: [layers].
        fixed: bytes outside the experts: dense tensors, KV cache, activations, the staging buffer (M_fixed).
        staging: of them, the staging buffer's.
        window: of them, those that experts are decoded into while their layer runs, loaders' buffers included.
        budget: bytes for everything.
        keep: whether an expert above the base keeps its base version.
        spare_blocks: base blocks of each size class that demotions are copied into; none with `keep`.
        traffic: [layers][experts], calibration tokens routed to each, at least one.
        losses: float64 [experts, placements] a layer, squared error that a token adds to the layer's output.
        by_loss: whether layers share the budget by what promotions save there; else evenly.
        most: [layers][placements], how many experts may be at each, where memory is not shared between placements.
        demand: bytes that experts which are loaded on demand must find in any case: those of one layer, the largest, at
            the best placement; 0 where experts have a resident version.
        workspace: of the fixed bytes, those that what the policy is told takes inside a pass.
        rates, together: as of `Setting`.
        granule: bytes of the pieces that paged experts' memory on a GPU is mapped in; 0 on a CPU.
    """

    ladder: Placements
    blocks: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]
    fixed: int
    staging: int
    budget: int
    keep: bool
    spare_blocks: int
    traffic: Table
    losses: Sums
    by_loss: bool
    most: tuple[tuple[int, ...], ...] | None = None
    demand: int = 0
    workspace: int = 0
    window: int = 0
    rates: tuple[float, ...] = ()
    together: bool = False
    granule: int = 0

    @property
    def base(self) -> int:
        """The number of the base placement."""
        return len(self.ladder) - 1

    @property
    def reserve(self) -> int:
        """Bytes of the blocks that demotions are copied into: one of any version at the least, but the best."""
        if self.demand or (self.keep and len(self.ladder) == 2):
            return 0
        spare = 0 if self.keep else self.spare_blocks * sum({row[self.base] for row in self.sizes})
        return max(spare, *(max(row[1:]) for row in self.sizes))

    def capacity(self, kv: int = 0) -> list[int]:
        """Bytes that each layer's experts may take beyond their base placements, beside a KV reserve of `kv` bytes.

        All base versions and the reserve come off the budget first.
        """
        left = self.budget - self.fixed - kv - base_bytes(self.sizes, self.experts) - self.reserve
        if self.demand:  # one cache: of what there is, every byte
            share, rest = divmod(max(0, left), len(self.experts))
            return [share + (p < rest) for p in range(len(self.experts))]
        if self.by_loss:
            return bytes_by_loss(self.ladders(), self.traffic, left)
        return even_bytes(self.growing(), self.experts, left)

    def growing(self) -> list[list[int]]:
        """[layers][placements], bytes that an expert takes there, the base's not counted where that is kept."""
        return [[*row[:-1], 0 if self.keep else row[-1]] for row in self.sizes]

    def ladders(self) -> list[Ladder]:
        """The chains of upgrades of each layer's experts."""
        return [Ladder(row, loss, self.base) for row, loss in zip(self.growing(), self.losses, strict=True)]

    def expected_loss(self) -> float:
        """Summed squared error on calibration's tokens, with each expert where they would have it."""
        total = 0.0
        for ladder, tokens, room in zip(self.ladders(), self.traffic, self.capacity(), strict=True):
            scores = np.array(tokens, np.float64)
            total += ladder.loss(scores, ladder.fill(scores, room))
        return total

    def divided(self) -> Plan:
        """The same for memory that is cut into blocks once and for all: as many of each as calibration would have.

        Where experts are loaded on demand, first blocks at the best placement for all experts of any one layer; layers
        whose experts are of one size share them.

        Raises:
            TooSmallError: when the budget does not hold those, of layers of different sizes.
        """
        if self.demand:
            return replace(self, most=self._divided_cache())
        most = []
        for ladder, tokens, room in zip(self.ladders(), self.traffic, self.capacity(), strict=True):
            placed = ladder.fill(np.array(tokens, np.float64), room)
            most.append(tuple(np.bincount(placed, minlength=len(self.ladder)).tolist()))
        return replace(self, most=tuple(most))

    def _divided_cache(self) -> tuple[tuple[int, ...], ...]:
        left, sizes = sum(self.capacity()), [row[0] for row in self.growing()]
        if left >= sum(n * size for n, size in zip(self.experts, sizes, strict=True)):
            return tuple((n, *[0] * self.base) for n in self.experts)
        largest = {size: max(n for n, s in zip(self.experts, sizes, strict=True) if s == size) for size in set(sizes)}
        short = sum(n * size for size, n in largest.items()) - left
        if short > 0:
            least = self.budget + short
            raise TooSmallError(
                f"a budget of {self.budget} bytes does not hold all experts of a layer of each size: the least that "
                f"would do is {least} bytes",
                least,
            )
        counts = []
        for ladder, tokens in zip(self.ladders(), self.traffic, strict=True):
            placed = ladder.fill(np.array(tokens, np.float64), -short // len(self.experts))
            counts.append(np.bincount(placed, minlength=len(self.ladder)).tolist())
        for size, n in largest.items():
            alike = [p for p, s in enumerate(sizes) if s == size]
            room = sum(self.experts[p] for p in alike) - sum(counts[p][0] for p in alike)
            counts[alike[0]][0] += min(n, room)
        return tuple(map(tuple, counts))

    def policy(self, policy: Policy) -> tuple[LivePolicy, Wanted]:
        """A policy that changes placements, made for this plan, and what it wants before any token."""
        assert policy.entry.make is not None
        setting = Setting(
            self.experts, self.ladder, self.growing(), self.traffic, self.losses, self.most, self.rates, self.together
        )  # fmt: skip
        made = policy.entry.make(setting, policy.options)
        nothing = [np.zeros(n, np.int64) for n in self.experts]
        none = [np.zeros(n) for n in self.experts] if made.needs.gates else []
        return made, made.decide(Interval(time.monotonic(), self.capacity(), nothing, none)) or {}


def make_plan(bundle: Bundle, options: LiveOptions, outside: int, budget: int, on_gpu: bool = False) -> Plan:
    """Choose a ladder and see that it fits.

    Args:
        bundle: the bundle.
        options: the policy's.
        outside: bytes outside the experts, but for the staging buffer: dense tensors, KV cache, activations.
        budget: bytes for everything.
        on_gpu: whether it is a GPU's: what experts are brought at there is then measured once that is open.

    Raises:
        InputError: when versions are not there.
        TooSmallError: when the budget does not hold the base placement of every expert, and where experts are loaded on
            demand a whole layer's.
    """
    ladders = ladders_of(bundle, options)
    experts = tuple(x.experts for x in bundle.layers)
    traffic, losses = calibration(bundle, ladders)
    granule = paging.GRANULE if on_gpu else 0
    plans: list[tuple[float, Plan]] = []
    least: list[tuple[int, Plan]] = []
    for ladder, loss in zip(ladders, losses, strict=True):
        blocks = tuple(tuple(block_bytes(bundle, position, p) for p in ladder) for position in range(len(experts)))
        on_device = [p.where in (Where.DEVICE, Where.PACKED) for p in ladder]
        sizes = tuple(tuple(n if here else 0 for n, here in zip(row, on_device, strict=True)) for row in blocks)
        staging = max((staging_bytes(bundle, p.version) for p in ladder if p.version is not None), default=0)
        window = window_bytes(bundle, ladder, staging, granule)
        demand = max((row[0] * n for row, n in zip(sizes, experts, strict=True)), default=0) * options.on_demand
        work, most = options.workspace
        fixed = outside + staging + window
        needed = fixed + work + base_bytes(sizes, experts) + demand
        work = min(most, work + max(0, budget - needed) // ROOMY)
        plan = Plan(
            ladder, blocks, sizes, experts, fixed + work, staging, budget, options.keeps_low, options.spare_blocks,
            traffic, loss, options.share == "loss", demand=demand, workspace=work, window=window,
            granule=granule if window else 0,
        )  # fmt: skip
        least.append((needed, plan))
        if needed <= budget:
            plans.append((plan.expected_loss(), plan))
    if not plans:
        needed, plan = min(least, key=lambda found: found[0])
        what = f"a layer's experts at {plan.ladder[0]}" if plan.demand else f"every expert at {plan.ladder[-1]}"
        raise TooSmallError(
            f"{bundle.path}: a budget of {budget} bytes does not hold {what}: the least "
            f"that would do is {needed} bytes ({plan.fixed} of them outside the experts)",
            needed,
        )
    chosen = min(plans, key=lambda found: found[0])[1]
    measured = chosen.window and not on_gpu
    return replace(chosen, rates=measure_rates(bundle, chosen.ladder)) if measured else chosen


def block_bytes(bundle: Bundle, position: int, placement: Placement) -> int:
    """Bytes of memory, on the device or the host, that a placement of a layer's expert takes."""
    if placement.version is None or placement.where is Where.STORED:
        return 0
    if placement.where is Where.PACKED:
        file = bundle.layer_file(placement.version.name, position)
        return align(max(file.extent_size(e) for e in range(file.layer.extents)), PAGE)
    return align(resident_size(bundle.layers[position].matrices, placement.version), PAGE)


def window_bytes(bundle: Bundle, ladder: Placements, staging: int, granule: int = 0) -> int:
    """Bytes of the window, and of the buffers that experts are read into on their way there; 0 where none is paged.

    With `granule`, on a GPU: also what the last piece of each pool has beyond the pool's blocks.
    """
    found = next((p.version for p in ladder if p.where in PAGED), None)
    if found is None:
        return 0
    pools = {(p, block_bytes(bundle, position, p)) for p in ladder for position in range(len(bundle.layers))}
    ends = granule * sum(size > 0 for _, size in pools)
    return window_size(bundle.layers, found, granule).bytes + LOADERS * staging + ends


def calibration(bundle: Bundle, ladders: Sequence[Placements]) -> tuple[list[list[float]], list[Sums]]:
    """What calibration saw of each expert (pack/FORMAT.md, "Calibration tables").

    Losses with standard errors are taken as they are: those of experts that few tokens reached lean on their layer
    already. In bundles without, the loss of an expert with n tokens is drawn to its layer's mean as if by `FEW` tokens
    more. What is absent loses all of its output.

    Returns:
        Tokens routed to each expert and one more, [layers][experts]; of each ladder, squared error a token that its
        placements add to the layer's output, gate weights included, float64 [experts, placements] a layer.
    """
    tables, traffic = bundle.calibration(), []
    losses: list[list[npt.NDArray[np.float64]]] = [[] for _ in ladders]
    for layer in tables.layers:
        tokens = layer.tokens.astype("float64")[:, None] + 1
        gated = layer.gated.astype("float64")
        relative = layer.relative.astype("float64")
        shares = np.divide(gated, relative, out=np.zeros_like(gated), where=relative > 0)
        known = np.concatenate([gated, shares.max(1, keepdims=True)], 1)  # the last: an output that is left out
        mean = (tokens * known).sum(0) / tokens.sum()
        drawn = known if layer.gated_error is not None else (tokens * known + FEW * mean) / (tokens + FEW)
        traffic.append(tokens[:, 0].tolist())
        for ladder, out in zip(ladders, losses, strict=True):
            columns = [-1 if p.version is None else tables.versions.index(p.version.name) for p in ladder]
            out.append(drawn[:, columns])
    return traffic, list(losses)


def staging_bytes(bundle: Bundle, version: Version) -> int:
    """Bytes of the buffer that compressed extents are decoded from; other versions are read into their blocks."""
    if not version.entropy_coded:
        return 0
    files = [bundle.layer_file(version.name, p) for p in range(len(bundle.layers))]
    return align(max(f.extent_size(e) for f in files for e in range(f.layer.extents)), PAGE)


def unchanging(bundle: Bundle, policy: Policy, fixed: Fixed, device_memory: int | None) -> tuple[Versions, int]:
    """The map of a policy that changes nothing, and the bytes its experts take.

    Raises:
        InputError: when the policy does not fit the bundle.
        TooSmallError: when the map does not fit the budget.
    """
    assert policy.entry.versions is not None
    room = None if device_memory is None else device_memory - fixed.total
    try:
        table = policy.entry.versions(bundle, policy.options, room)
    except BudgetError as error:
        least = fixed.total + int(error.least)
        raise TooSmallError(
            f"{bundle.path}: a budget of {device_memory} bytes does not hold the smallest versions: the least that "
            f"would do is {least} bytes ({fixed})",
            least,
        ) from None
    experts = expert_bytes(bundle, table)
    if room is not None and experts > room:
        raise TooSmallError(
            f"{bundle.path}: policy {policy} needs {fixed.total + experts} bytes of device memory ({fixed}), the "
            f"budget is {device_memory}: name a smaller version or a larger budget",
            fixed.total + experts,
        )
    return table, experts


def expert_bytes(bundle: Bundle, table: Versions) -> int:
    """Bytes of device memory the experts take under a map; the lossless version is resident decoded."""
    return sum(
        resident_size(layer.matrices, bundle.manifest.version(name))
        for layer, versions in zip(bundle.layers, table, strict=True)
        for name in versions
    )
