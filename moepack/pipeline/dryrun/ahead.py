"""A dry run before any weight is here: bytes and memory by shapes, time by small probes of this machine.

A version's bytes follow from its shapes, but for entropy-coded ones: these are scaled from a matrix of Gaussian values,
whose exponents are about as uneven as those of trained weights. Time is arithmetic over measured rates: a product in
the recipe's dtype and one in float32, the quantiser on a few small experts, and the disk. No weight is read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.sections import PAGE, align
from moepack.pack.spec import DenseMatrix, ExpertLayer, Matrix, Version
from moepack.quantize import methods

from ..needs import top_k
from ..tasks.experts import batch_settings
from ..tasks.result import fixed_threads
from .report import Estimate
from .walk import DryRun

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.calibrate.outline import Outline

PROBED = 4  # small experts quantised together
WIDE = 512  # the most columns of their matrices
ROWS = 256  # rows of a matrix that is encoded as a sample
TOKENS = 1024  # of a probed product


class OutlineRun(DryRun):
    """A walk through the shapes of a checkpoint."""

    def __init__(self, outline: Outline, native: Version, *arguments: Any) -> None:
        """`native`: the version of experts as released. Other arguments are those of `DryRun`; ids have any values."""
        super().__init__(*arguments)
        self._outline = outline
        self._native = native
        self._operations = 0.0  # floating-point operations of a batch, through all layers so far
        self._samples: dict[str, tuple[float, float]] = {}  # version -> bits a weight when encoded, seconds a weight
        self._top_k = top_k(self._stream.model.config.get_text_config())

    def outside(self) -> None:
        """Count the bytes of the part outside the layers."""
        self._add_dense(None, self._shapes(None))
        if self._recipe.mtp == "keep":
            self._dense += self._stream.mtp_bytes

    def layer(self, index: int) -> None:
        """Count a layer's bytes and operations. In the first layer with experts, quantise a few small ones."""
        dense, experts = self._stream.split(index, self._shapes(index))
        self._add_dense(index, dense)
        tokens = min(self._how.batch_size, len(self._ids)) * self._ids.shape[1]
        active = self._stream.dense_size(index)[1]
        if experts is not None:
            layer = experts.layer
            active += self._top_k * layer.expert_weights
            if not self._one_expert and batch_settings(self._recipe).versions:
                self._one_expert = self._probe(index, experts)
            for version in self._encoded:
                self._sizes[version.name] += self._encoded_size(version, layer.matrices, layer.experts)
        attended = self._stream.dense_size(index)[0] * self._ids.shape[1]  # scores and values, as `needs` counts rows
        self._operations += 2.0 * tokens * (active + attended)

    def result(self, rates: JsonObject, keep: bool, linked: bool) -> Estimate:
        """As in `DryRun`; dense tensors count in the dtypes of the outline."""
        hidden = self._stream.model.config.get_text_config().hidden_size
        device = self._stream.device
        self._forward = self._again = self._operations / operations(hidden, self._dtype, device) / self.layers
        size = self._outline.bytes or self._released()
        rate = float(rates.get("read_bytes_per_second", 0.0))
        self.seconds["read"] = size / rate if rate else 0.0
        made = super().result(rates, keep, linked)
        return replace(made, checkpoint_bytes=size, outline=self._outline.source)

    def _released(self) -> int:
        """About the checkpoint's bytes: its experts in their native version, all else in BF16."""
        native = self._native
        parts = (None, *range(self.layers))
        size = sum(self._stream.part_bytes(part) for part in parts)
        for layer in self._experts:
            plain = sum(2 * (m.weights + m.rows * m.bias) for m in layer.matrices)
            size += layer.experts * (native.resident_size(layer.matrices) - plain)
        return size

    def _shapes(self, part: int | None) -> dict[str, torch.Tensor]:
        """A part's tensors on the meta device."""
        return {name: self._stream.model.get_parameter_or_buffer(name) for name in self._stream.names(part)}

    def _encoded_size(self, version: Version, matrices: tuple[Matrix, ...], extents: int = 1) -> int:
        """Approximate bytes of extents in an entropy-coded version. Adds the time of encoding them."""
        weights = sum(m.weights for m in matrices)
        if version.name not in self._samples:
            self._samples[version.name] = sample(version, min(m.cols for m in matrices))
        bits, seconds = self._samples[version.name]
        self.seconds["encode"] += seconds * weights * extents
        biases = sum(2 * m.rows for m in matrices if m.bias)
        return extents * align(int(weights * bits / 8) + biases, PAGE)

    def _dense_size(self, version: Version, described: DenseMatrix, tensors: Mapping[str, torch.Tensor]) -> int:
        return self._encoded_size(version, (described.matrix,))

    def _quantise_dense(self, matrix: DenseMatrix, tensors: Mapping[str, torch.Tensor], beside: int) -> float:
        """As in `DryRun`, of a small matrix of random weights."""
        import torch

        own = Matrix(matrix.matrix.name, min(matrix.matrix.rows, WIDE), min(matrix.matrix.cols, WIDE))
        small = replace(matrix, matrix=own)
        weights = {f"{matrix.module}.weight": torch.randn(own.rows, own.cols).to(torch.bfloat16)}
        return super()._quantise_dense(small, weights, beside)

    def _probe(self, index: int, experts: ExpertWeights) -> float:
        """Seconds per expert at every width, from small experts that get as many tokens a column.

        Work on single weights grows with a matrix's weights; products (moments, GPTQ's updates, factors) grow with
        weights times columns, and their time follows from their operations.
        """
        import torch

        from moepack.quantize.expert_batch import expert_batches

        layer = experts.layer
        settings = batch_settings(self._recipe)
        batches = expert_batches(layer, settings)
        blocks = [v.rotation.block for v in settings.versions if v.rotation]
        few = small_experts(layer, min(PROBED, len(batches[0])), experts.transposed, max([64, *blocks]))
        widest, narrow = (max(m.cols for m in x.matrices) for x in (layer, few.layer))
        tokens = self._ids.numel() * self._top_k // layer.experts  # of an expert in a build
        tokens = max(1, tokens * narrow // widest)
        took = self._quantise_some(index, few, seen(few.layer, tokens, self._dtype), len(batches))
        with fixed_threads():
            rate = operations(widest, torch.float32, self._stream.device)
        by_moments = [v for v in settings.versions if methods.method_for(settings.method, v).needs_moments]
        small = sum(_products(m, tokens, len(by_moments)) for m in few.layer.matrices) if by_moments else 0.0
        products = min(took, small / rate)
        single = (took - products) * layer.expert_weights / few.layer.expert_weights
        return single + products * _work(layer) / _work(few.layer)


def operations(hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measure the floating-point operations a second of a product with `hidden` columns."""
    import torch

    from moepack.calibrate.products import widened

    x, weight = (torch.randn(n, hidden).to(device, dtype) for n in (TOKENS, min(4096, 2 * hidden)))
    with widened(device, dtype), torch.no_grad():
        for _ in range(3):  # the first loads libraries
            began = time.perf_counter()
            float(torch.nn.functional.linear(x, weight)[-1, -1])  # waits for the device
            took = time.perf_counter() - began
    return 2.0 * TOKENS * weight.numel() / took


def _work(layer: ExpertLayer) -> int:
    """A quantiser's products for an expert grow with this: weights times columns."""
    return sum(m.weights * m.cols for m in layer.matrices)


def _products(matrix: Matrix, tokens: int, widths: int) -> float:
    """Operations of a matrix's products: second moments, their factor, and GPTQ's updates at every width."""
    return float(matrix.cols**2 * (tokens + matrix.cols + widths * matrix.rows))


def small_experts(layer: ExpertLayer, few: int, transposed: bool, step: int = 64) -> ExpertWeights:
    """Random experts like a layer's, with fewer rows and columns, a multiple of `step`."""
    import torch

    from moepack.calibrate.experts import ExpertWeights

    first = layer.matrices[0]
    second = layer.matrices[-1]
    share = min(1.0, WIDE / max(first.cols, second.cols))
    hidden, inner = (max(step, int(share * cols) // step * step) for cols in (first.cols, second.cols))
    rows = inner * first.rows // second.cols, hidden
    matrices = tuple(replace(m, rows=r, cols=c) for m, r, c in zip(layer.matrices, rows, (hidden, inner), strict=True))
    shapes = [(few, m.cols, m.rows) if transposed else (few, m.rows, m.cols) for m in matrices]
    weights = tuple((torch.randn(s) * m.cols**-0.5).bfloat16() for s, m in zip(shapes, matrices, strict=True))
    biases = tuple(torch.zeros(few, m.rows).bfloat16() if m.bias else None for m in matrices)
    return ExpertWeights(replace(layer, experts=few, matrices=matrices), weights, biases, transposed)


def seen(layer: ExpertLayer, tokens: int, dtype: torch.dtype) -> Observation:
    """An observation in which each expert of a layer gets as many random tokens, with an equal number of others."""
    import torch

    from moepack.calibrate.forward import Observation

    inputs = torch.randn(2 * tokens, layer.matrices[0].cols).to(dtype)
    experts = torch.arange(layer.experts, dtype=torch.int32).repeat(2 * tokens, 1)
    experts[1::2] = layer.experts  # this number stands for no expert
    return Observation(inputs, experts, torch.full(experts.shape, 1.0 / layer.experts), tokens)


def sample(version: Version, cols: int) -> tuple[float, float]:
    """Bits and seconds a weight of an entropy-coded version, from a matrix of Gaussian values."""
    import torch

    from moepack.pack.codec.lossless import LosslessMatrix

    matrix = Matrix("sample", ROWS, align(max(cols, WIDE), version.group_size or 1))
    generator = torch.Generator().manual_seed(0)  # the same bytes in every run
    values = torch.randn(matrix.rows, matrix.cols, generator=generator)
    if version.released:  # E4M3 codes: the greatest of those that share a scale is near 448
        from moepack.pack.codec.released import ReleasedMatrix

        width = version.group_size or matrix.cols
        stored = version.sections((matrix,))[1]
        rows = width if len(stored.shape) == 2 else 1  # scales without rows are for square blocks
        groups = values.view(-1, rows, matrix.cols // width, width)
        most = groups.abs().amax((1, 3), keepdim=True) / 448
        wide = most if stored.item == 4 else torch.exp2(torch.log2(most).ceil())
        codes = (groups / wide).to(torch.float8_e4m3fn).view(torch.uint8).view_as(values)
        dtype = torch.float32 if stored.item == 4 else torch.uint8
        scale = torch.ones(matrix.rows, matrix.cols // width, dtype=dtype)
        value: Any = ReleasedMatrix(codes.numpy(), scale.numpy())
    else:
        value = LosslessMatrix(values.bfloat16().view(torch.uint16).numpy())
    version.encode((matrix,), [value])  # loads the codec
    began = time.perf_counter()
    _, payload = version.encode((matrix,), [value])
    return 8 * payload / matrix.weights, (time.perf_counter() - began) / matrix.weights
