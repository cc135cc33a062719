"""Products of a served model's dense matrices on a CPU, by the kernels that run its experts.

torch reads BF16 weights at half of what memory gives for one token (`python -m benchmarks.decoding`). Here a matrix lies
in huge pages, in the layout of an expert with that matrix alone (kernels/forms.py), whichever version it is in, and maps
that are given the same input are multiplied by in one call. Where a pass has many tokens, BF16 matrices are torch's.
Decides nothing about which version a matrix is in.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moepack.pack.spec import LOSSLESS, SECTION, Matrix, Version, align
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.kernels.affine_native import LayerForms, product
from moepack.runtime.kernels.forms import handle, make_forms, resident_size

from .find import groups, linears

FEW = 16  # tokens up to which a BF16 matrix is multiplied by here; torch's tiles are faster beyond
MISSES = 2  # calls one after another whose results nobody took, until a group's maps are multiplied by one by one


@dataclass(frozen=True, slots=True)
class Dense:
    """One dense matrix where it is served from.

    Attributes:
        matrix: its shape.
        version: its encoding.
        extent: uint8, beginning on a multiple of 64: as an expert's with this matrix alone.
    """

    matrix: Matrix
    version: Version
    extent: Tensor


class Products:
    """The products of matrices that are given the same input."""

    def __init__(self, parts: Sequence[Dense]) -> None:
        self._parts = tuple(parts)
        self._forms = [LayerForms((p.matrix,), (p.version,)) for p in parts]
        self._handles = [np.array([handle(p.extent.data_ptr(), 0)], np.uint64) for p in parts]

    def __call__(self, x: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Of x [tokens, cols], contiguous, float32 or bfloat16: [tokens, rows] of each matrix asked for."""
        index, out = torch.zeros(len(x), 1, dtype=torch.int64), []
        for i in which:
            out.append(x.new_empty(len(x), self._parts[i].matrix.rows))
            product(self._forms[i], 0, self._handles[i], x, index, out[-1])
        return out


class Group:
    """Maps that are given the same input: the first that is called has the others' results made as well.

    That it is the same is seen, not assumed: the very tensor, unchanged. Threads do not share what is kept.
    """

    def __init__(self, parts: Sequence[Dense]) -> None:
        self._products, self._size = Products(parts), len(parts)
        self._kept = threading.local()
        self._misses = 0

    def run(self, which: int, x: Tensor) -> Tensor:
        """What one of the maps makes of x [..., cols], float32 or bfloat16."""
        kept = self._kept
        if self._size > 1:
            made = kept.__dict__.pop("made", None)
            if made is not None:
                of, changes, results = made
                if of is x and changes == _changes(x) and which in results:
                    out: Tensor = results.pop(which)
                    if results:
                        kept.made = made
                    else:
                        self._misses = 0
                    return out
                self._misses += 1
                if self._misses >= MISSES:
                    self._size = 1
        asked = range(self._size) if self._size > 1 else (which,)
        flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
        found = dict(zip(asked, self._products(flat, asked), strict=True))
        found = {i: y.view(*x.shape[:-1], y.shape[-1]) for i, y in found.items()}
        out = found.pop(which)
        if found:
            kept.made = x, _changes(x), found
        return out


def _changes(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


class Served:
    """In place of a linear map's `forward`: the kernels' product where they make it sooner, else torch's."""

    def __init__(self, module: nn.Linear, group: Group, which: int) -> None:
        self._module, self._group, self._which = module, group, which
        self._at = module.weight.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """y = W x + b of x [..., cols]."""
        module = self._module
        if (
            torch.compiler.is_compiling()
            or x.dtype != torch.bfloat16
            or not 0 < x.numel() <= FEW * x.shape[-1]
            or (x.requires_grad and torch.is_grad_enabled())
            or x.device.type != "cpu"
            or module.weight.data_ptr() != self._at  # somebody put other weights there
        ):
            return nn.functional.linear(x, module.weight, module.bias)
        return self._group.run(self._which, x)


def serve(model: nn.Module, experts: Sequence[str]) -> None:
    """Move a model's BF16 matrices into huge pages, and let the kernels multiply by them.

    Args:
        model: on a CPU, its weights loaded.
        experts: the names of its experts' modules.
    """
    version = Version.of(LOSSLESS)
    found = {n: m for n, m in linears(model, experts).items() if m.weight.dtype == torch.bfloat16}
    shapes = {n: Matrix(n, m.out_features, m.in_features, m.bias is not None) for n, m in found.items()}
    sizes = {n: align(resident_size((shape,), version), SECTION) for n, shape in shapes.items()}
    memory = CpuMemory(sum(sizes.values()))
    memory.take(0, sum(sizes.values()))
    extents = dict(zip(sizes, memory.tensor[: sum(sizes.values())].split(list(sizes.values())), strict=True))
    for name, module in found.items():
        (form,) = make_forms((shapes[name],), version)
        for tensor, at in ((module.weight, form.low), (module.bias, form.bias)):
            if tensor is not None:
                place = extents[name][at : at + 2 * tensor.numel()].view(torch.bfloat16).view(tensor.shape)
                tensor.data = place.copy_(tensor)
    for names in groups(list(found)):
        group = Group([Dense(shapes[n], version, extents[n]) for n in names])
        for which, name in enumerate(names):
            found[name].forward = Served(found[name], group, which)  # type: ignore[method-assign]
