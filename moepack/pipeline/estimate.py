"""A build's cost before it runs: bytes exactly, memory and time from measurements.

Every expert goes through the lossless codec, which alone tells its size. All else is arithmetic, one batch through the
first layers, and a few experts through the quantiser.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches
from moepack.pack.layer_file import header_size
from moepack.pack.spec import DenseMatrix, dense_layers, lossy
from moepack.pack.writer import check_target, existing
from moepack.progress import Reporter
from moepack.reports.doctor import disk_rates
from moepack.runtime.devices.glibc import reusing, trim
from moepack.runtime.load import check_device

from .bound import BuildNeeds, MemoryPlan, peak, place, workers
from .executors.engine import check_engine
from .needs import Dense, needs_of
from .recipe import Recipe, load_recipe
from .run import EVERY
from .start import calibration_text, dense_parts
from .tasks.experts import ExpertBatchTask, batch_settings, exact_extent, make_expert_batch
from .tasks.row_shards import bits_of, exact_matrix, make_row_shard, row_shard_tasks
from .work import check_work

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseWatch
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import ExpertLayer


@dataclass(frozen=True, slots=True)
class Estimate:
    """A build's cost."""

    versions: dict[str, int]  # bytes of each version's files, exact
    dense_bytes: int  # bytes of all other tensors, exact, without dense matrices that have versions
    work_bytes: int  # the most in the work directory, beside the bundle, about
    memory: dict[str, int]  # bytes by part in the largest step, about; the peak is their sum
    seconds: dict[str, float]  # by kind of work, about
    experts: int
    layers: int
    dense_versions: dict[str, int] = field(default_factory=dict)  # bytes of each dense version's files, exact
    batch_size: int = 0  # windows that go through a layer together
    on_disk: str = ""  # `MemoryPlan.on_disk`


def estimate(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    device: str = "cpu",
    reporter: Reporter | None = None,
    revision: str | None = None,
    memory: int | None = None,
    work: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
) -> Estimate:
    """The cost of `moepack.build` with these arguments; raises what it would. Writes and removes a probe file."""
    began = time.perf_counter()
    bound_kernel_caches()
    check_device(device)
    check_engine(engine, address)
    check_target(Path(output))
    if work is not None:
        check_work(Path(work))
    reporter = reporter or Reporter()
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    run = _DryRun.open(checkpoint, recipe, calibration, device, reporter, revision, memory)
    run.start = time.perf_counter() - began
    folder = existing(Path(output).absolute().parent)
    if run._how.experts_on_disk:
        run._stream.experts_in = folder if work is None else existing(Path(work).absolute())
    reporter.stage("dry run", run.layers + 2)
    reporter.step("outside the layers")
    run.outside()
    for index in range(run.layers):
        reporter.step(f"layer {index}")
        run.layer(index)
        trim()
    reporter.step("disk")
    linked = work is None or existing(Path(work).absolute()).stat().st_dev == folder.stat().st_dev
    return run.result(float(disk_rates(folder).get("write_bytes_per_second", 0.0)), work is not None, linked)


# Experts quantised together in the probe. With one, what a batch's experts share counts for it alone: tiny-qwen3-moe,
# by 16 together, took 0.5 to 0.65 of the CPU time that was said; with eight 0.91 to 0.93.
PROBED = 8


