"""Make a plan of a bundle, a policy and a budget: a map that never changes, or a ladder of placements and what fits.

This module reads the bundle's calibration tables. capacity.py does the arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import MEMORY_PAGE, Version, align
from moepack.runtime.allocation.knapsack import BudgetError, Table
from moepack.runtime.allocation.ladder import Floats, Ints, Ladder, SharedByLoss
from moepack.runtime.policies.contract import (
    Interval,
    LiveOptions,
    LivePolicy,
    Setting,
    Sums,
    Versions,
    Wanted,
    bytes_of_layers,
)
from moepack.runtime.policies.contract import Ladder as Placements
from moepack.runtime.policies.placements import ABSENT, CODED, ON_HOST, READ_THERE, Placement, Where
from moepack.runtime.policies.registry import Policy

from .capacity import base_bytes, even_bytes
from .choice import ladders_of
from .fixed import Fixed, page_entries
from .paging import block_on_gpu, coded_version, decoded_in_place, in_place_size, measure_rates, segment

STAGE = 256 << 20  # bytes for experts that a prompt brings at a time: w4 of 100 experts of Qwen3-30B-A3B
ROOM = 8  # caches that will grow are left at most 1/8 of the budget
ROOMY = 32  # a workspace gets 1/32 of the bytes beyond the least budget


@dataclass(frozen=True, slots=True)
class Plan:
    """The placements that can be served in a budget, and their bytes."""

    ladder: Placements  # the placements, the best first and the base last; other fields use indices into it
    # [layers][placements], bytes of a block (memory for one expert), on the device or the host; 0 for an absent expert
    blocks: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]  # [layers][placements], bytes of a block on the device; 0 on the host
    experts: tuple[int, ...]  # [layers], number of experts
    fixed: int  # bytes outside the experts (M_fixed): dense tensors, KV cache, activations, `staging`, `window`
    staging: int  # bytes of the staging buffer
    budget: int  # bytes for everything
    keep: bool  # whether an expert above the base keeps its base version
    spare_blocks: int  # base blocks of each size that stay free for demotions; unused with `keep`
    traffic: Table  # [layers][experts], calibration tokens routed to each, at least one
    losses: Sums  # for each layer, float64 [experts, placements]: squared error that a token adds to the layer's output
    by_loss: SharedByLoss | None  # how layers share the budget by the loss that promotions save; None: evenly
    # [layers][placements], the most experts at each placement, if memory is divided into blocks by placement
    most: tuple[tuple[int, ...], ...] | None = None
    # The least bytes for on-demand loading: the experts of the largest layer, or of several consecutive layers
    # (`LiveOptions.layers_held`), at the best placement; 0 with resident versions
    demand: int = 0
    # Where experts may be absent beside passes: the least bytes of the others, half of all at the lowest version, and
    # of moves
    present: int = 0
    workspace: int = 0  # the part of `fixed` for measurements that the policy needs during a pass
    window: int = 0  # bytes of a GPU in which experts are decoded in place while their layer runs
    stage: int = 0  # bytes of a GPU to which prompts bring experts of pinned memory (experts/staged.py)
    entries: int = 0  # a GPU's page entries for pinned host memory: experts there, and extents that are copied
    rates: tuple[float, ...] = ()  # as in `Setting`

    @property
    def base(self) -> int:
        """The index of the base placement."""
        return len(self.ladder) - 1

    def version(self, number: int) -> Version:
        """Return the version of a placement that has one."""
        version = self.ladder[number].version
        assert version is not None
        return version

    @property
    def reads_host(self) -> bool:
        """Whether every expert stays in pinned host memory, at the base, where the device's kernels read it."""
        return self.keep and self.ladder[self.base].where in READ_THERE

    @property
    def parts(self) -> dict[str, int]:
        """The parts of `fixed` that the plan adds, as `Fixed` names them."""
        return {"staging": self.staging + self.stage, "window": self.window, "entries": self.entries}

    @property
    def largest_pinned(self) -> int:
        """Bytes of the largest block of an expert that kernels read in pinned memory; 0 without any."""
        read = [v for v, p in enumerate(self.ladder) if p.where is Where.PINNED]
        return max((row[v] for row in self.blocks for v in read), default=0)

    @property
    def copied(self) -> list[str]:
        """The names of the versions whose extents a GPU copies from the host's store, the most important first."""
        served = [p for p in self.ladder[: len(self.ladder) - self.keep] if p.where is Where.DEVICE]
        read = self.ladder[self.base].version if self.reads_host else None  # copied from where kernels read it
        return [p.version.name for p in served if p.version is not None and p.version != read]

    @property
    def in_place(self) -> bool:
        """Whether a GPU's launches decode experts in slots, while their layer runs."""
        return decoded_in_place(self.ladder)

    def is_of_base(self, number: int) -> bool:
        """Whether a placement has the bytes that the base has in host memory, but on the device."""
        placement = self.ladder[number]
        near = Where.PACKED if self.in_place else Where.DEVICE
        return self.reads_host and placement.where is near and placement.version == self.ladder[self.base].version

    def on_host(self, *where: Where) -> int:
        """Return the bytes of all experts at the largest placement in host memory of these kinds."""
        there = [v for v, placement in enumerate(self.ladder) if placement.where in where]
        largest = [max((row[v] for v in there), default=0) for row in self.blocks]
        return sum(n * size for n, size in zip(self.experts, largest, strict=True))

    @property
    def reserve(self) -> int:
        """Bytes of blocks that stay free for demotions: at least one block of any version but the best."""
        if self.demand or (self.keep and len(self.ladder) == 2):
            return 0
        spare = 0 if self.keep else self.spare_blocks * sum({row[self.base] for row in self.sizes})
        return max(spare, *(max(row[1:]) for row in self.sizes))

    def capacity(self, kv: int = 0) -> list[int]:
        """Return the bytes that each layer's experts may take beyond their base placements.

        The budget first pays the fixed bytes, a KV reserve of `kv` bytes, all base versions and blocks for demotions.
        """
        left = self.budget - self.fixed - kv - base_bytes(self.sizes, self.experts) - self.reserve
        if self.demand:  # one cache for all layers
            share, rest = divmod(max(0, left), len(self.experts))
            return [share + (p < rest) for p in range(len(self.experts))]
        if self.by_loss is not None:
            return self.by_loss.within(left)
        return even_bytes(self.growing(), self.experts, left)

    def growing(self) -> list[list[int]]:
        """Return the bytes that placing an expert adds, [layers][placements]; 0 for a base version that stays."""
        return [[*row[:-1], 0 if self.keep else row[-1]] for row in self.sizes]

    def ladders(self) -> list[Ladder]:
        """Return the upgrades of each layer's experts as `Ladder` objects."""
        return [Ladder(row, loss, self.base) for row, loss in zip(self.growing(), self.losses, strict=True)]

    def expected_loss(self) -> float:
        """Return the summed squared error on calibration's tokens, with placements chosen for these tokens."""
        return sum(ladder.loss(tokens, placed) for ladder, tokens, placed in self._filled(self.capacity()))

    def _filled(self, capacity: Sequence[int]) -> Iterator[tuple[Ladder, Floats, Ints]]:
        """Yield each layer's ladder, calibration tokens, and experts' placements that fit the layer's bytes."""
        for ladder, row, room in zip(self.ladders(), self.traffic, capacity, strict=True):
            tokens = np.array(row, np.float64)
            yield ladder, tokens, ladder.fill(tokens, room)

    def _counts(self, capacity: Sequence[int]) -> list[list[int]]:
        return [np.bincount(placed, minlength=len(self.ladder)).tolist() for *_, placed in self._filled(capacity)]

    def divided(self) -> Plan:
        """Return the plan for memory that is divided into blocks while loading, in numbers that suit calibration.

        On-demand loading first gets blocks at the best placement for all experts of any one layer. Layers whose experts
        have the same size share these blocks.

        Raises:
            TooSmallError: when the budget does not hold these blocks for layers of each size.
        """
        most = self._divided_cache() if self.demand else tuple(map(tuple, self._counts(self.capacity())))
        return replace(self, most=most)

    def _divided_cache(self) -> tuple[tuple[int, ...], ...]:
        left = sum(self.capacity())
        sizes = [row[0] for row in self.growing()]
        if left >= sum(n * size for n, size in zip(self.experts, sizes, strict=True)):
            return tuple((n, *[0] * self.base) for n in self.experts)
        largest = {size: max(n for n, s in zip(self.experts, sizes, strict=True) if s == size) for size in set(sizes)}
        short = sum(n * size for size, n in largest.items()) - left
        if short > 0:
            from .exceeded import TooSmallError

            least = self.budget + short
            raise TooSmallError(
                f"a budget of {self.budget} bytes does not hold all experts of a layer of each size: the least that "
                f"would do is {least} bytes",
                least,
            )
        counts = self._counts([-short // len(self.experts)] * len(self.experts))
        for size, n in largest.items():
            alike = [p for p, s in enumerate(sizes) if s == size]
            room = sum(self.experts[p] for p in alike) - sum(counts[p][0] for p in alike)
            counts[alike[0]][0] += min(n, room)
        return tuple(map(tuple, counts))

    def policy(self, policy: Policy) -> tuple[LivePolicy, Wanted]:
        """Make a policy that changes placements; return it and the placements that it wants before any token."""
        assert policy.entry.make is not None
        setting = Setting(self.experts, self.ladder, self.growing(), self.traffic, self.losses, self.most, self.rates)
        made = policy.entry.make(setting, policy.options)
        nothing = [np.zeros(n, np.int64) for n in self.experts]
        none = {reducer: [np.zeros(n) for n in self.experts] for reducer in made.needs.sums}
        return made, made.decide(Interval(time.monotonic(), self.capacity(), nothing, none)) or {}


def make_plan(
    bundle: Bundle,
    options: LiveOptions,
    outside: int,
    budget: int,
    on_gpu: bool = False,
    host_memory: int | None = None,
    ahead: int = 0,
) -> Plan:
    """Choose the ladder with the least expected loss that fits `budget`, the bytes for everything.

    `outside` are bytes outside the experts: dense tensors, KV cache, activations, without the staging buffer. Of a GPU
    pinned host memory, at most `host_memory` bytes, takes some. At their least the experts leave `ahead` bytes, at most
    a ROOM-th of the budget, for caches that will grow; where no ladder does, half as many, and so on.

    Raises:
        InputError: when versions are missing.
        TooSmallError: when the budget does not hold every expert at the base placement, or with on-demand loading all
            experts of a layer at the best.
    """
    plans = _plans(bundle, options, outside, budget, on_gpu, host_memory)
    if all(needed > budget for needed, _ in plans):
        from .exceeded import TooSmallError

        needed, plan = min(plans, key=lambda found: found[0])
        all_of_them = (
            f"half of the experts at {plan.ladder[-2]}" if plan.present else f"every expert at {plan.ladder[-1]}"
        )
        layers = "a layer's" if options.layers_held == 1 else f"{options.layers_held} layers'"
        what = f"{layers} experts at {plan.ladder[0]}" if plan.demand else all_of_them
        raise TooSmallError(
            f"{bundle.path}: a budget of {budget} bytes does not hold {what}: the least "
            f"that would do is {needed} bytes ({plan.fixed} of them outside the experts)",
            needed,
        )
    left = min(ahead, budget // ROOM)
    while not (roomy := [plan for needed, plan in plans if needed + left <= budget]):
        left //= 2
    chosen = min(roomy, key=Plan.expected_loss)
    return replace(chosen, rates=measure_rates(bundle, chosen.ladder)) if options.by_rates and not on_gpu else chosen


def least_budget(
    bundle: Bundle, policy: Policy, fixed: Fixed, on_gpu: bool = False, host_memory: int | None = None
) -> int:
    """Return the least budget, in bytes, with which `make_plan` or `unchanging` does not find it too small.

    Raises:
        InputError: when the policy does not fit the bundle.
    """
    if policy.is_live:
        plans = _plans(bundle, policy.options, fixed.total, 0, on_gpu, host_memory)
        return min(needed for needed, _ in plans)
    return fixed.total + _map(bundle, policy, -fixed.total)[1]


def _plans(
    bundle: Bundle, options: LiveOptions, outside: int, budget: int, on_gpu: bool, host_memory: int | None
) -> list[tuple[int, Plan]]:
    """Return a plan for each ladder, and the least budget that it needs."""
    ladders = [_on_device(bundle, ladder, on_gpu) for ladder in ladders_of(bundle, options)]
    experts = tuple(x.experts for x in bundle.layers)
    traffic, losses, compared = calibration(bundle, ladders)
    shares = options.shares_by_loss and compared
    plans: list[tuple[int, Plan]] = []
    for ladder, loss in zip(ladders, losses, strict=True):
        here = [p.where in (Where.DEVICE, Where.PACKED) for p in ladder]
        by_block = on_gpu and coded_version(ladder) is not None
        blocks = tuple(
            tuple(block_bytes(bundle, position, p, by_block and there) for p, there in zip(ladder, here, strict=True))
            for position in range(len(experts))
        )
        sizes = tuple(tuple(n * there for n, there in zip(row, here, strict=True)) for row in blocks)
        staging = max((staging_bytes(bundle, p.version) for p in ladder if p.version is not None), default=0)
        window = window_bytes(bundle, ladder, staging, sizes)
        demand = bytes_of_layers(sizes, experts, options.layers_held) if options.on_demand else 0
        work, most = options.workspace
        plan = Plan(
            ladder,
            blocks,
            sizes,
            experts,
            0,
            staging,
            budget,
            options.keeps_low,
            options.spare_blocks,
            traffic,
            loss,
            None,
            window=window,
        )
        entries = page_entries(pinned_bytes(bundle, plan, host_memory)) if on_gpu else 0
        stage = stage_bytes(max(experts), plan.largest_pinned) if on_gpu else 0
        fixed = outside + staging + window + stage + entries
        half = base_bytes(sizes, experts, -2) // 2 if ladder[-1] == ABSENT and not options.on_demand else 0
        present = half and half + max(max(row[1:]) for row in sizes)
        needed = fixed + work + base_bytes(sizes, experts) + demand + present
        work = min(most, work + max(0, budget - needed) // ROOMY)
        plan = replace(
            plan, fixed=fixed + work, demand=demand, present=present, workspace=work, stage=stage, entries=entries
        )
        if shares and not demand:  # on-demand loading has one cache for all layers
            plan = replace(plan, by_loss=SharedByLoss(plan.ladders(), traffic))
        plans.append((needed, plan))
    return plans


def pinned_bytes(bundle: Bundle, plan: Plan, host_memory: int | None) -> int:
    """Return the most bytes of host memory that are pinned beside a GPU, of `host_memory` bytes if it is given."""
    extents = 0
    for name in plan.copied:
        for position, experts in enumerate(plan.experts):
            file = bundle.layer_file(name, position)
            extents += sum(file.extent_size(e) for e in range(experts))
    size = plan.on_host(*ON_HOST) + extents
    return size if host_memory is None else min(size, host_memory)


def stage_bytes(experts: int, block: int) -> int:
    """Return the bytes for as many of a layer's experts as STAGE holds, at least one; 0 for blocks of 0."""
    return block and block * min(experts, max(1, STAGE // block))


def _on_device(bundle: Bundle, ladder: Placements, on_gpu: bool) -> Placements:
    """Return the placements of a ladder that the device has: a GPU decodes to blocks from host memory alone."""
    if not decoded_in_place(ladder):
        return tuple(p for p in ladder if p.where is not Where.PACKED) if on_gpu else ladder
    version = coded_version(ladder)
    if version is not None and not version.plain:
        raise InputError(f"{bundle.path}: a GPU decodes bf16 in place, and not {version.name}: name paged")
    if not on_gpu:
        raise InputError(f"{bundle.path}: paged:lo=pinned is for a GPU, which reads host memory: name --device cuda")
    return ladder


def block_bytes(bundle: Bundle, position: int, placement: Placement, by_block: bool = False) -> int:
    """Return the bytes of a block for an expert of a layer at one placement, on the device or the host.

    With `by_block` the GPU's allocator gives it alone.
    """
    if placement.version is None:
        return 0
    if placement.where in CODED:
        size = _largest_extent(bundle, placement.version, position)
    else:
        size = align(placement.version.resident_size(bundle.layers[position].matrices), MEMORY_PAGE)
    return block_on_gpu(size) if by_block else size


def window_bytes(bundle: Bundle, ladder: Placements, staging: int, sizes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of the slots in which a GPU decodes experts in place; 0 for other ladders.

    They include the unused end of the last segment of blocks of each of `sizes` [layers][placements].
    """
    version = coded_version(ladder)
    if version is None or not decoded_in_place(ladder):
        return 0
    ends = sum(map(segment, {size for row in sizes for size in row if size}))
    return in_place_size(bundle.layers, version, staging).bytes + ends


def calibration(bundle: Bundle, ladders: Sequence[Placements]) -> tuple[list[list[float]], list[Sums], bool]:
    """Read calibration's traffic and losses (pack/FORMAT.md, "Calibration tables").

    For rarely used experts losses lean on the layer's. An absent expert loses all of its output. One in pinned host
    memory loses what its version loses, but its tokens wait for the bus: that counts as much as leaving out an average
    expert. Losses are multiplied by how far they reach the logits, where the bundle says (`LayerTables.reach`).

    Returns:
        Tokens routed to each expert plus one, [layers][experts]. For each ladder and layer, the squared error a token
        that each placement adds to the layer's output, gate weights included, float64 [experts, placements]. Whether
        losses of different layers can be compared, because all are multiplied by their reach.
    """
    tables = bundle.calibration()
    traffic = []
    losses: list[list[Floats]] = [[] for _ in ladders]
    for layer in tables.layers:
        tokens = layer.tokens.astype("float64")[:, None] + 1
        gated = layer.weighed
        relative = layer.relative.astype("float64")
        shares = np.divide(gated, relative, out=np.zeros_like(gated), where=relative > 0)
        known = np.concatenate([gated, shares.max(1, keepdims=True)], 1)  # the last column: absent
        traffic.append(tokens[:, 0].tolist())
        for ladder, out in zip(ladders, losses, strict=True):
            columns = [-1 if p.version is None else tables.versions.index(p.version.name) for p in ladder]
            waits = [p.where is Where.PINNED for p in ladder]
            wait = known[:, -1].mean() or 1.0  # where every version is exact, nothing else counts
            out.append(known[:, columns] + wait * np.array(waits))
    return traffic, list(losses), all(layer.reach is not None for layer in tables.layers)


def staging_bytes(bundle: Bundle, version: Version) -> int:
    """Return the bytes of the buffer from which a lossless version is decoded; 0 for other versions."""
    return max(_largest_extent(bundle, version, p) for p in range(len(bundle.layers))) if version.entropy_coded else 0


def _largest_extent(bundle: Bundle, version: Version, position: int) -> int:
    file = bundle.layer_file(version.name, position)
    return align(max(file.extent_size(e) for e in range(file.layer.extents)), MEMORY_PAGE)


def unchanging(bundle: Bundle, policy: Policy, fixed: Fixed, device_memory: int | None) -> tuple[Versions, int]:
    """Return the map of a policy that never changes placements, and the bytes of its experts.

    Raises:
        InputError: when the policy does not fit the bundle.
        TooSmallError: when the map does not fit the budget.
    """
    room = None if device_memory is None else device_memory - fixed.total
    table, experts = _map(bundle, policy, room)
    least = fixed.total + experts
    if table is not None and (room is None or experts <= room):
        return table, experts

    from .exceeded import TooSmallError

    if table is None:
        what = (
            f"{bundle.path}: a budget of {device_memory} bytes does not hold the smallest versions: the least that "
            f"would do is {least} bytes ({fixed})"
        )
    else:
        what = (
            f"{bundle.path}: policy {policy} needs {least} bytes of device memory ({fixed}), the "
            f"budget is {device_memory}: name a smaller version or a larger budget"
        )
    raise TooSmallError(what, least)


def _map(bundle: Bundle, policy: Policy, room: int | None) -> tuple[Versions | None, int]:
    """Return the map of a policy for `room` bytes, and its bytes; no map, and the least of any, if room is too little.

    The map of a policy that does not look at the room may take more.
    """
    assert policy.entry.versions is not None
    try:
        table = policy.entry.versions(bundle, policy.options, room)
    except BudgetError as error:
        return None, int(error.least)
    experts = sum(
        bundle.manifest.version(name).resident_size(layer.matrices)
        for layer, versions in zip(bundle.layers, table, strict=True)
        for name in versions
    )
    return table, experts
