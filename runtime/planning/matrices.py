"""Where a served model's dense matrices lie. Loading allocates by this module, and plans count by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from moepack.pack.reader import Bundle
from moepack.pack.spec import LOSSLESS, MEMORY_PAGE, SECTION, Matrix, Version, align, is_dense
from moepack.runtime.experts import backends

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERT_PARAMETERS = (
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
)
Shapes = Mapping[str, tuple[Matrix, Version]]  # of linear maps, by their names


class Ranges(NamedTuple):
    """Dense matrices, by the range of memory in which they lie on a CPU."""

    plain: Shapes  # in the bundle's lossless version; converted, and not kept, where the model's dtype is another
    packed: Shapes  # in other versions of the bundle's
    moved: Shapes  # without versions, in BF16: from where transformers put them to where kernels read them


def ranges(model: nn.Module, bundle: Bundle, versions: Sequence[Version], moves: bool) -> Ranges:
    """Return the ranges of a model that is served with these versions; `moves`: whether kernels read BF16 matrices."""
    dense = bundle.manifest.dense
    own = {d.module: (d.matrix, v) for d, v in zip(dense, versions, strict=True)}
    lossless = Version.of(LOSSLESS)
    moved = {
        name: (Matrix("weight", m.out_features, m.in_features, m.bias is not None), lossless)
        for name, m in linears(model, [layer.module for layer in bundle.layers]).items()
        if moves and name not in own and m.weight.dtype == torch.bfloat16
    }
    plain, packed = ({name: of for name, of in own.items() if of[1].plain is is_plain} for is_plain in (True, False))
    return Ranges(plain, packed, moved)


def linears(model: nn.Module, experts: Sequence[str]) -> dict[str, nn.Linear]:
    """A model's dense matrices by module name, in the model's order, without those inside the modules `experts`."""
    found = linears_outside(model, experts)
    return {name: m for name, m in found.items() if is_dense(name, m.out_features, m.in_features)}


def linears_outside(model: nn.Module, experts: Sequence[str]) -> dict[str, nn.Linear]:
    """A model's linear maps, narrow ones and routers too, without those inside the modules `experts`."""
    inside = tuple(f"{name}." for name in experts)
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear and not n.startswith(inside)}


def range_bytes(shapes: Shapes) -> int:
    """Return the bytes of a range: whole pages, in which extents follow one another."""
    return align(sum(extent_sizes(shapes)), MEMORY_PAGE)


def extent_sizes(shapes: Shapes) -> list[int]:
    """Return the bytes of each matrix's extent."""
    return [align(version.resident_size((matrix,)), SECTION) for matrix, version in shapes.values()]


def dense_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; tied ones count once."""
    return sum(_storages(model, {}).values())


def served_bytes(model: PreTrainedModel, bundle: Bundle, versions: Sequence[Version], device: torch.device) -> int:
    """Return what `dense_bytes` is of a skeleton's model once it is served on `device`, which its experts leave."""
    on_cpu = device.type == "cpu"
    plain, packed, moved = ranges(model, bundle, versions, on_cpu and kernels_read())
    skipped = dict.fromkeys((*plain, *packed), ("weight", "bias"))
    left = _storages(model, skipped | {layer.module: EXPERT_PARAMETERS for layer in bundle.layers})
    for name in moved:
        for parameter in model.get_submodule(name).parameters():
            left.pop(parameter.untyped_storage()._cdata, None)
    size = sum(left.values()) + range_bytes(moved)
    size += range_bytes(packed) if on_cpu else sum(extent_sizes(packed))
    if on_cpu and model.dtype == torch.bfloat16:
        return size + range_bytes(plain)
    return size + model.dtype.itemsize * sum(m.weights + m.rows * m.bias for m, _ in plain.values())


def kernels_read() -> bool:
    """Whether a CPU's kernels read BF16 matrices outside the experts."""
    return backends.serves_dense() and backends.backend(torch.device("cpu")) == "native"


def _storages(model: nn.Module, skipped: Mapping[str, Sequence[str]]) -> dict[int, int]:
    """Return the bytes of a model's storages, by address, without the tensors `skipped`, by the names of modules."""
    names = {id(model.get_submodule(name)): some for name, some in skipped.items()}
    tensors = [
        tensor
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in names.get(id(module), ())
    ]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
