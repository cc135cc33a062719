"""Experts of one matrix in given versions, random, with their weights as float64: what kernels are held against."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch

from benchmarks.random_matrices import coded
from moepack.pack.codec.bits import bf16_to_float32
from moepack.pack.encodings.base import KNOWN
from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.forms import handle, make_forms

try:
    from moepack.runtime.kernels import affine_native as native
except OSError:
    pytest.skip("the kernels were not compiled: there was no C compiler", allow_module_level=True)
from moepack.runtime.kernels import dense_native as beside

# float32 sums of a few thousand terms; a BF16 result has 8 significant bits (2**-9 relative, and what went in exactly)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


@dataclass
class Layer:
    """Experts of one matrix in given versions: what kernels read, and the weights and biases as float64."""

    forms: native.LayerForms
    table: np.ndarray
    extents: list[torch.Tensor]
    weights: list[np.ndarray]
    biases: list[np.ndarray | None]


def make_layer(m: Matrix, versions: list[Version], of_expert: list[int], seed: int = 0) -> Layer:
    return _make_layer(m, tuple(versions), tuple(of_expert), seed)


@lru_cache(16)  # a test's shapes are made once for all instruction sets, which it takes in turn
def _make_layer(m: Matrix, versions: tuple[Version, ...], of_expert: tuple[int, ...], seed: int) -> Layer:
    extents, weights, biases, table = [], [], [], []
    for e, number in enumerate(of_expert):
        version = versions[number]
        room = torch.zeros(version.resident_size((m,)), dtype=torch.uint8)
        if version.plain:
            (form,) = make_forms((m,), version)
            w = bf16(np.random.default_rng(seed + e).normal(0, 0.02, (m.rows, m.cols)))
            room[form.low : form.low + 2 * m.weights] = torch.from_numpy(w.view(np.uint8).reshape(-1).copy())
            value, bias = bf16_to_float32(w), None
            if m.bias:
                b = bf16(np.random.default_rng(seed + e).normal(0, 0.1, m.rows))
                room[form.bias : form.bias + 2 * m.rows] = torch.from_numpy(b.view(np.uint8).copy())
                bias = b
        else:
            made = coded(m, version, seed + e)
            version.restore((m,), version.encode((m,), [made])[0], room.numpy())
            value, bias = made.dequantise(version), made.bias
        extents.append(room)
        weights.append(value.astype(np.float64))
        biases.append(None if bias is None else bf16_to_float32(bias).astype(np.float64))
        table.append(handle(room.data_ptr(), number))
    return Layer(native.LayerForms((m,), versions), np.array(table, np.uint64), extents, weights, biases)


def expected(layer: Layer, x: torch.Tensor, index: torch.Tensor) -> np.ndarray:
    """float64 [slots, rows]; rows of slots whose expert does not exist are zero."""
    flat = index.reshape(-1).tolist()
    share = len(flat) // len(x)
    out = np.zeros((len(flat), len(layer.weights[0])))
    values = x.double().numpy()
    for s, e in enumerate(flat):
        if e < len(layer.weights):
            out[s] = layer.weights[e] @ values[s // share]
            if layer.biases[e] is not None:
                out[s] += layer.biases[e]
    return out


def product(
    layer: Layer,
    x: torch.Tensor,
    index: torch.Tensor,
    limits: np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
    fill: float = torch.nan,
    **more,
) -> torch.Tensor:
    """[slots, rows] by the compiled kernel; `fill` stands where it writes nothing."""
    out = torch.full((index.numel(), len(layer.weights[0])), fill, dtype=dtype)
    native.product(layer.forms, 0, layer.table, x, index, out, limits, **more)
    return out


def kernel_matrix(
    rows: int, cols: int, name: str, seed: int, bias: bool = False
) -> tuple[beside.KernelMatrix, np.ndarray]:
    """One for `dense`, with weights and bias as float64. A BF16 matrix's bias is a tensor, an extent's lies in it."""
    m, version = Matrix("m", rows, cols, bias=bias), Version.of(name, 64)
    layer = make_layer(m, [version], [0], seed)
    form, data, extra = make_forms((m,), version)[0], layer.extents[0], None
    if name == "bf16":
        if bias:
            extra = data[form.bias : form.bias + 2 * rows].view(torch.bfloat16)
        form, data = beside.PLAIN_FORM, data[: 2 * rows * cols].view(torch.bfloat16).view(rows, cols)
    weight = np.concatenate([layer.weights[0], layer.biases[0][:, None] if bias else np.zeros((rows, 1))], axis=1)
    return beside.KernelMatrix(form, rows, cols, data, extra), weight


def relative(got: torch.Tensor, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.double().numpy() - want) / np.linalg.norm(want))


def activations(n: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """With a mean, which is what makes zero points matter."""
    return (torch.randn(n, cols, generator=torch.Generator().manual_seed(seed)) + 0.3).to(dtype)


# Every encoding of a released checkpoint that is read in a way of its own, in every group size
RELEASED = [Version.of(e.name, size) for e in KNOWN if e.released and e.kernel > 16 for size in e.group_sizes or (0,)]
SMALL = [Version.of(name, g, scale_bits=8) for name, g in (("w8", 64), ("w4", 64), ("w3", 128), ("w2", 32), ("w1", 64))]
MIXED = [Version.of(f"w{b}d{b + 1}").at(1) for b in (4, 3, 2, 1)]
TRELLIS = [Version.of(name, 128, scale_bits=bits).at(1) for name in ("t3", "t2d3", "t2") for bits in (16, 8)]
VERSIONS = [Version.of("bf16"), *(Version.of(f"w{b}", g) for b, g in ((4, 128), (3, 64), (2, 32), (1, 64)))]
