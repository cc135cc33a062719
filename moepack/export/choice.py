"""Which version every expert and dense matrix is exported from, by a width, a map or a size to fit in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.spec import Version, lossless
from moepack.pipeline.allocate import bundle_costs, expected_losses
from moepack.runtime.allocation.knapsack import BudgetError, greedy
from moepack.runtime.planning.sizes import in_unit, parse_size
from moepack.runtime.policies.contract import Versions
from moepack.runtime.policies.maps import static_map

from .targets import SCALES, ExportJob, Target

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

SHARD = 5_000_000_000  # bytes of a file's tensors; a larger tensor has a file of its own


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export; at most one of `bits`, `map` and `fit`."""

    bits: str | None = None  # a width, as "4" for w4, or a version's name
    map: str | None = None  # a file {"versions": [[name, ...], ...]}, or "allocation": the manifest's
    fit: str | None = None  # the most bytes of the whole export
    dense: str | None = None  # the version of dense matrices; by default the most precise
    scales: str = SCALES[0]
    shard: str | None = None  # the most bytes of a file
    lossy: str | None = None  # a mix of llama.cpp's types

    @property
    def nothing(self) -> bool:
        """Whether it says nothing."""
        return self == Wanted()


def choose(bundle: Bundle, target: Target, wanted: Wanted) -> ExportJob:
    """The job for what is wanted. Raises InputError for what the bundle does not have or the target does not hold."""
    if wanted.scales not in SCALES:
        raise InputError(f"--scales {wanted.scales}: there are {', '.join(SCALES)}")
    if wanted.scales != SCALES[0] and not target.takes_scales:
        raise InputError(f"--scales {wanted.scales}: --to {target.name} has no choice of scales: leave --scales out")
    job = ExportJob(bundle, wanted.scales, _shard(wanted.shard), _dense(bundle, wanted.dense))
    target.check_model(job)
    given = [f"--{name}" for name in ("bits", "map", "fit") if getattr(wanted, name) is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: each chooses what to export: give only one")
    if wanted.fit is not None and wanted.lossy is not None:
        raise InputError("--fit and --lossy: what llama.cpp makes has its size then: leave --fit out")
    if wanted.map is not None and wanted.map != "allocation" and not wanted.map.endswith(".json"):
        raise InputError(f"--map {wanted.map}: give a .json file, as for static:FILE.json, or allocation")
    if wanted.fit is None:
        experts = static_map(bundle, wanted.map or named(bundle, target, wanted.bits))
        job = replace(job, experts=experts)
    _check(job, target)
    if wanted.fit is None:
        return job
    return replace(job, experts=_fitting(job, target, wanted.fit))


def named(bundle: Bundle, target: Target, bits: str | None) -> str:
    """The version that `bits` means. Raises InputError for one that is not here."""
    here = [v.name for v in bundle.versions]
    if bits is None:
        can = [v.name for v in bundle.versions if target.refusal(bundle, v) is None]
        some = f"here are {', '.join(can)}" if can else f"no version here can be: here are {', '.join(here)}"
        raise InputError(f"--to {target.name}: say what to export, by --bits, --map or --fit: {some}")
    name = bits
    if bits.isdecimal():
        more = int(bits) + 1  # for down, as in the default recipe
        every = (f"w{bits}", f"w{bits}d{more}", f"t{bits}", f"t{bits}d{more}")
        name = next((version for version in every if version in here), every[0])
    if name not in here:
        raise InputError(f"{bundle.path}: --bits {bits}: has no version {name!r}: here are {', '.join(here)}")
    return name


def _check(job: ExportJob, target: Target) -> None:
    """Raise InputError for versions that the target does not hold, or that it does not hold side by side."""
    for version, dense in (*((v, False) for v in job.used), *((v, True) for v in dict.fromkeys(job.dense))):
        if why := target.refusal(job.bundle, version, dense):
            of = " of dense matrices" if dense else ""
            raise InputError(f"--to {target.name}: {version.name}{of} is not exported: {why}")
    for layer, row in zip(job.bundle.layers, job.experts, strict=False):  # with --fit none is chosen yet
        if len(set(row)) > 1 and not target.mixes:
            raise InputError(
                f"--to {target.name} has one width for all experts of a layer, and the map gives layer {layer.index} "
                f"{', '.join(sorted(set(row)))}: take --fit, which chooses one a layer, or --to checkpoint"
            )
    target.other_bytes(job)  # raises, too


def _shard(size: str | None) -> int:
    found = parse_size(size)
    if found == 0:
        raise InputError(f"--shard-size {size}: the size must be above 0")
    return found or SHARD


def _dense(bundle: Bundle, name: str | None) -> tuple[Version, ...]:
    here = {v.name: v for v in bundle.dense_versions}
    if not bundle.manifest.dense:
        if name is not None:
            raise InputError(f"{bundle.path}: --dense {name}: its dense matrices have no versions")
        return ()
    if name == "allocation":
        table = bundle.manifest.allocation
        if table is None or table.dense is None or not set(table.dense) <= here.keys():
            raise InputError(f"{bundle.path}: --dense allocation: its manifest has no map of versions that are here")
        return tuple(here[n] for n in table.dense)
    exact = lossless(bundle.dense_versions)
    chosen = name or (exact or bundle.dense_versions[0]).name
    if chosen not in here:
        raise InputError(f"{bundle.path}: has no version {chosen!r} of dense matrices: here are {', '.join(here)}")
    return (here[chosen],) * len(bundle.manifest.dense)


def _fitting(job: ExportJob, target: Target, size: str) -> Versions:
    """One version a layer, with the least loss of those that fit: `greedy` over whole layers.

    Raises InputError where nothing fits; names the least size that would do.
    """
    budget = parse_size(size)
    versions = [v for v in job.bundle.versions if target.refusal(job.bundle, v) is None]
    assert budget is not None
    if not versions:
        raise InputError(f"--to {target.name}: {job.bundle.path} has no version that it holds")
    layers = range(len(job.bundle.layers))
    room = budget - target.other_bytes(job)
    sizes = [[float(target.layer_bytes(job, p, v)) for v in versions] for p in layers]
    by_expert = [expected_losses(costs, "logits") for costs in bundle_costs(job.bundle, versions)]
    losses = [[sum(column) for column in zip(*experts, strict=True)] for experts in by_expert]

    def made(chosen: Sequence[int]) -> ExportJob:
        rows = zip(chosen, job.bundle.layers, strict=True)
        return replace(job, experts=tuple((versions[v].name,) * layer.experts for v, layer in rows))

    while True:
        try:
            found = made(greedy(sizes, losses, room))
        except BudgetError:
            smallest = made([min(range(len(row)), key=row.__getitem__) for row in sizes])
            least = target.file_bytes(smallest)
            refusal = f"--fit {size}: the smallest that is exported takes {least:,} bytes"
            raise InputError(in_unit(refusal, size)) from None
        over = target.file_bytes(found) - budget
        if over <= 0:
            return found.experts
        room -= over  # headers, which sizes leave out


def expected_loss(job: ExportJob) -> float:
    """The mean relative loss of all experts at their versions, by the bundle's tables."""
    tables = job.bundle.calibration()
    total = 0.0
    count = 0
    for layer, row in zip(tables.layers, job.experts, strict=True):
        columns = tables.columns(row)
        total += float(layer.relative[range(len(row)), columns].sum())
        count += len(row)
    return total / count
