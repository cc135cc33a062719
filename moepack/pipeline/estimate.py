"""What a build will take, without making anything: bytes exactly, memory and time from a probe.

Every expert goes through the lossless codec, because only that tells how long it gets; everything else is arithmetic,
one batch through the first layers, and a few experts through the quantiser.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches, resident_memory
from moepack.pack.layer_file import header_size
from moepack.pack.spec import LOSSLESS, DenseLayer, Matrix, affine_extent_size, dense_layers
from moepack.progress import Reporter
from moepack.reports.doctor import disk_rates
from moepack.runtime.devices.glibc import trim
from moepack.runtime.load import check_device

from .allocate import check_allocation
from .dense_part import lossless_matrix
from .expert_batch import ExpertBatchTask, bare, batch_settings, lossless_extent, make_batch
from .recipe import Recipe, load_recipe
from .run import calibration_text

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import ExpertLayer


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build will take.

    Attributes:
        versions: bytes of each version's files, exact.
        dense_bytes: bytes of all other tensors, exact; where dense matrices have versions, without these.
        dense_versions: bytes of the files of each of these versions, exact.
        work_bytes: the most the work directory will hold beside the bundle, about.
        memory: what will be in memory at once by part, about, in bytes; the peak is their sum.
        seconds: what will take how long, about.
        experts: how many, and in how many layers.
        layers: layers that have experts.
    """

    versions: dict[str, int]
    dense_bytes: int
    work_bytes: int
    memory: dict[str, int]
    seconds: dict[str, float]
    experts: int
    layers: int
    dense_versions: dict[str, int] = field(default_factory=dict)


def estimate(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    device: str = "cpu",
    reporter: Reporter | None = None,
    revision: str | None = None,
) -> Estimate:
    """What `moepack.build` with these arguments will take. Writes a probe beside `output`, and removes it.

    Raises:
        MoepackError: what the build itself would raise before it begins.
    """
    bound_kernel_caches()
    check_device(device)
    reporter = reporter or Reporter()
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    run = _DryRun.open(checkpoint, recipe, calibration, device, reporter, revision)
    base = resident_memory()
    reporter.stage("dry run", run.layers + 2)
    reporter.step("outside the layers")
    run.outside()
    for index in range(run.layers):
        reporter.step(f"layer {index}")
        run.layer(index)
        trim()
    reporter.step("disk")
    return run.result(base, _write_rate(Path(output)))


# Experts quantised together in the probe. With one, what a batch's experts share counts for it alone: tiny-qwen3-moe,
# by 16 together, took 0.5 to 0.65 of the CPU time that was said; with eight 0.91 to 0.93.
PROBED = 8


