"""Products of a served model's dense matrices on a CPU, by the kernels that run its experts.

torch reads BF16 weights at half of what memory gives for one token. Here a matrix lies in huge pages, in the layout of
an expert with that matrix alone (kernels/forms.py), whichever version it is in, and maps that are given the same input
are multiplied by in one call. Where a pass has many tokens, BF16 matrices are torch's (kernels/by_torch.py).
Decides nothing about which version a matrix is in.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moepack.pack.errors import InputError
from moepack.pack.isa import emulated
from moepack.pack.reader import Bundle
from moepack.pack.spec import LOSSLESS, SECTION, ExpertLayer, Matrix, Version, align
from moepack.runtime.devices.cpu import CpuDevice, CpuMemory
from moepack.runtime.experts import backends
from moepack.runtime.kernels import by_torch
from moepack.runtime.kernels.forms import compiled as has_kernels
from moepack.runtime.kernels.forms import make_forms, resident_size
from moepack.runtime.kernels.reference import plain_weights, sections_of
from moepack.runtime.store.files import DENSE, BackingStore

from .find import groups, linears
from .packed import PackedLinear

FEW = 16  # tokens whose products are made together for all maps that are given them
MISSES = 2  # calls one after another whose results nobody took, until a group's maps are multiplied by one by one


def most_tokens() -> int:
    """Tokens up to which a BF16 matrix is multiplied by here, and beyond by torch.

    Measured on one core of an EPYC with AVX-512 BF16, our time over torch's for [4096, 2048] and [2048, 4096], torch
    kept to the same instruction sets. Where tiles multiply BF16: 0.7 to 1.3 up to 16 tokens and 0.85 to 1.0 up to 64,
    too little to keep their results beside torch's for. Without tiles the bytes are read directly: 0.4 to 0.6 up to 64
    tokens with AVX-512 or AVX2, but by plain C 1.4 to 5 times torch's. So there it is the limit that is measured for
    this machine.
    """
    from moepack.runtime.kernels.affine_native import has_tiles

    if has_tiles(torch.bfloat16):
        return FEW
    return backends.dense_limits(torch.bfloat16, [LOSSLESS])[torch.bfloat16][0]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One dense matrix where it is served from.

    Attributes:
        matrix: its shape.
        version: its encoding.
        extent: uint8, beginning on a multiple of 64: as an expert's with this matrix alone.
    """

    matrix: Matrix
    version: Version
    extent: Tensor


