"""A walk over a model's layers that adds up the bytes and the work of a build, by shapes.

A version's bytes follow from its shapes, but for entropy-coded ones: where the weights are here they are encoded, and
elsewhere their bytes are scaled from a matrix of Gaussian values, whose exponents are about as uneven as those of
trained weights. Time is arithmetic over the rates of small probes.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from moepack.families.model_class import top_k
from moepack.pack.layer_file import header_size
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.sections import PAGE, align
from moepack.pack.spec import DenseMatrix, ExpertLayer, Matrix, Version, dense_layers, lossy
from moepack.quantize import methods
from moepack.shared.progress import Reporter

from ..bound import BuildNeeds, MemoryPlan, peak, workers
from ..needs import Dense
from ..recipe import Recipe
from ..run import EVERY
from ..tasks.experts import ExpertBatchTask, batch_settings, make_expert_batch
from ..tasks.result import fixed_threads
from ..tasks.row_shards import make_row_shard, row_shard_tasks
from .probes import PROBED, WIDE, operations, sample, seen, small_experts
from .report import Estimate

if TYPE_CHECKING:
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.outline import Outline
    from moepack.calibrate.stream import StreamedModel


class DryRun:
    """The bytes and work of the parts that were counted so far."""

    def __init__(
        self,
        stream: StreamedModel,
        outline: Outline | None,
        recipe: Recipe,
        dense: Dense,
        shape: tuple[int, int],
        reporter: Reporter,
        needs: BuildNeeds,
        how: MemoryPlan,
    ) -> None:
        """`outline` is None where the weights are here; `shape`: calibration windows, and tokens of one."""
        self._stream = stream
        self._outline = outline
        self._recipe = recipe
        self._windows, self._length = shape
        self._reporter = reporter
        self._experts = list(stream.expert_layers.values())
        self.layers = len(stream.layers)
        self._needs = needs
        self._how = how
        self._top_k = top_k(stream.model.config)
        self._sizes = {}  # version -> bytes of its files; extents that are entropy-coded are added later
        for v in recipe.version_specs():
            stored = [(layer, v.stored_sizes(layer.matrices) or (0,)) for layer in self._experts]
            self._sizes[v.name] = sum(header_size(v.name, x) + x.experts * sizes[0] for x, sizes in stored)
        self._encoded = [v for v in recipe.version_specs() if v.entropy_coded]  # only encoding tells their sizes
        self._samples: dict[str, tuple[float, float]] = {}  # version -> bits a weight when encoded, seconds a weight
        self.seconds = defaultdict[str, float](float)  # by kind of work; "start": until all is loaded and compiled
        self._operations = 0.0  # floating-point operations of a batch, through all layers
        self._one_expert = 0.0  # seconds to quantise one expert
        self._matrices = {x.index: x for x in dense_layers(tuple(m for part in dense.values() for m in part))}
        self._dense_sizes = {v.name: 0 for v in recipe.dense_specs()}
        self._dense = 0  # bytes of tensors without versions
        self._dense_part = 0  # the most bytes of one part's dense versions
        self._one_dense = 0.0  # seconds a unit of work on dense matrices
        self._dense_work = 0.0  # units, those done at once counted as one

    @contextlib.contextmanager
    def _encoding(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds["encode"] += time.perf_counter() - began

    def outside(self) -> None:
        """Count the part outside the layers."""
        self._add_dense(None)
        if self._recipe.mtp == "keep":
            self._dense += self._stream.mtp_bytes

    def layer(self, index: int) -> None:
        """Count a layer's bytes and operations; of the first layer with experts, quantise a few small ones."""
        self._add_dense(index)
        tokens = min(self._how.batch_size, self._windows) * self._length
        rows, active = self._stream.dense_size(index)
        layer = self._stream.expert_layers.get(index)
        if layer is not None:
            active += self._top_k * layer.expert_weights
            if not self._one_expert and batch_settings(self._recipe).versions:
                self._one_expert = self._probe(layer)
            self._encode_experts(layer)
        attended = rows * self._length  # scores and values, as `needs` counts rows
        self._operations += 2.0 * tokens * (active + attended)

    def _sampled_size(self, version: Version, matrices: tuple[Matrix, ...], extents: int = 1) -> int:
        """Approximate bytes of extents in an entropy-coded version. Adds the time of encoding them."""
        weights = sum(m.weights for m in matrices)
        if version.name not in self._samples:
            self._samples[version.name] = sample(version, min(m.cols for m in matrices))
        bits, seconds = self._samples[version.name]
        self.seconds["encode"] += seconds * weights * extents
        biases = sum(2 * m.rows for m in matrices if m.bias)
        return extents * align(int(weights * bits / 8) + biases, PAGE)

    def _encode_experts(self, layer: ExpertLayer) -> None:
        if self._outline is not None:
            for version in self._encoded:
                self._sizes[version.name] += self._sampled_size(version, layer.matrices, layer.experts)
            return
        if not self._encoded:
            return
        from moepack.calibrate.native import expert_extent

        stream = self._stream
        self._reporter.inner("experts", layer.experts)
        for some in stream.expert_ranges(layer.index) or [range(layer.experts)]:
            experts = stream.experts(layer.index, some)
            with self._encoding():
                for i, e in enumerate(some):
                    for version in self._encoded:
                        native = stream.native_experts(layer.index, range(e, e + 1)) if version.released else ()
                        self._sizes[version.name] += len(expert_extent(version, experts, i, native)[0])
                    self._reporter.advance()
            del experts  # before the next are read

    def _add_dense(self, part: int | None) -> None:
        """Count a part's bytes outside the experts, all versions of its dense matrices included, and their work."""
        stream = self._stream
        layer = self._matrices.get(part)
        packed: set[str] = set()
        before = sum(self._dense_sizes.values())
        if layer is not None:
            beside = self._at_once(part)
            for described in layer.matrices:
                packed |= {f"{described.module}.{name}" for name in ("weight", "bias")}
                for version in self._recipe.dense_specs():
                    sizes = version.stored_sizes((described.matrix,))
                    size = sizes[0] if sizes else self._dense_size(version, described)
                    self._dense_sizes[version.name] += size
                self._one_dense = self._one_dense or self._quantise_dense(described, beside)
                self._dense_work += float(described.matrix.weights * described.matrix.cols) / beside
            for version in self._recipe.dense_specs():
                self._dense_sizes[version.name] += header_size(version.name, layer)
        self._dense_part = max(self._dense_part, sum(self._dense_sizes.values()) - before)
        plain = (name for name in stream.dense_names(part) if name not in packed)
        self._dense += sum(int(stream.model.get_parameter_or_buffer(name).nbytes) for name in plain)

    def _dense_size(self, version: Version, described: DenseMatrix) -> int:
        if self._outline is not None:
            return self._sampled_size(version, (described.matrix,))
        from moepack.calibrate.native import dense_extent

        names = [f"{described.module}.{name}" for name in ("weight", "bias")[: 1 + described.matrix.bias]]
        tensors = self._stream.tensors(described.layer, names)
        bias = tensors.get(f"{described.module}.bias")
        with self._encoding():
            native = self._stream.native_dense(described.module) if version.released else None
            return len(dense_extent(version, described.matrix, tensors[names[0]], bias, native)[0])

    def _at_once(self, part: int | None) -> int:
        shards = len(row_shard_tasks(self._matrices[part].matrices, self._recipe, "", self._stream.device.type))
        most = workers(self._stream.device, max((size for _, size in self._needs.row_shards), default=1))
        return max(1, min(self._how.row_shards, shards, most))

    def _quantise_dense(self, matrix: DenseMatrix, beside: int) -> float:
        """Measure seconds per unit of work (weights times columns) at every lossy width, `beside` shards at once.

        The matrix is a small one of random weights.
        """
        import torch

        own = Matrix(matrix.matrix.name, min(matrix.matrix.rows, WIDE), min(matrix.matrix.cols, WIDE))
        weights = {f"{matrix.module}.weight": torch.randn(own.rows, own.cols).to(torch.bfloat16)}
        device = self._stream.device
        task = row_shard_tasks((replace(matrix, matrix=own),), self._recipe, "", device.type)[-1]
        task = replace(task, versions=lossy(task.versions))
        white = torch.eye(own.cols, device=device)
        seconds = 0.0
        for together in (1, beside):  # the first round loads libraries
            began = time.perf_counter()
            with ThreadPoolExecutor(together) as pool:
                list(pool.map(lambda _: make_row_shard(task, weights, white, white, device), range(together)))
            seconds = time.perf_counter() - began
        return seconds / (task.shard.weights * task.shard.cols)

    def _probe(self, layer: ExpertLayer) -> float:
        """Seconds per expert at every width, from small experts that get as many tokens a column.

        Work on single weights grows with a matrix's weights; products (moments, GPTQ's updates, factors) grow with
        weights times columns, and their time follows from their operations.
        """
        import torch

        from moepack.quantize.expert_batch import expert_batches

        settings = batch_settings(self._recipe)
        batches = expert_batches(layer, settings)
        transposed = bool(self._stream.experts_module(layer.index).is_transposed)
        few = small_experts(layer, min(PROBED, len(batches[0])), transposed)
        widest, narrow = (max(m.cols for m in x.matrices) for x in (layer, few.layer))
        tokens = self._windows * self._length * self._top_k // layer.experts  # of an expert in a build
        tokens = max(1, tokens * narrow // widest)
        took = self._quantise(few, tokens, len(batches))
        with fixed_threads():
            rate = operations(widest, torch.float32, self._stream.device)
        by_moments = [v for v in settings.versions if methods.method_for(settings.method, v).needs_moments]
        small = sum(_products(m, tokens, len(by_moments)) for m in few.layer.matrices) if by_moments else 0.0
        if settings.refine and by_moments:
            small += _refined(few.layer.matrices, tokens, len(by_moments))
        products = min(took, small / rate)
        single = (took - products) * layer.expert_weights / few.layer.expert_weights
        return single + products * _work(layer) / _work(few.layer)

    def _quantise(self, experts: ExpertWeights, tokens: int, batches: int) -> float:
        """Measure seconds per expert at every width, side by side as in a build of so many `batches` a layer."""
        settings = batch_settings(self._recipe)
        device = self._stream.device
        index = experts.layer.index
        few = range(experts.layer.experts)
        observation = seen(experts.layer, tokens, self._recipe.calibration.torch_dtype)

        def make(some: range) -> None:
            task = ExpertBatchTask("", settings.versions, device.type, index, some, settings)
            make_expert_batch(task, self._stream.experts_module(index), experts.select(some), observation, device)

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

    def _checkpoint_bytes(self) -> int:
        """The checkpoint's bytes; where nothing tells, its experts' in their native version and all else in BF16."""
        if self._outline is None:
            return self._stream.checkpoint.bytes
        native = self._outline.native
        if self._outline.bytes or native is None:
            return self._outline.bytes
        size = sum(self._stream.part_bytes(part) for part in (None, *range(self.layers)))
        for layer in self._experts:
            plain = sum(2 * (m.weights + m.rows * m.bias) for m in layer.matrices)
            size += layer.experts * (native.resident_size(layer.matrices) - plain)
        return size

    def result(self, rates: JsonObject, keep: bool, linked: bool) -> Estimate:
        """Scale the measurements to the whole build.

        `rates` are the disk's, from `disk_rates`. `keep`: activations are kept. `linked`: the bundle's layer
        files are hard links.
        """
        reads, writes = (float(rates.get(f"{way}_bytes_per_second", 0.0)) for way in ("read", "write"))
        size = self._checkpoint_bytes()
        count = sum(layer.experts for layer in self._experts)
        versions = sum(self._sizes.values()) + sum(self._dense_sizes.values())
        needs = self._needs
        how = self._how
        stream = self._stream
        kept = needs.hidden * (1 + (self.layers > EVERY)) if keep else 0
        filed = needs.experts * how.experts_on_disk
        spilt = needs.hidden * how.hidden_on_disk + needs.seen * how.seen_on_disk + filed
        written = 2 * versions + 2 * self._dense + kept // 2 * (self.layers // EVERY + 1)
        written += (self.layers + 1) * needs.hidden * how.hidden_on_disk
        written += len(self._experts) * (filed + needs.seen * how.seen_on_disk)
        hidden = stream.model.config.get_text_config().hidden_size
        rate = operations(hidden, self._recipe.calibration.torch_dtype, stream.device)
        batches = -(-self._windows // how.batch_size)
        seconds = {
            "start": self.seconds["start"],
            "read": size / reads if reads else 0.0,
            "calibrate": batches * self._operations / rate,
            "quantise": self._one_expert * count + self._one_dense * self._dense_work,
            "encode": self.seconds["encode"],
            "write": written / writes if writes else 0.0,
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
            size,
            outline="" if self._outline is None else self._outline.source,
        )


def _work(layer: ExpertLayer) -> int:
    """A quantiser's products for an expert grow with this: weights times columns."""
    return sum(m.weights * m.cols for m in layer.matrices)


def _products(matrix: Matrix, tokens: int, widths: int) -> float:
    """Operations of a matrix's products: second moments, their factor, and GPTQ's updates at every width."""
    return float(matrix.cols**2 * (tokens + matrix.cols + widths * matrix.rows))


def _refined(matrices: Sequence[Matrix], tokens: int, widths: int) -> float:
    """Operations of `refine` at every width: activations of quantised matrices, two sums of them, and a solution."""
    first, second = matrices[0], matrices[-1]
    return float(widths * (tokens * first.weights + second.cols**2 * (2 * tokens + 2 * second.cols + second.rows)))
