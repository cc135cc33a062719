"""Products of a served model's dense matrices on a CPU, by the kernels that run its experts.

For one token, torch reads BF16 weights at half the memory's bandwidth. Here a matrix is in huge pages, laid out like an
expert that has this matrix alone (kernels/forms.py). One call multiplies all linear maps that share an input. If a pass
has many tokens, torch multiplies BF16 matrices (kernels/by_torch.py).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moepack.pack.errors import InputError
from moepack.pack.isa import emulated
from moepack.pack.reader import Bundle
from moepack.pack.spec import (
    LEAST_DENSE,
    LOSSLESS,
    ExpertLayer,
    Matrix,
    Version,
    is_router,
)
from moepack.runtime.devices.cpu import CpuDevice, CpuMemory
from moepack.runtime.devices.migration import HostEvent
from moepack.runtime.experts import backends
from moepack.runtime.kernels import by_torch
from moepack.runtime.kernels.forms import compiled as has_kernels
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.kernels.reference import plain_weights, section, sections_of
from moepack.runtime.planning.matrices import (
    Ranges,
    Shapes,
    extent_sizes,
    linears_outside,
    range_bytes,
    ranges,
)
from moepack.runtime.store.files import DENSE, BackingStore
from moepack.runtime.store.loading import in_order, loading

from .packed import PackedLinear

if TYPE_CHECKING:
    from moepack.runtime.kernels.dense_native import MatrixGroup

FamilyModule = Any  # a module of a family's own class, whose attributes torch's types do not have
FEW = 16  # tokens up to which one call computes the products of all maps that share an input
NARROWEST = 16  # the fewest rows and columns of a map that the kernels run
MISSES = 2  # after this many calls in a row with unused results of other maps, a group's maps are multiplied one by one
# Names of maps that share an input in most families. In other families `Group.run` dissolves the group at run time.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


def most_tokens() -> int:
    """The most tokens for which the kernels multiply by a BF16 matrix; torch multiplies for more.

    The kernels' time over torch's, with the same instruction sets, was measured on one core of an EPYC with AVX-512
    BF16 for [4096, 2048] and [2048, 4096]. With BF16 tiles it is 0.7 to 1.3 up to 16 tokens and 0.85 to 1.0 up to 64,
    too small a gain to keep more tokens' results for. Without tiles the bytes are read directly: 0.4 to 0.6 up to 64
    tokens with AVX-512 or AVX2, but 1.4 to 5 in plain C. So without tiles the limit is measured on this machine.
    """
    from moepack.runtime.kernels.affine_native import has_tiles

    if has_tiles(torch.bfloat16):
        return FEW
    return backends.dense_limits(torch.bfloat16, [LOSSLESS])[0]


def _narrow(model: nn.Module, experts: Sequence[str]) -> dict[str, PackedMatrix]:
    """BF16 maps narrower than dense matrices, such as gates of heads, where they lie.

    torch takes 0.2 ms for one of 32 rows where weights that stream through the caches evict its code.
    """
    version = Version.of(LOSSLESS)
    return {
        name: PackedMatrix(Matrix("weight", *m.weight.shape), version, m.weight.detach().view(-1).view(torch.uint8))
        for name, m in linears_outside(model, experts).items()
        if NARROWEST <= min(m.weight.shape) < LEAST_DENSE
        and m.bias is None
        and m.weight.dtype == torch.bfloat16
        and m.weight.is_contiguous()
        and not is_router(name)
    }


def groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the names of linear maps in groups that share an input; groups are ordered by their first name."""
    left: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        if name not in left:
            continue
        parent, _, last = name.rpartition(".")
        families = (tuple(f"{parent}.{other}" for other in family) for family in SIBLINGS if last == family[0])
        found = next((members for members in families if left.keys() >= set(members)), (name,))
        for member in found:
            del left[member]
        yield found


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One dense matrix in memory."""

    matrix: Matrix
    version: Version
    extent: Tensor  # uint8, laid out like an expert that has this matrix alone; a plain one may begin anywhere


class Group:
    """Linear maps that share an input: a call of the first one computes and keeps the results of the others too.

    A kept result is used only if the input is the very same tensor, unchanged. Each thread keeps results of its own.
    """

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self._parts = tuple(parts)
        self._size = len(parts)
        self._made: dict[tuple[int, ...], MatrixGroup] = {}
        self._kept = threading.local()
        self._misses = 0

    def __deepcopy__(self, memo: object) -> Group:
        return self

    @property
    def size(self) -> int:
        """How many maps share the input."""
        return len(self._parts)

    def run(self, which: int, x: Tensor) -> Tensor:
        """Return the product of map number `which` and x [..., cols], float32 or bfloat16."""
        # many tokens' results would take much memory
        kept = self._kept
        few = x.numel() <= FEW * x.shape[-1]
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

    def _products(self, x: Tensor, which: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return the products [..., rows] by each of the matrices with these numbers."""
        from moepack.runtime.kernels import dense_native as native

        return native.dense(self.matrices(which), x)

    def matrices(self, which: tuple[int, ...]) -> MatrixGroup:
        """Return the matrices with these numbers, as the kernels take them."""
        from moepack.runtime.kernels import dense_native as native
        from moepack.runtime.kernels.affine_native import DTYPES

        if (of := self._made.get(which)) is not None:
            return of
        parts = [self._parts[i] for i in which]
        matrices = []
        for part in parts:
            m = part.matrix
            if part.version.plain:
                weight, bias = _views(part.extent, m, part.version)
                matrices.append(native.KernelMatrix(native.PLAIN_FORM, m.rows, m.cols, weight, bias))
            else:
                (form,) = make_forms((m,), part.version)
                matrices.append(native.KernelMatrix(form, m.rows, m.cols, part.extent))
        limits = {d: backends.dense_limits(d, [part.version.name for part in parts]) for d in DTYPES}
        of = self._made[which] = native.MatrixGroup(matrices, limits)
        return of