class _DryRun:
    """A checkpoint that is gone through once, and what has been measured so far."""

    def __init__(self, stream: StreamedModel, recipe: Recipe, ids: torch.Tensor, reporter: Reporter) -> None:
        import torch

        from moepack.calibrate.forward import CalibrationPass

        self._stream, self._recipe, self._ids, self._reporter = stream, recipe, ids, reporter
        self._experts = list(stream.expert_layers.values())
        self._dtype = getattr(torch, recipe.calibration.dtype)
        batch = recipe.calibration.batch_size
        self._walk: CalibrationPass | None = CalibrationPass(stream, ids[:batch], batch, self._dtype)
        self._sizes = _known_sizes(recipe, self._experts)
        self._read = self._encode = self._forward = self._one_expert = 0.0  # seconds
        self._dense = self._largest = 0  # bytes
        self._matrices: dict[int | None, DenseLayer] = {}
        self._dense_sizes = {v.name: 0 for v in recipe.dense_specs()}
        self._one_dense = self._dense_work = 0.0  # seconds of a unit of work, and units
        if recipe.dense:
            from moepack.calibrate.dense import dense_matrices

            self._matrices = {x.index: x for x in dense_layers(dense_matrices(stream))}

    @staticmethod
    def open(
        checkpoint: str | Path,
        recipe: Recipe,
        calibration: Sequence[str | Path],
        device: str,
        reporter: Reporter,
        revision: str | None,
    ) -> _DryRun:
        """Open all that a build would, and refuse what it would refuse."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.dense import dense_matrices
        from moepack.calibrate.stream import StreamedModel

        with reporter.hub_bars():
            opened = open_checkpoint(checkpoint, revision)
        stream = StreamedModel(opened, device)
        layers, dense = list(stream.expert_layers.values()), dense_matrices(stream) if recipe.dense else ()
        check_allocation(recipe.allocation, layers, recipe.version_specs(), dense, recipe.dense_specs())
        _, windows = calibration_text(opened, recipe, calibration)
        return _DryRun(stream, recipe, windows.ids, reporter)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self._stream.layers)

    def _load(self, part: int | None) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        tensors = self._stream.load(part)
        self._read += time.perf_counter() - began
        self._largest = max(self._largest, _bytes(tensors))
        return tensors

    def outside(self) -> None:
        """The part outside the layers: its bytes, and what the first layer reads."""
        assert self._walk is not None
        self._add_dense(None, self._load(None))
        self._stream.to_compute(None, self._dtype)
        self._walk.start()
        self._stream.free(None)

    def layer(self, index: int) -> None:
        """A layer's bytes; one batch through it, until the first that has experts, and some of those quantised."""
        from moepack.calibrate.dense import watch_part

        tensors = self._load(index)
        dense, experts = self._stream.split(index, tensors)
        self._add_dense(index, dense)
        if self._walk is not None:
            self._stream.to_compute(index, self._dtype)
            began = time.perf_counter()
            matrices = self._matrices[index].matrices if index in self._matrices else ()
            watch = watch_part(self._stream, matrices, self._walk.windows, self._walk.length) if matrices else None
            observation = self._walk.run_layer(index, watch=watch)
            self._forward = time.perf_counter() - began
            if observation is not None and experts is not None:
                self._walk = None
                self._one_expert = self._quantise_some(index, experts, observation)
        self._stream.free(index)
        if experts is not None and LOSSLESS in self._sizes:
            began = time.perf_counter()
            self._sizes[LOSSLESS] += _lossless_bytes(experts, self._reporter)
            self._encode += time.perf_counter() - began

    def _add_dense(self, part: int | None, tensors: dict[str, torch.Tensor]) -> None:
        """A part's bytes outside the experts: of matrices that get versions, those of these."""
        layer, versions = self._matrices.get(part), self._recipe.dense_specs()
        packed: set[str] = set()
        for described in layer.matrices if layer else ():
            weight, bias = (f"{described.module}.{name}" for name in ("weight", "bias"))
            packed |= {weight, bias}
            began = time.perf_counter()
            for version in versions:
                self._dense_sizes[version.name] += (
                    len(lossless_matrix(described.matrix, tensors[weight], tensors.get(bias))[0])
                    if version.is_lossless
                    else affine_extent_size((described.matrix,), version)
                )
            self._encode += time.perf_counter() - began
            work = float(described.matrix.weights * described.matrix.cols)
            self._one_dense = self._one_dense or self._quantise_dense(described.matrix, tensors[weight]) / work
            self._dense_work += work
        if layer is not None:
            for version in versions:
                self._dense_sizes[version.name] += header_size(version.name, layer)
        self._dense += _bytes({name: t for name, t in tensors.items() if name not in packed})

    def _quantise_dense(self, matrix: Matrix, weight: torch.Tensor) -> float:
        """Seconds that a matrix takes at every width; inputs are taken for white."""
        import torch

        from moepack.quantize.dense_matrix import quantise_rows

        device, affine = self._stream.device, [v for v in self._recipe.dense_specs() if not v.is_lossless]
        white, seconds = torch.eye(matrix.cols, device=device), 0.0
        for _ in range(2):  # the first loads what the quantisers need
            began = time.perf_counter()
            for _ in quantise_rows(
                lambda a, b: weight[a:b].to(device, torch.float32), (matrix.rows, matrix.cols), white, white,
                self._recipe.quantize.method, affine, {},
            ):  # fmt: skip
                pass
            seconds = time.perf_counter() - began
        return seconds

    def _quantise_some(self, index: int, experts: ExpertWeights, observation: Observation) -> float:
        """Seconds that one expert takes at every width, among some that are quantised together."""
        import torch

        from moepack.quantize.expert_batch import expert_batches

        settings = batch_settings(self._recipe)

        def task(some: range) -> ExpertBatchTask:
            return ExpertBatchTask(
                bare(self._stream.experts_module(index)), experts.select(some), index, some, settings.versions,
                settings, str(self._stream.device), torch.get_num_threads(),
            )  # fmt: skip

        few = expert_batches(experts.layer, settings)[0][:PROBED]
        seen = _shared_out(observation, self._ids.numel(), experts.layer.experts, len(few))
        make_batch(task(range(1)), seen)  # loads and compiles what the quantisers need
        began = time.perf_counter()
        make_batch(task(few), seen)
        return (time.perf_counter() - began) / len(few)

    def result(self, base: int, rate: float) -> Estimate:
        """What was measured, scaled to the whole.

        Args:
            base: bytes of the process before the first layer.
            rate: bytes a second that the disk writes; 0 where that is not known.
        """
        count = sum(layer.experts for layer in self._experts)
        batches = -(-len(self._ids) // self._recipe.calibration.batch_size)
        versions = sum(self._sizes.values()) + sum(self._dense_sizes.values())
        hidden_size = self._stream.model.config.get_text_config().hidden_size
        hidden = self._ids.numel() * hidden_size * self._dtype.itemsize
        written = 2 * versions + 2 * self._dense + hidden * self.layers
        seconds = {
            "read": self._read,
            "calibrate": self._forward * batches * self.layers,
            "quantise": self._one_expert * count + self._one_dense * self._dense_work,
            "encode": self._encode,
            "write": written / rate if rate else 0.0,
        }
        memory = {
            "process": base,
            "layer": self._largest,
            "activations": 2 * hidden,  # what goes into the next layer, and what this layer's experts saw
            "expert batch": self._batch_memory(),
        }
        work_bytes = versions + self._dense + hidden + versions // len(self._experts)
        shown = self._dense_sizes if self._matrices else {}
        return Estimate(self._sizes, self._dense, work_bytes, memory, seconds, count, len(self._experts), shown)

    def _batch_memory(self) -> int:
        """The most that an expert batch takes."""
        from moepack.quantize.expert_batch import expert_batches, expert_memory

        settings = batch_settings(self._recipe)
        return max(
            expert_memory(x, settings) * max(len(part) for part in expert_batches(x, settings)) for x in self._experts
        )


def _known_sizes(recipe: Recipe, layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Bytes of each version's files; of the lossless one only their headers, as its extents are yet to be made."""
    sizes = {}
    for v in recipe.version_specs():
        sizes[v.name] = sum(header_size(v.name, layer) for layer in layers)
        if not v.is_lossless:
            sizes[v.name] += sum(layer.experts * affine_extent_size(layer.matrices, v) for layer in layers)
    return sizes


def _write_rate(output: Path) -> float:
    """Bytes a second that the disk of a bundle to be takes; 0 where that cannot be measured."""
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return float(disk_rates(parent).get("write_bytes_per_second", 0.0))


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _lossless_bytes(experts: ExpertWeights, reporter: Reporter) -> int:
    """Bytes of a layer's lossless extents."""
    total = 0
    reporter.inner("experts", experts.layer.experts)
    for e in range(experts.layer.experts):
        total += len(lossless_extent(experts, e)[0])
        reporter.advance()
    return total


def _shared_out(observation: Observation, tokens: int, experts: int, few: int) -> Observation:
    """The observed tokens over and over, so that each of the first few experts sees its share of `tokens` tokens.

    Other tokens of the layer stand among its own: it is fitted to some of them too, and measured on some.
    """
    import torch

    from moepack.calibrate.tokens import LAYER

    share = max(1, tokens * observation.experts.shape[1] // experts)
    total = max(share, min(tokens, share + 2 * LAYER))
    at = torch.arange(total) % len(observation.inputs)
    chosen = torch.full((total, few), experts, dtype=torch.int32)  # none of the layer's
    for e in range(few):
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
    for part, took in e.seconds.items():
        table.add_row(f"time, {part}", f"{took:,.1f} s")
    table.add_row("time, all about", _duration(sum(e.seconds.values())))
    return table


def _duration(seconds: float) -> str:
    return (
        f"{seconds:,.0f} s"
        if seconds < 120
        else f"{seconds / 60:,.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:,.1f} h"
    )