class _DryRun:
    """A walk through a checkpoint, and its measurements so far."""

    def __init__(
        self,
        stream: StreamedModel,
        recipe: Recipe,
        dense: Dense,
        ids: torch.Tensor,
        reporter: Reporter,
        needs: BuildNeeds,
        how: MemoryPlan,
    ) -> None:
        import torch

        from moepack.calibrate.forward import CalibrationPass

        self._stream, self._recipe, self._ids, self._reporter = stream, recipe, ids, reporter
        self._experts = list(stream.expert_layers.values())
        self._dtype = getattr(torch, recipe.calibration.dtype)
        self._needs, self._how, batch = needs, how, how.batch_size
        self._walk: CalibrationPass | None = CalibrationPass(stream, ids[:batch], batch, self._dtype)
        self._sizes = _known_sizes(recipe, self._experts)
        self._encoded = [v for v in recipe.version_specs() if v.entropy_coded]  # whose sizes only encoding tells
        self.start = 0.0  # seconds until the first layer, and until everything is loaded and compiled
        self._read = self._encode = self._one_expert = 0.0  # seconds
        self._forward = self._again = 0.0  # of a batch through a layer: of the first two, and of the others
        self._second_a_byte = 0.0  # that reading a layer takes
        self._matrices = {x.index: x for x in dense_layers(tuple(m for part in dense.values() for m in part))}
        self._dense_sizes = {v.name: 0 for v in recipe.dense_specs()}
        self._dense = self._dense_part = 0  # bytes of all else; of dense versions of one part, at the most
        self._one_dense = self._dense_work = 0.0  # seconds of a unit of work, and units, those at once counted once

    @staticmethod
    def open(
        checkpoint: str | Path,
        recipe: Recipe,
        calibration: Sequence[str | Path],
        device: str,
        reporter: Reporter,
        revision: str | None,
        memory: int | None,
    ) -> _DryRun:
        """Open what a build would, and refuse what it would refuse."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        with reporter.hub_bars():
            opened = open_checkpoint(checkpoint, revision)
        stream = StreamedModel(opened, device)
        dense = dense_parts(stream, recipe)
        _, windows = calibration_text(opened, recipe, calibration)
        count, length = windows.ids.shape
        needs = needs_of(stream, recipe, count, length, dense, bounded=memory is not None)
        how = place(needs, recipe.calibration.batch_size, memory)
        return _DryRun(stream, recipe, dense, windows.ids, reporter, needs, how)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self._stream.layers)

    def _load(self, part: int | None) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        tensors = self._stream.load(part)
        self._read += time.perf_counter() - began
        return tensors

    def outside(self) -> None:
        """The part outside the layers: its bytes, and what the first layer reads."""
        assert self._walk is not None
        self._add_dense(None, self._load(None))
        if self._recipe.mtp == "keep":
            self._dense += self._stream.mtp_bytes
        self._stream.to_compute(None, self._dtype)
        self._walk.start()
        self._stream.free(None)

    def layer(self, index: int) -> None:
        """A layer's bytes; one batch through it, until the first that has experts, and some of those quantised."""
        from moepack.calibrate.dense import watch_part

        if self._walk is None and self._stream.file_bytes(index) and self._how.experts_on_disk:
            self._in_parts(index)
            return
        before = self._read
        tensors = self._load(index)
        self._second_a_byte = (self._read - before) / max(1, self._stream.part_bytes(index))
        dense, experts = self._stream.split(index, tensors)
        self._add_dense(index, dense)
        if self._walk is not None:
            self._stream.to_compute(index, self._dtype)
            matrices = self._matrices[index].matrices if index in self._matrices else ()
            inputs = [hidden.clone() for hidden in self._walk.hidden] if self._reuses else []
            # Of all windows, as a build's: not every token's moments count then.
            watch = watch_part(self._stream, matrices, len(self._ids), self._walk.length) if matrices else None
            observation, self._forward = self._pass(index, watch)
            self._again = self._forward
            if self._reuses:
                with reusing():  # as from a layer's second batch on: that one takes the memory which the next ones find
                    for _ in range(2):
                        self._walk.restore(inputs)
                        self._again = self._pass(index, watch)[1]
                del inputs
            if observation is not None and experts is not None:
                self._walk = None
                self._one_expert = self._quantise_some(index, experts, observation)
        self._stream.free(index)
        if experts is not None:
            self._add_experts(experts)

    @property
    def _batches(self) -> int:
        return -(-len(self._ids) // self._how.batch_size)

    @property
    def _reuses(self) -> bool:
        """Whether a build has batches that find memory which the one before freed: after a layer's second."""
        return self._how.reuse and self._batches > 2

    def _pass(self, index: int, watch: DenseWatch | None) -> tuple[Observation | None, float]:
        """A batch through a layer: what its experts saw, and seconds."""
        assert self._walk is not None
        began = time.perf_counter()
        observation = self._walk.run_layer(index, watch=watch)
        return observation, time.perf_counter() - began

    def _in_parts(self, index: int) -> None:
        """A layer whose experts memory does not hold, and that nothing goes through: none of them is written."""
        stream, layer = self._stream, self._stream.expert_layers[index]
        began = time.perf_counter()
        dense = stream.tensors(index, stream.dense_names(index))
        self._read += time.perf_counter() - began
        self._add_dense(index, dense)
        del dense
        if not self._encoded:  # sizes follow from shapes: only the reading time counts
            self._read += self._second_a_byte * stream.file_bytes(index)
            return
        for some in stream.expert_ranges(index):
            began = time.perf_counter()
            experts = stream.experts(layer.index, some)
            self._read += time.perf_counter() - began
            self._add_experts(experts)
            del experts  # before the next are read

    def _add_experts(self, experts: ExpertWeights) -> None:
        """Add the bytes of experts in the versions whose sizes only encoding tells."""
        from moepack.calibrate.held import release

        if not self._encoded:
            return
        began = time.perf_counter()
        self._reporter.inner("experts", experts.layer.experts)
        for e in range(experts.layer.experts):
            for version in self._encoded:
                self._sizes[version.name] += len(exact_extent(version, experts, e)[0])
            for matrices in experts.weights:
                release(matrices)
            self._reporter.advance()
        self._encode += time.perf_counter() - began

    def _add_dense(self, part: int | None, tensors: dict[str, torch.Tensor]) -> None:
        """A part's bytes outside the experts, with all versions of its dense matrices."""
        layer, versions = self._matrices.get(part), self._recipe.dense_specs()
        packed: set[str] = set()
        beside, before = self._at_once(part), sum(self._dense_sizes.values())
        for described in layer.matrices if layer else ():
            weight, bias = (f"{described.module}.{name}" for name in ("weight", "bias"))
            packed |= {weight, bias}
            began = time.perf_counter()
            for version in versions:
                sizes = version.stored_sizes((described.matrix,))
                if sizes is None:
                    values = tensors[weight], bits_of(tensors[bias]) if bias in tensors else None
                    sizes = len(exact_matrix(version, described.matrix, *values)[0]), 0
                self._dense_sizes[version.name] += sizes[0]
            self._encode += time.perf_counter() - began
            work = float(described.matrix.weights * described.matrix.cols)
            self._one_dense = self._one_dense or self._quantise_dense(described, tensors, beside)
            self._dense_work += work / beside
        if layer is not None:
            for version in versions:
                self._dense_sizes[version.name] += header_size(version.name, layer)
        self._dense_part = max(self._dense_part, sum(self._dense_sizes.values()) - before)
        self._dense += sum(int(t.nbytes) for name, t in tensors.items() if name not in packed)

    def _at_once(self, part: int | None) -> int:
        """How many row shards of a part a build makes at once."""
        layer = self._matrices.get(part)
        shards = len(row_shard_tasks(layer.matrices, self._recipe, "", self._stream.device.type)) if layer else 0
        most = workers(self._stream.device, max((size for _, size in self._needs.row_shards), default=1))
        return max(1, min(self._how.row_shards, shards, most))

    def _quantise_dense(self, matrix: DenseMatrix, tensors: dict[str, torch.Tensor], beside: int) -> float:
        """Seconds a unit of work on a matrix at every affine width, beside as many row shards as in a build."""
        import torch

        device = self._stream.device
        task = row_shard_tasks((matrix,), self._recipe, "", device.type)[-1]
        task = replace(task, versions=lossy(task.versions))
        white, seconds = torch.eye(matrix.matrix.cols, device=device), 0.0
        for together in (1, beside):  # the first loads what the quantisers need
            began = time.perf_counter()
            with ThreadPoolExecutor(together) as pool:
                list(pool.map(lambda _: make_row_shard(task, tensors, white, white, device), range(together)))
            seconds = time.perf_counter() - began
        return seconds / (task.shard.weights * task.shard.cols)

    def _quantise_some(self, index: int, experts: ExpertWeights, observation: Observation) -> float:
        """Seconds of one expert at every width, in a batch of PROBED, beside as many batches as in a build."""
        from moepack.quantize.expert_batch import expert_batches

        settings, device = batch_settings(self._recipe), self._stream.device

        def make(some: range) -> None:
            task = ExpertBatchTask("", index, some, settings.versions, settings, device.type)
            make_expert_batch(task, self._stream.experts_module(index), experts.select(some), seen, device)

        batches = expert_batches(experts.layer, settings)
        few = batches[0][:PROBED]
        seen = _shared_out(observation, self._ids.numel(), experts.layer.experts, len(few))
        began = time.perf_counter()
        make(range(1))  # loads and compiles what the quantisers need
        first, began = time.perf_counter() - began, time.perf_counter()
        # A bound may leave room for more than memory has now.
        at_once = min(self._how.batches, workers(device, max(size for _, size in self._needs.batches)))
        beside = min(at_once, len(batches))
        with ThreadPoolExecutor(beside) as pool:  # cores that share a cache, or are two of one, slow each other
            list(pool.map(make, [few] * beside))
        one = (time.perf_counter() - began) / len(few)
        self.start += max(0.0, first - one)
        # Of a layer's batches as many are made at once as there are workers; the last round may leave some idle.
        return one * -(-len(batches) // at_once) / len(batches)

    def result(self, rate: float, keep: bool, linked: bool) -> Estimate:
        """Scale the measurements to the whole build.

        `rate` is the disk's bytes a second, 0 for unknown; `keep` keeps activations; `linked` makes the bundle's layer
        files by hard links.
        """
        count = sum(layer.experts for layer in self._experts)
        batches = self._batches
        cold = min(2, batches)
        versions = sum(self._sizes.values()) + sum(self._dense_sizes.values())
        needs, how = self._needs, self._how
        kept = needs.hidden * (1 + (self.layers > EVERY)) if keep else 0
        filed = needs.experts * how.experts_on_disk
        spilt = needs.hidden * how.hidden_on_disk + needs.seen * how.seen_on_disk + filed
        passes = 2 if self._recipe.calibration.until else 1  # one counts tokens first
        written = 2 * versions + 2 * self._dense + kept // 2 * (self.layers // EVERY + 1)
        written += passes * (self.layers + 1) * needs.hidden * how.hidden_on_disk
        written += passes * len(self._experts) * (filed + needs.seen * how.seen_on_disk)
        seconds = {
            "start": self.start,
            "read": self._read * passes,
            "calibrate": (self._forward * cold + self._again * (batches - cold)) * self.layers * passes,
            "quantise": self._one_expert * count + self._one_dense * self._dense_work,
            "encode": self._encode,
            "write": written / rate if rate else 0.0,
        }
        # A part's pieces lie beside its files until these are whole; dense tensors are copied into the bundle's.
        behind = self._dense_part + needs.hidden * how.hidden_on_disk
        pieces = max(versions // len(self._experts) + spilt, behind)
        work_bytes = kept + max(pieces, self._dense + versions * (not linked))
        return Estimate(
            self._sizes, self._dense, work_bytes, peak(needs, how)[1], seconds, count, len(self._experts),
            self._dense_sizes if self._matrices else {}, how.batch_size, how.on_disk,
        )  # fmt: skip


def _known_sizes(recipe: Recipe, layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Bytes of each version's files; only headers of a version whose sizes depend on the values."""
    sizes = {}
    for v in recipe.version_specs():
        sizes[v.name] = sum(header_size(v.name, layer) for layer in layers)
        for layer in layers:
            stored = v.stored_sizes(layer.matrices)
            sizes[v.name] += layer.experts * stored[0] if stored is not None else 0
    return sizes


def _shared_out(observation: Observation, tokens: int, experts: int, few: int) -> Observation:
    """The observed tokens over and over, so that the first few experts see what few of all would of `tokens` tokens.

    Those few are evenly spaced among all as ordered by their tokens: an expert with many takes another time than one
    with few. Other tokens of the layer stand among theirs: experts are fitted to and measured on some of them too.
    """
    import torch

    from moepack.calibrate.gather import LAYER

    seen = torch.bincount(observation.experts.flatten(), minlength=experts).sort().values
    picked = seen[((torch.arange(few) + 0.5) * experts / few).long()]
    shares = [min(tokens, int(s) * tokens // len(observation.inputs)) for s in picked]
    total = max(*shares, min(tokens, max(shares) + 2 * LAYER))
    at = torch.arange(total) % len(observation.inputs)
    chosen = torch.full((total, few), experts, dtype=torch.int32)  # none of the layer's
    for e, share in enumerate(shares):
        chosen[(torch.linspace(0, total - 1, share).long() + e) % total, e] = e
    gates = observation.gates[at, :1].expand(-1, few)
    return replace(observation, inputs=observation.inputs[at], experts=chosen, gates=gates)


def render(e: Estimate) -> Any:
    """The estimate as a table."""
    from rich.table import Table

    table = Table("what", "how much", title=f"a build of {e.experts} experts in {e.layers} layers")
    for name, size in e.versions.items():
        table.add_row(f"{name}, bytes", f"{size:,}")
    whole = sum(e.versions.values()) + sum(e.dense_versions.values()) + e.dense_bytes
    for name, size in e.dense_versions.items():
        table.add_row(f"dense {name}, bytes", f"{size:,}")
    table.add_row("dense tensors, bytes", f"{e.dense_bytes:,}")
    table.add_row("bundle, bytes", f"{whole:,} and its tables")
    table.add_row("work directory, at most about", f"{e.work_bytes / 2**30:,.1f} GiB more")
    for part, size in e.memory.items():
        table.add_row(f"memory, {part}", f"{size / 2**20:,.0f} MiB")
    table.add_row("memory, peak about", f"{sum(e.memory.values()) / 2**20:,.0f} MiB")
    table.add_row("windows a batch", f"{e.batch_size}")
    if e.on_disk:
        table.add_row("on disk meanwhile", e.on_disk)
    for part, took in e.seconds.items():
        table.add_row(f"time, {part}", f"{took:,.1f} s")
    table.add_row("time, all about", _duration(sum(e.seconds.values())))
    return table


def _duration(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
