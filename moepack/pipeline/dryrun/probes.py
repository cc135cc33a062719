"""Small probes of this machine for a dry run: a product's rate, experts like a layer's, entropy-coded samples."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.sections import align
from moepack.pack.spec import ExpertLayer, Matrix, Version

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation

PROBED = 4  # small experts quantised together
WIDE = 512  # the most columns of their matrices
STEP = 64  # of which these are a multiple
ROWS = 256  # rows of a matrix that is encoded as a sample
TOKENS = 1024  # of a probed product


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


def small_experts(layer: ExpertLayer, few: int, transposed: bool) -> ExpertWeights:
    """Random experts like a layer's, with fewer rows and columns, a multiple of STEP."""
    import torch

    from moepack.calibrate.experts import ExpertWeights

    first = layer.matrices[0]
    second = layer.matrices[-1]
    share = min(1.0, WIDE / max(first.cols, second.cols))
    hidden, inner = (max(STEP, int(share * cols) // STEP * STEP) for cols in (first.cols, second.cols))
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
    matrix = Matrix("sample", ROWS, align(max(cols, WIDE), version.group_size or 1))
    value = _gaussian(version, matrix)
    version.encode((matrix,), [value])  # loads the codec
    began = time.perf_counter()
    _, payload = version.encode((matrix,), [value])
    return 8 * payload / matrix.weights, (time.perf_counter() - began) / matrix.weights


def _gaussian(version: Version, matrix: Matrix) -> LosslessMatrix | ReleasedMatrix:
    import torch

    generator = torch.Generator().manual_seed(0)  # the same bytes in every run
    values = torch.randn(matrix.rows, matrix.cols, generator=generator)
    if not version.released:
        return LosslessMatrix(values.bfloat16().view(torch.uint16).numpy())
    # E4M3 codes: the greatest of those that share a scale is near 448.
    width = version.group_size or matrix.cols
    stored = version.sections((matrix,))[1]
    rows = width if len(stored.shape) == 2 else 1  # scales without rows are for square blocks
    groups = values.view(-1, rows, matrix.cols // width, width)
    most = groups.abs().amax((1, 3), keepdim=True) / 448
    wide = most if stored.item == 4 else torch.exp2(torch.log2(most).ceil())
    codes = (groups / wide).to(torch.float8_e4m3fn).view(torch.uint8).view_as(values)
    dtype = torch.float32 if stored.item == 4 else torch.uint8
    scale = torch.ones(matrix.rows, matrix.cols // width, dtype=dtype)
    return ReleasedMatrix(codes.numpy(), scale.numpy())