class GroupProducts:
    """The products of matrices that are given the same input."""

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self._parts = tuple(parts)
        self._made: dict[tuple[int, ...], Any] = {}

    def __call__(self, x: Tensor, which: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Of x [..., cols], float32 or bfloat16: [..., rows] of each matrix asked for."""
        from moepack.runtime.kernels.dense_native import dense

        of = self._made.get(which)
        if of is None:
            of = self._made[which] = self._together(which)
        return dense(of, x)

    def _together(self, which: tuple[int, ...]) -> Any:
        from moepack.runtime.kernels import dense_native as native
        from moepack.runtime.kernels.affine_native import DTYPES

        matrices = []
        for part in (self._parts[i] for i in which):
            m, (form,) = part.matrix, make_forms((part.matrix,), part.version)
            if part.version.plain:
                weight, bias = _views(part.extent, m, part.version)
                matrices.append(native.KernelMatrix(native.plain_form(), m.rows, m.cols, weight, bias))
            else:
                matrices.append(native.KernelMatrix(form, m.rows, m.cols, part.extent))
        names = [self._parts[i].version.name for i in which]
        return native.MatrixGroup(matrices, {t: v for d in DTYPES for t, v in backends.dense_limits(d, names).items()})


class Group:
    """Maps that are given the same input: the first that is called has the others' results made as well.

    That it is the same is seen, not assumed: the very tensor, unchanged. Threads do not share what is kept.
    """

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self._products, self._size = GroupProducts(parts), len(parts)
        self._kept = threading.local()
        self._misses = 0

    def __deepcopy__(self, memo: object) -> Group:
        return self

    def run(self, which: int, x: Tensor) -> Tensor:
        """What one of the maps makes of x [..., cols], float32 or bfloat16."""
        kept, few = self._kept, x.numel() <= FEW * x.shape[-1]  # many tokens' results would be held at once for nothing
        if self._size > 1 and few:
            made = kept.__dict__.pop("made", None)
            if made is not None:
                of, state, results = made
                if of is x and which in results and _unchanged(x, state):
                    out: Tensor = results.pop(which)
                    if results:
                        kept.made = made
                    else:
                        self._misses = 0
                    return out
                self._misses += 1
                if self._misses >= MISSES:
                    self._size = 1
        asked = tuple(range(self._size)) if self._size > 1 and few else (which,)
        found = dict(zip(asked, self._products(x.detach(), asked), strict=True))
        out = found.pop(which)
        if found:
            kept.made = x, x.clone() if x.is_inference() else x._version, found
        return out


def _unchanged(x: Tensor, state: Tensor | int) -> bool:
    """Whether a tensor is what it was; those of inference mode do not count their changes, and are compared."""
    return torch.equal(x, state) if isinstance(state, Tensor) else not x.is_inference() and x._version == state


class Place:
    """Where the kernels find a linear map's weights; a copy of its module has none, and is torch's."""

    def __init__(self, module: nn.Linear, group: Group, which: int, most: int) -> None:
        self.group, self.which, self.most = group, which, most
        self.weight, self.bias = module.weight.data_ptr(), None if module.bias is None else module.bias.data_ptr()

    def holds(self, module: nn.Linear) -> bool:
        """Whether these are the module's weights still, and nobody put others there."""
        bias = None if module.bias is None else module.bias.data_ptr()
        return module.weight.data_ptr() == self.weight and bias == self.bias

    def __deepcopy__(self, memo: object) -> None:
        return None


class ServedLinear(nn.Linear):
    """torch's linear map, multiplied by the kernels where they are sooner: BF16, few tokens, no gradients."""

    _moepack_place: Place | None

    def __reduce_ex__(self, protocol: object) -> Any:
        return copyreg.__newobj__, (nn.Linear,), self.__dict__  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """y = W x + b of x [..., cols]."""
        place = self._moepack_place
        if (
            place is None
            or torch.compiler.is_compiling()
            or input.dtype != torch.bfloat16
            or not input.numel()
            or input.device.type != "cpu"
            or learns(input, self.weight, self.bias)
            or not place.holds(self)
        ):
            return nn.functional.linear(input, self.weight, self.bias)
        if input.numel() <= place.most * input.shape[-1]:
            return place.group.run(place.which, input)
        many = by_torch.linear if emulated(input.device, input.dtype) else nn.functional.linear
        return many(input, self.weight, self.bias)


ServedLinear.__name__ = ServedLinear.__qualname__ = nn.Linear.__name__  # as it is printed


def names_of(kind: type[nn.Module]) -> dict[str, Any]:
    """What a class has that stands in for `kind`: its names, and copies that are `kind`'s own."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}

    def reduce(self: Any, protocol: object) -> Any:
        return copyreg.__newobj__, (kind,), self.__dict__  # type: ignore[attr-defined]

    return {**names, "__reduce_ex__": reduce}


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked of what is made of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def prepare(model: nn.Module, bundle: Bundle, versions: Sequence[Version]) -> None:
    """Before a model's weights are loaded: take off it those of the bundle's dense matrices, which come from elsewhere.

    Raises:
        InputError: for a matrix that the model does not have.
    """
    for described, version in zip(bundle.manifest.dense, versions, strict=True):
        parent, _, last = described.module.rpartition(".")
        try:
            module = model.get_submodule(described.module)
        except AttributeError:
            module = None
        shape = described.matrix
        if type(module) is not nn.Linear or (module.out_features, module.in_features) != (shape.rows, shape.cols):
            raise InputError(f"{bundle.path}: {type(model).__name__} has no linear map {described.module} of its shape")
        if version.plain:
            module._parameters.update(weight=None, bias=None)
            module._is_hf_initialized = True  # type: ignore[assignment]
        else:
            model.get_submodule(parent).register_module(last, PackedLinear(shape, version))


def serve(model: nn.Module, bundle: Bundle, versions: Sequence[Version], compiled: bool, plain: bool = True) -> None:
    """After a model's weights were loaded: load its dense matrices, and let the kernels multiply by them.

    Args:
        model: its other weights loaded.
        bundle: the bundle.
        versions: of each of its dense matrices, or none for a bundle that has no versions of them: then the model's own
            are moved.
        compiled: whether the model is on a CPU, and there are compiled kernels.
        plain: whether they do BF16 matrices too.

    Raises:
        BundleError: when an extent is damaged.
    """
    experts = [layer.module for layer in bundle.layers]
    if versions:
        served = _load(model, bundle, versions)
    elif compiled and plain:
        served = _move(linears(model, experts))
    else:
        return
    if not compiled:
        return
    most = most_tokens() if plain else 0
    for names in groups([n for n, d in served.items() if has_kernels([d.version])]):
        group = Group([served[n] for n in names])
        for which, name in enumerate(names):
            module = model.get_submodule(name)
            if isinstance(module, PackedLinear):
                module.group, module.which = group, which
            elif plain and isinstance(module, nn.Linear):
                module._moepack_place = Place(module, group, which, most)  # type: ignore[assignment]
                module.__class__ = ServedLinear


def _room(shapes: Mapping[str, tuple[Matrix, Version]]) -> dict[str, Tensor]:
    """Memory for extents, in one piece of huge pages."""
    sizes = {name: align(resident_size((m,), v), SECTION) for name, (m, v) in shapes.items()}
    memory = CpuMemory(sum(sizes.values()))
    memory.take(0, sum(sizes.values()))
    parts = memory.tensor[: sum(sizes.values())].split(list(sizes.values()))
    return dict(zip(sizes, parts, strict=True))


def _move(found: Mapping[str, nn.Linear]) -> dict[str, PackedMatrix]:
    """BF16 matrices of a model to where the kernels read them best."""
    version = Version.of(LOSSLESS)
    shapes = {
        n: (Matrix("weight", m.out_features, m.in_features, m.bias is not None), version)
        for n, m in found.items()
        if m.weight.dtype == torch.bfloat16
    }
    out = {}
    for name, extent in _room(shapes).items():
        module = found[name]
        weight, bias = _views(extent, shapes[name][0], version)
        module.weight.data = weight.copy_(module.weight)
        if bias is not None:
            module.bias.data = bias.copy_(module.bias)
        out[name] = PackedMatrix(shapes[name][0], version, extent)
    return out


def _views(extent: Tensor, matrix: Matrix, version: Version) -> tuple[Tensor, Tensor | None]:
    """The BF16 weight and bias of a decoded matrix."""
    (form,) = make_forms((matrix,), version)
    (weight,) = plain_weights(extent, sections_of((matrix,), version))
    bias = None if form.bias < 0 else extent[form.bias : form.bias + 2 * matrix.rows].view(torch.bfloat16)
    return weight, bias


def _load(model: nn.Module, bundle: Bundle, versions: Sequence[Version]) -> dict[str, PackedMatrix]:
    """Every dense matrix of a bundle into memory, and into its module."""
    described = bundle.manifest.dense
    shapes = {d.module: (d.matrix, v) for d, v in zip(described, versions, strict=True)}
    store, out = BackingStore(bundle), {}
    sizes = [store.dense(v.name, i).size for i, v in enumerate(versions) if v.entropy_coded]
    host = CpuDevice(max(sizes, default=0), threads=None)
    dtype = model.dtype if isinstance(model.dtype, torch.dtype) else torch.bfloat16
    try:
        with store.reading_ahead((v.name, DENSE, i) for i, v in enumerate(versions)):
            rooms = _room({n: s for n, s in shapes.items() if s[1].plain})
            rooms |= _room({n: s for n, s in shapes.items() if not s[1].plain})
            for i, name in enumerate(shapes):
                extent = rooms.pop(name)
                matrix, version = shapes[name]
                layer = ExpertLayer(described[i].layer or 0, name, 1, (matrix,))
                copied = host.fetch(partial(store.dense, version.name, i), extent, layer, version)
                copied.wait()
                if copied.error is not None:
                    raise copied.error
                module = model.get_submodule(name)
                device = _device(model, name)
                if isinstance(module, PackedLinear):
                    module.packed = extent.to(device)
                else:
                    weight, bias = _views(extent, matrix, version)
                    module.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
                    if bias is not None:
                        module.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)
                    if module.weight.data_ptr() != weight.data_ptr():
                        continue  # in another dtype: nobody reads the extent any more
                out[name] = PackedMatrix(matrix, version, extent)
    finally:
        host.close()
        store.close()
    return out


def _device(model: nn.Module, name: str) -> torch.device:
    """Where a matrix belongs: to its nearest neighbours that are loaded."""
    while name:
        name = name.rpartition(".")[0]
        found = next((t for t in model.get_submodule(name).parameters() if t.device.type != "meta"), None)
        if found is not None:
            return found.device
    return torch.device("cpu")
