"""Check tensors that belong to a weight by their headers, and options of a configuration. A problem has one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from moepack.pack.errors import InputError
from moepack.pack.safetensors_file import TensorEntry

from .encoded import Encoded, StoredPart

T = TypeVar("T")
Document = Mapping[str, Any]  # an object of config.json, whose values are checked where they are read
Tensors = Mapping[str, TensorEntry]
Shape = tuple[int, ...]
Scheme = Callable[[Tensors], Iterator[tuple[str, Encoded]]]  # a format's reader, with what the configuration says
FLOATS = ("F32", "BF16", "F16")
# Suffixes of tensors beside a weight that only other programs' kernels need: scales of activations.
ACTIVATIONS = ("input_scale", "activation_scale", "input_global_scale", "input_zero_point", "act_scale")


def need(tensors: Tensors, name: str, dtypes: Sequence[str], shapes: Iterable[Shape], of: StoredPart) -> StoredPart:
    """The part `name` of the weight whose codes are `of`, with one of these dtypes and shapes."""
    entry = tensors.get(name)
    if entry is None:
        raise InputError(f"{of.name} has no {name}: the checkpoint is not complete")
    allowed = list(shapes)
    if entry.dtype not in dtypes or entry.shape not in allowed:
        wanted = f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in allowed)}"
        got = f"{entry.dtype} {list(entry.shape)}"
        raise InputError(f"{name} is {got}; {of.name} {of.dtype} {list(of.shape)} needs {wanted}")
    return StoredPart(name, entry.dtype, entry.shape)


def part(tensors: Tensors, name: str, ranks: Sequence[int] = (2, 3)) -> StoredPart:
    """The codes `name`, of one of these numbers of dimensions and not empty."""
    entry = tensors[name]
    if len(entry.shape) not in ranks or 0 in entry.shape:
        wanted = " or ".join(map(str, ranks))
        raise InputError(f"{name} has shape {list(entry.shape)}; codes have {wanted} dimensions and are not empty")
    return StoredPart(name, entry.dtype, entry.shape)


def there(tensors: Tensors, module: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of a module's tensors that the checkpoint has."""
    return tuple(name for n in names if (name := f"{module}.{n}") in tensors)


def option(document: Document, name: str, known: Sequence[T], default: object = None) -> T:
    """An option of a configuration, one of `known`."""
    value = document.get(name, default)
    for one in known:
        if value == one and type(value) is type(one):
            return one
    raise InputError(f"says {name} {value!r}: moepack reads {', '.join(map(repr, known))}")


def group_size(document: Document) -> int:
    """A configuration's `group_size`; 0 for a whole row, which it writes as -1."""
    value = document.get("group_size")
    if type(value) is not int or (value < 1 and value != -1):
        raise InputError(f"says group_size {value!r}, which is not a number of columns")
    return max(value, 0)


def block_size(document: Document, name: str) -> tuple[int, int]:
    """The rows and columns of the blocks that share a scale, an option of a configuration."""
    sizes = document.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise InputError(f"says {name} {sizes!r}: not two positive numbers")
    return sizes[0], sizes[1]