def _unchanged(x: Tensor, state: Tensor | int) -> bool:
    """Whether a tensor is unchanged: by its version number, or in inference mode, which has none, by its values."""
    return torch.equal(x, state) if isinstance(state, Tensor) else not x.is_inference() and x._version == state


class Uncopied:
    """What a kernel reads of one module. A copied module has none: the module's own code runs."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> None:
        return None


def is_observed(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward of its own, which a kernel in its place would not run."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class Place(Uncopied):
    """Where the kernels find a linear map's weights."""

    def __init__(self, module: nn.Linear, group: Group, which: int, most: int) -> None:
        self.group = group
        self.which = which
        self.most = most
        self._at = _addresses(module)

    def holds(self, module: nn.Linear) -> bool:
        """Whether the module's weights are still at the addresses where they were."""
        return _addresses(module) == self._at


def _addresses(module: nn.Linear) -> tuple[int, int | None]:
    return module.weight.data_ptr(), None if module.bias is None else module.bias.data_ptr()


def _blank(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def in_place_of(kind: type[nn.Module], forward: Callable[..., object]) -> type[nn.Module]:
    """Make a subclass of `kind` with this forward and `kind`'s name. A copied or pickled module is of class `kind`."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}

    def reduce(self: object, protocol: object) -> tuple[object, ...]:
        return _blank, (kind,), self.__dict__

    return type(kind.__name__, (kind,), {**names, "__reduce_ex__": reduce, "forward": forward})


def with_name(function: types.FunctionType, name: str, value: object) -> types.FunctionType:
    """Copy a function with one of its global names replaced; a decorated function is replaced inside its decorators."""
    names = {**function.__globals__, name: value}
    cells = function.__closure__
    inner = None
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        inner = with_name(wrapped, name, value)
        own = types.CellType(inner)
        names = function.__globals__
        cells = tuple(own if c.cell_contents is wrapped else c for c in cells or ())
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    if inner is not None:
        made.__wrapped__ = inner  # type: ignore[attr-defined]
    return made


def _linear(self: FamilyModule, input: Tensor) -> Tensor:
    """Return y = W x + b of x [..., cols]: by the kernels for few BF16 tokens without gradients, else by torch."""
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
        return place.group.run(place.which, input)  # type: ignore[no-any-return]
    many = by_torch.linear if emulated(input.device, input.dtype) else nn.functional.linear
    return many(input, self.weight, self.bias)


ServedLinear = in_place_of(nn.Linear, _linear)


def learns(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def prepare(model: nn.Module, bundle: Bundle, versions: Sequence[Version]) -> None:
    """Remove the weights of the bundle's dense matrices from a model before loading; packed ones get a PackedLinear.

    Raises InputError for a matrix that the model lacks.
    """
    modules = dict(model.named_modules())
    for described, version in zip(bundle.manifest.dense, versions, strict=True):
        parent, _, last = described.module.rpartition(".")
        module = modules.get(described.module)
        shape = described.matrix
        if type(module) is not nn.Linear or (module.out_features, module.in_features) != (shape.rows, shape.cols):
            raise InputError(f"{bundle.path}: {type(model).__name__} has no linear map {described.module} of its shape")
        if version.plain:
            module._parameters.update(weight=None, bias=None)
            module._is_hf_initialized = True  # type: ignore[assignment]
        else:
            model.get_submodule(parent).register_module(last, PackedLinear(shape, version))


def serve(
    model: nn.Module,
    bundle: Bundle,
    versions: Sequence[Version],
    compiled: bool,
    plain: bool = True,
    direct: bool = False,
) -> None:
    """Load a model's dense matrices after its other weights, and let the kernels multiply by them.

    Args:
        versions: one for each dense matrix of the bundle; the model's others are moved into huge pages.
        compiled: whether the model is on a CPU that has compiled kernels.
        plain: whether the kernels multiply by BF16 matrices too.
        direct: whether files are read past the page cache.

    Raises BundleError when an extent is damaged.
    """
    room = ranges(model, bundle, versions, compiled and plain)
    served = _load(model, bundle, versions, room, direct) if versions else {}
    if not compiled:
        return
    if plain:
        served |= _move(model, room.moved) | _narrow(model, [layer.module for layer in bundle.layers])
    most = most_tokens() if plain else 0
    for names in groups([n for n, d in served.items() if has_kernels([d.version])]):
        group = Group([served[n] for n in names])
        for which, name in enumerate(names):
            module = model.get_submodule(name)
            if isinstance(module, PackedLinear):
                module.group = group
                module.which = which
            elif plain and isinstance(module, nn.Linear):
                module._moepack_place = Place(module, group, which, most)  # type: ignore[assignment]
                module.__class__ = ServedLinear  # type: ignore[assignment]


def _room(shapes: Shapes) -> dict[str, Tensor]:
    """Allocate a range of huge pages, and split it into an extent for each name."""
    sizes = extent_sizes(shapes)
    memory = CpuMemory(range_bytes(shapes))
    memory.take(0, sum(sizes))
    return dict(zip(shapes, memory.tensor[: sum(sizes)].split(sizes), strict=True))


def _move(model: nn.Module, shapes: Shapes) -> dict[str, PackedMatrix]:
    """Move BF16 matrices of a model into huge pages."""
    out = {}
    for name, extent in _room(shapes).items():
        module: Any = model.get_submodule(name)
        matrix, version = shapes[name]
        weight, bias = _views(extent, matrix, version)
        module.weight.data = weight.copy_(module.weight)
        if bias is not None:
            module.bias.data = bias.copy_(module.bias)
        out[name] = PackedMatrix(matrix, version, extent)
    return out


def _views(extent: Tensor, matrix: Matrix, version: Version) -> tuple[Tensor, Tensor | None]:
    """Views of the BF16 weight and bias of a decoded matrix."""
    (sections,) = sections_of((matrix,), version)
    (weight,) = plain_weights(extent, [sections])
    return weight, section(extent, sections["bias"]) if matrix.bias else None


def _load(
    model: nn.Module, bundle: Bundle, versions: Sequence[Version], room: Ranges, direct: bool
) -> dict[str, PackedMatrix]:
    """Read every dense matrix of a bundle into memory, and into its module."""
    described = bundle.manifest.dense
    store = BackingStore(bundle, direct=direct)
    out = {}
    count = loading()
    coded = [(v.name, DENSE, i) for i, v in enumerate(versions) if v.entropy_coded]
    host = CpuDevice(max((store.stored(*place).size for place in coded), default=0), threads=None)
    dtype = model.dtype if isinstance(model.dtype, torch.dtype) else torch.bfloat16
    try:
        count.expect(sum(store.stored(v.name, DENSE, i).size for i, v in enumerate(versions)))
        rooms = _room(room.plain) | _room(room.packed)

        def start(item: tuple[int, str]) -> HostEvent:
            (i, name), version = item, versions[item[0]]
            layer = ExpertLayer(described[i].layer or 0, name, 1, (described[i].matrix,))
            return host.fetch(partial(store.stored, version.name, DENSE, i), rooms[name], layer, version)

        with store.reading_ahead(coded):
            for (i, name), fetch in in_order(enumerate(d.module for d in described), start):
                if fetch is not None and fetch.error is not None:
                    raise fetch.error
                count.add(store.stored(versions[i].name, DENSE, i).size)
                extent = rooms.pop(name)
                matrix, version = described[i].matrix, versions[i]
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
                        continue  # converted to another dtype or device: the extent is not read again
                out[name] = PackedMatrix(matrix, version, extent)
    finally:
        host.close()
        store.close()
    return out


def _device(model: nn.Module, name: str) -> torch.device:
    """The device of a matrix that is not loaded yet: the device of its nearest loaded neighbours."""
    while name:
        name = name.rpartition(".")[0]
        found = next((t for t in model.get_submodule(name).parameters() if t.device.type != "meta"), None)
        if found is not None:
            return found.device
    return torch.device("cpu")
