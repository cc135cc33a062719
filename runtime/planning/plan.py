"""From a bundle, a policy and a budget to a plan: a map that never changes, or the two versions that are served and how
many experts may be high.

Reads the bundle's calibration tables; capacity.py does the arithmetic. Decides nothing that happens while serving.
"""

from __future__ import annotations

from dataclasses import dataclass

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import PAGE, Version, align
from moepack.runtime.allocation.knapsack import BudgetError, Table
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.policies.contract import LiveOptions, Versions
from moepack.runtime.policies.registry import Policy

from .capacity import base_bytes, even_room, expected_loss, room_by_loss
from .exceeded import TooSmallError
from .fixed import Fixed

FEW = 256  # tokens with which an expert's own loss counts as much as its layer's


@dataclass(frozen=True, slots=True)
class Plan:
    """What is served in a budget.

    Attributes:
        versions: those of the bundle, most precise first; the other fields count in it.
        high, low: the two versions that are served.
        sizes: [layers][versions], bytes of a block.
        experts: [layers].
        fixed: bytes outside the experts: dense tensors, KV cache, activations, the staging buffer (M_fixed).
        staging: of them, the staging buffer's.
        budget: bytes for everything.
        keep: whether a high expert keeps its low version.
        spare_blocks: low blocks of each size class that demotions are copied into; none with `keep`.
        traffic: [layers][experts], calibration tokens routed to each, at least one.
        gains: [layers][experts], squared error that the high version saves a token, above 0.
        by_loss: whether layers share the budget by what promotions save there; else evenly.
    """

    versions: tuple[Version, ...]
    high: int
    low: int
    sizes: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]
    fixed: int
    staging: int
    budget: int
    keep: bool
    spare_blocks: int
    traffic: Table
    gains: Table
    by_loss: bool

    @property
    def reserve(self) -> int:
        """Bytes of the blocks that demotions are copied into."""
        return 0 if self.keep else self.spare_blocks * sum({row[self.low] for row in self.sizes})

    def room(self, kv: int = 0) -> list[int]:
        """How many experts of each layer may be at the high version beside a KV reserve of `kv` bytes.

        All low versions and the reserve come off the budget; each high expert then takes its bytes less those of its
        low version, unless that is kept.
        """
        left = self.budget - self.fixed - kv - base_bytes(self.sizes, self.experts, self.low) - self.reserve
        more = [row[self.high] - (0 if self.keep else row[self.low]) for row in self.sizes]
        if not self.by_loss:
            return even_room(more, self.experts, left)
        saved = [[n * g for n, g in zip(*rows, strict=True)] for rows in zip(self.traffic, self.gains, strict=True)]
        return room_by_loss(more, saved, left)


def make_plan(bundle: Bundle, options: LiveOptions, outside: int, budget: int) -> Plan:
    """Choose versions and see that they fit.

    Args:
        bundle: the bundle.
        options: the policy's.
        outside: bytes outside the experts, but for the staging buffer: dense tensors, KV cache, activations.
        budget: bytes for everything.

    Raises:
        InputError: when versions are not there.
        TooSmallError: when the budget does not hold the low version of every expert.
    """
    versions = bundle.versions
    names = [v.name for v in versions]
    for name in filter(None, (options.hi, options.lo)):
        if name not in names:
            raise InputError(f"{bundle.path}: has no version {name!r}: here are {', '.join(names)}")
    highs = [names.index(options.hi)] if options.hi else list(range(len(names) - 1))
    lows = [names.index(options.lo)] if options.lo else list(range(1, len(names)))
    if not highs or highs == [len(names) - 1]:
        raise InputError(f"{bundle.path}: has no version below {names[-1]}: changing versions needs two")
    if highs[0] >= lows[-1]:
        raise InputError(f"{bundle.path}: the low version {names[lows[-1]]} is not below {names[highs[0]]}")
    sizes = tuple(tuple(align(resident_size(x.matrices, v), PAGE) for v in versions) for x in bundle.layers)
    experts = tuple(x.experts for x in bundle.layers)
    traffic, losses = calibration(bundle)
    keep, blocks = options.keeps_low, options.spare_blocks
    plans: list[tuple[float, Plan]] = []
    for high in highs:
        staging = staging_bytes(bundle, versions[high])
        for low in (v for v in lows if v > high):
            if base_bytes(sizes, experts, low) > budget - outside - staging:
                continue
            gains = [[max(row[low] - row[high], 1e-30) for row in layer] for layer in losses]
            plan = Plan(
                versions, high, low, sizes, experts, outside + staging, staging, budget, keep, blocks, traffic, gains,
                options.share == "loss",
            )  # fmt: skip
            plans.append((expected_loss(traffic, losses, high, low, plan.room()), plan))
    if not plans:
        staging = min(staging_bytes(bundle, versions[high]) for high in highs)
        low = min(lows, key=lambda v: base_bytes(sizes, experts, v))
        least = outside + staging + base_bytes(sizes, experts, low)
        raise TooSmallError(
            f"{bundle.path}: a budget of {budget} bytes does not hold every expert at {names[low]}: the least that "
            f"would do is {least} bytes ({outside + staging} of them outside the experts)",
            least,
        )
    return min(plans, key=lambda found: found[0])[1]


def calibration(bundle: Bundle) -> tuple[list[list[float]], list[list[list[float]]]]:
    """What calibration saw of each expert (pack/FORMAT.md, "Calibration tables").

    The loss of an expert that few tokens reached says little about those that will: with n of them it is drawn to its
    layer's mean as if by `FEW` tokens more.

    Returns:
        Tokens routed to each expert and one more, [layers][experts]; squared error a token that each of the bundle's
        versions adds to the layer's output, gate weights included, [layers][experts][versions].
    """
    tables, traffic, losses = bundle.calibration(), [], []
    columns = tables.columns([v.name for v in bundle.versions])
    for layer in tables.layers:
        tokens = layer.tokens.astype("float64")[:, None] + 1
        gated = layer.gated[:, columns].astype("float64")
        mean = (tokens * gated).sum(0) / tokens.sum()
        losses.append(((tokens * gated + FEW * mean) / (tokens + FEW)).tolist())
        traffic.append(tokens[:, 0].tolist())
    return traffic, losses


def staging_bytes(bundle: Bundle, version: Version) -> int:
    """Bytes of the buffer that compressed extents are decoded from; other versions are read into their blocks."""
    if not version.is_lossless:
        return 0
    files = [bundle.layer_file(version.name, p) for p in range(len(bundle.layers))]
    return align(max(f.extent_size(e) for f in files for e in range(f.layer.experts)), PAGE)


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
