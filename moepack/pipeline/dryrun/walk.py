"""A dry run over a complete checkpoint: bytes exactly, memory and time from measurements.

Every expert goes through the lossless codec, because only encoding tells its size. For memory and time, one batch runs
through the first layers, and a few experts are quantised. The rest is arithmetic.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from moepack.pack.layer_file import header_size
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.spec import DenseMatrix, Version, dense_layers, lossy
from moepack.runtime.devices.glibc import reusing
from moepack.shared.progress import Reporter

from ..bound import BuildNeeds, MemoryPlan, peak, workers
from ..needs import Dense
from ..recipe import Recipe
from ..run import EVERY
from ..tasks.experts import ExpertBatchTask, batch_settings, exact_extent, make_expert_batch, released_extent
from ..tasks.row_shards import bits_of, exact_matrix, make_row_shard, released_matrix, row_shard_tasks
from .report import Estimate

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseWatch
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.stream import StreamedModel

# Experts quantised together in the probe. A batch's experts share work that a lone expert bears alone: tiny-qwen3-moe
# (batches of 16) took 0.5 to 0.65 of the CPU time estimated with a probe of one, and 0.91 to 0.93 with eight.
PROBED = 8


class DryRun:
    """A walk through a checkpoint that measures instead of building."""

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
        self._stream = stream
        self._recipe = recipe
        self._ids = ids
        self._reporter = reporter
        self._experts = list(stream.expert_layers.values())
        self.layers = len(stream.layers)
        self._batches = -(-len(ids) // how.batch_size)
        self._reuses = how.reuse and self._batches > 2  # batches after a layer's second reuse memory
        self._dtype = recipe.calibration.torch_dtype
        self._needs = needs
        self._how = how
        self._walk: CalibrationPass | None = None
        self._sizes = {}  # version -> bytes of its files; extents that are entropy-coded are added later
        for v in recipe.version_specs():
            stored = [(layer, v.stored_sizes(layer.matrices) or (0,)) for layer in self._experts]
            self._sizes[v.name] = sum(header_size(v.name, x) + x.experts * sizes[0] for x, sizes in stored)
        self._encoded = [v for v in recipe.version_specs() if v.entropy_coded]  # only encoding tells their sizes
        self.seconds = defaultdict[str, float](float)  # by kind of work; "start": until all is loaded and compiled
        self._one_expert = 0.0  # seconds to quantise one expert
        self._forward = self._again = 0.0  # seconds of a batch in a layer: one of its first two, a later one
        self._second_a_byte = 0.0  # seconds to read a byte of a layer
        self._matrices = {x.index: x for x in dense_layers(tuple(m for part in dense.values() for m in part))}
        self._dense_sizes = {v.name: 0 for v in recipe.dense_specs()}
        self._dense = self._dense_part = 0  # bytes of tensors without versions; the most of one part's versions
        self._one_dense = self._dense_work = 0.0  # seconds a unit of work; units, those done at once counted as one

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Add the elapsed time to `self.seconds[kind]`."""
        began = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - began

    def _load(self, part: int | None) -> dict[str, torch.Tensor]:
        with self._timed("read"):
            return self._stream.load(part)

    def outside(self) -> None:
        """Count the bytes of the part outside the layers, and compute the first layer's input."""
        from moepack.calibrate.forward import CalibrationPass

        batch = self._how.batch_size
        self._walk = CalibrationPass(self._stream, self._ids[:batch], batch, self._dtype)
        self._add_dense(None, self._load(None))
        if self._recipe.mtp == "keep":
            self._dense += self._stream.mtp_bytes
        self._stream.to_compute(None, self._dtype)
        self._walk.start()
        self._stream.free(None)

    def layer(self, index: int) -> None:
        """Count a layer's bytes. Up to the first layer with experts, run a batch; there, quantise a few experts."""
        from moepack.calibrate.dense import watch_part
        from moepack.quantize.expert_batch import expert_batches

        if self._walk is None and self._stream.file_bytes(index) and self._how.experts_on_disk:
            self._in_parts(index)
            return
        before = self.seconds["read"]
        tensors = self._load(index)
        self._second_a_byte = (self.seconds["read"] - before) / max(1, self._stream.part_bytes(index))
        dense, experts = self._stream.split(index, tensors)
        self._add_dense(index, dense)
        if self._walk is not None:
            self._stream.to_compute(index, self._dtype)
            matrices = self._matrices[index].matrices if index in self._matrices else ()
            inputs = {name: x.clone() for name, x in self._walk.kept().items()} if self._reuses else {}
            # Sized for all windows, as in a build: then not every token adds to the moments.
            sized = len(self._ids), self._walk.length, self._recipe.fits_dense
            watch = watch_part(self._stream, matrices, *sized) if matrices else None
            observation, self._forward = self._pass(index, watch)
            self._again = self._forward
            if self._reuses:
                with reusing():  # as in a build, where the batches after a layer's second reuse memory
                    for _ in range(2):
                        self._walk.restore(sorted(inputs.items()))
                        self._again = self._pass(index, watch)[1]
                del inputs
            if observation is not None and experts is not None:
                self._walk = None
                batches = expert_batches(experts.layer, batch_settings(self._recipe))
                few = batches[0][:PROBED]
                seen = _shared_out(observation, self._ids.numel(), experts.layer.experts, len(few))
                self._one_expert = self._quantise_some(index, experts.select(few), seen, len(batches))
        self._stream.free(index)
        if experts is not None:
            self._add_experts(experts)

    def _pass(self, index: int, watch: DenseWatch | None) -> tuple[Observation | None, float]:
        """Run a batch through a layer; return the observation and the seconds that it took."""
        assert self._walk is not None
        began = time.perf_counter()
        observation = self._walk.run_layer(index, watch=watch)
        return observation, time.perf_counter() - began

    def _in_parts(self, index: int) -> None:
        """Measure a layer that is too large to load, by reading its experts in slices; runs no batch."""
        stream = self._stream
        with self._timed("read"):
            dense = stream.tensors(index, stream.dense_names(index))
        self._add_dense(index, dense)
        del dense
        if not self._encoded:  # sizes follow from shapes: only the reading time counts
            self.seconds["read"] += self._second_a_byte * stream.file_bytes(index)
            return
        for some in stream.expert_ranges(index):
            with self._timed("read"):
                experts = stream.experts(index, some)
            self._add_experts(experts, some.start)
            del experts  # before the next are read

    def _add_experts(self, experts: ExpertWeights, first: int = 0) -> None:
        """Add the bytes of experts in entropy-coded versions. `first` is the first one's index in its layer."""
        from moepack.calibrate.held import release

        if not self._encoded:
            return
        self._reporter.inner("experts", experts.layer.experts)
        with self._timed("encode"):
            for e in range(experts.layer.experts):
                for version in self._encoded:
                    if version.released:
                        native = self._stream.native_experts(experts.layer.index, range(first + e, first + e + 1))
                        extent, _ = released_extent(version, native, experts, e)
                    else:
                        extent, _ = exact_extent(version, experts, e)
                    self._sizes[version.name] += len(extent)
                for matrices in experts.weights:
                    release(matrices)
                self._reporter.advance()

    def _add_dense(self, part: int | None, tensors: dict[str, torch.Tensor]) -> None:
        """Count a part's bytes outside the experts, all versions of its dense matrices included, and their work."""
        layer = self._matrices.get(part)
        versions = self._recipe.dense_specs()
        packed: set[str] = set()
        beside = self._at_once(part)
        before = sum(self._dense_sizes.values())
        for described in layer.matrices if layer else ():
            weight, bias = (f"{described.module}.{name}" for name in ("weight", "bias"))
            packed |= {weight, bias}
            with self._timed("encode"):
                for version in versions:
                    sizes = version.stored_sizes((described.matrix,))
                    size = sizes[0] if sizes else self._dense_size(version, described, tensors)
                    self._dense_sizes[version.name] += size
            work = float(described.matrix.weights * described.matrix.cols)
            self._one_dense = self._one_dense or self._quantise_dense(described, tensors, beside)
            self._dense_work += work / beside
        if layer is not None:
            for version in versions:
                self._dense_sizes[version.name] += header_size(version.name, layer)
        self._dense_part = max(self._dense_part, sum(self._dense_sizes.values()) - before)
        self._dense += sum(int(t.nbytes) for name, t in tensors.items() if name not in packed)

    def _dense_size(self, version: Version, described: DenseMatrix, tensors: Mapping[str, torch.Tensor]) -> int:
        """Bytes of a dense matrix in an entropy-coded version."""
        weight, bias = (tensors.get(f"{described.module}.{name}") for name in ("weight", "bias"))
        assert weight is not None
        if version.released:
            return len(released_matrix(version, described, self._stream.native_dense(described.module), bias)[0])
        return len(exact_matrix(version, described.matrix, weight, None if bias is None else bits_of(bias))[0])

    def _at_once(self, part: int | None) -> int:
        """The number of row shards of a part that a build makes at once."""
        layer = self._matrices.get(part)
        shards = len(row_shard_tasks(layer.matrices, self._recipe, "", self._stream.device.type)) if layer else 0
        most = workers(self._stream.device, max((size for _, size in self._needs.row_shards), default=1))
        return max(1, min(self._how.row_shards, shards, most))

    def _quantise_dense(self, matrix: DenseMatrix, tensors: dict[str, torch.Tensor], beside: int) -> float:
        """Measure seconds per unit of work (weights times columns) at every lossy width, `beside` shards at once."""
        import torch

        device = self._stream.device
        task = row_shard_tasks((matrix,), self._recipe, "", device.type)[-1]
        task = replace(task, versions=lossy(task.versions))
        white = torch.eye(matrix.matrix.cols, device=device)
        seconds = 0.0
        for together in (1, beside):  # the first round loads libraries
            began = time.perf_counter()
            with ThreadPoolExecutor(together) as pool:
                list(pool.map(lambda _: make_row_shard(task, tensors, white, white, device), range(together)))
            seconds = time.perf_counter() - began
        return seconds / (task.shard.weights * task.shard.cols)

    def _quantise_some(self, index: int, experts: ExpertWeights, seen: Observation, batches: int) -> float:
        """Measure seconds per expert at every width: these experts of a layer, side by side as in a build.

        `seen`: what reached them, `_shared_out`. `batches`: the layer's expert batches.
        """
        settings = batch_settings(self._recipe)
        device = self._stream.device
        few = range(experts.layer.experts)

        def make(some: range) -> None:
            task = ExpertBatchTask("", index, some, settings.versions, settings, device.type)
            make_expert_batch(task, self._stream.experts_module(index), experts.select(some), seen, device)

        began = time.perf_counter()
        make(range(1))  # loads and compiles
        first = time.perf_counter() - began
        began = time.perf_counter()
        # --memory may allow more batches at once than the memory that is available now.
        at_once = min(self._how.batches, workers(device, max(size for _, size in self._needs.batches)))
        beside = min(at_once, batches)
        with ThreadPoolExecutor(beside) as pool:  # cores that share a cache, or one core's threads, slow each other
            list(pool.map(make, [few] * beside))
        one = (time.perf_counter() - began) / len(few)
        self.seconds["start"] += max(0.0, first - one)
        # A layer's batches run in rounds of `at_once`; the last round may leave workers idle.
        return one * -(-batches // at_once) / batches

    def result(self, rates: JsonObject, keep: bool, linked: bool) -> Estimate:
        """Scale the measurements to the whole build.

        `rates` are the disk's, from `disk_rates`. `keep`: activations are kept. `linked`: the bundle's layer
        files are hard links.
        """
        rate = float(rates.get("write_bytes_per_second", 0.0))
        count = sum(layer.experts for layer in self._experts)
        batches = self._batches
        cold = min(2, batches)
        versions = sum(self._sizes.values()) + sum(self._dense_sizes.values())
        needs = self._needs
        how = self._how
        kept = needs.hidden * (1 + (self.layers > EVERY)) if keep else 0
        filed = needs.experts * how.experts_on_disk
        spilt = needs.hidden * how.hidden_on_disk + needs.seen * how.seen_on_disk + filed
        written = 2 * versions + 2 * self._dense + kept // 2 * (self.layers // EVERY + 1)
        written += (self.layers + 1) * needs.hidden * how.hidden_on_disk
        written += len(self._experts) * (filed + needs.seen * how.seen_on_disk)
        seconds = {
            "start": self.seconds["start"],
            "read": self.seconds["read"],
            "calibrate": (self._forward * cold + self._again * (batches - cold)) * self.layers,
            "quantise": self._one_expert * count + self._one_dense * self._dense_work,
            "encode": self.seconds["encode"],
            "write": written / rate if rate else 0.0,
        }
        # A part's task results stay until its files are whole; dense tensors are copied into the bundle's files.
        behind = self._dense_part + needs.hidden * how.hidden_on_disk
        pieces = max(versions // len(self._experts) + spilt, behind)
        work_bytes = kept + max(pieces, self._dense + versions * (not linked))
        return Estimate(
            self._sizes,
            self._dense,
            work_bytes,
            peak(needs, how)[1],
            seconds,
            count,
            len(self._experts),
            self._dense_sizes if self._matrices else {},
            how.batch_size,
            how.on_disk,
            self._stream.checkpoint.bytes,
        )


def _shared_out(observation: Observation, tokens: int, experts: int, few: int) -> Observation:
    """Turn one batch's observation into one of `few` experts, over a build's number of `tokens`.

    Time depends on an expert's number of tokens. So each of the `few` stands for a real expert, and these are evenly
    spaced among all experts sorted by that number. Observed tokens are repeated to reach a real expert's number. Other
    tokens of the layer are mixed in: experts are fitted to and measured on some of them too.
    """
    import torch

    from moepack.calibrate.gather import LAYER

    seen = torch.bincount(observation.experts.flatten(), minlength=experts)[:experts].sort().values
    picked = seen[((torch.arange(few) + 0.5) * experts / few).long()]
    shares = [min(tokens, int(s) * tokens // len(observation.inputs)) for s in picked]
    total = max(*shares, min(tokens, max(shares) + 2 * LAYER))
    at = torch.arange(total) % len(observation.inputs)
    chosen = torch.full((total, few), experts, dtype=torch.int32)  # this number stands for no expert
    for e, share in enumerate(shares):
        chosen[(torch.linspace(0, total - 1, share).long() + e) % total, e] = e
    gates = observation.gates[at, :1].expand(-1, few)
    return replace(observation, inputs=observation.inputs[at], experts=chosen, gates=gates)
