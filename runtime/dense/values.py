"""All that a module's own code may read of the module, by value: the key under which a trial's result is remembered.

A class does not tell what its code computes: one layer's attention rotates, and the next layer's does not, because of
an attribute. So a key has every attribute of a module and of the modules inside, with the shapes of weights but not the
weights themselves.
"""

from __future__ import annotations

import logging
import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from torch import Tensor, nn

from .packed import PackedLinear

_TORCHS = frozenset(vars(nn.Module())) - {"training"}  # hooks, parameters, buffers and modules
_OURS = "_moepack"
_PLAIN = (bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType)
Result = TypeVar("Result")
log = logging.getLogger("moepack.runtime")


class ReadValues:
    """Makes keys of modules: equal keys for modules that differ in nothing but their weights."""

    def __init__(self) -> None:
        self._configs: dict[int, tuple[object, Hashable]] = {}  # by address; each is kept, so that no other gets it

    def of(self, module: nn.Module, without: str = "") -> Hashable:
        """Return a module's key; `without` is an attribute that does not count."""
        if isinstance(module, PackedLinear):
            return type(module), module.matrix, module.version
        own = {n: v for n, v in vars(module).items() if n not in _TORCHS and not n.startswith(_OURS) and n != without}
        return (
            type(module),
            tuple((n, _described(t)) for n, t in (*module._parameters.items(), *module._buffers.items())),
            tuple((n, None if m is None else self.of(m)) for n, m in module._modules.items()),
            tuple((n, self._value(v)) for n, v in own.items()),
        )

    def _value(self, value: object) -> Hashable:
        """Return what equals that of an equal value of the type; an object without a value equals itself."""
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self._value, value))
        if isinstance(value, Mapping):
            return type(value), tuple((k, self._value(v)) for k, v in value.items())
        if isinstance(value, set):
            return type(value), frozenset(map(self._value, value))
        if hasattr(value, "to_dict"):
            if id(value) not in self._configs:
                self._configs[id(value)] = value, (type(value), self._value(vars(value)))
            return self._configs[id(value)][1]
        try:
            hash(value)
        except TypeError:
            return type(value), _Itself(value)
        return type(value), value


def plain_values(module: nn.Module) -> dict[str, object]:
    """Return a module's own numbers, flags, names and functions, which its code may read in each pass."""
    return {n: v for n, v in vars(module).items() if isinstance(v, _PLAIN) and not n.startswith(_OURS)}


def keeps(module: nn.Module, values: Mapping[str, object]) -> bool:
    """Whether these values are still the module's."""
    own = vars(module)
    for name, value in values.items():
        held = own.get(name, values)
        if held is not value and (type(held) is not type(value) or held != value):
            return False
    return True


class _Itself:
    """Stands for an object that has no hash: equal to itself alone."""

    def __init__(self, of: object) -> None:
        self._of = of  # kept, so that no other object gets its address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._of is self._of

    def __hash__(self) -> int:
        return id(self._of)


def _described(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)


CLOSE = 2.0**-6  # the greatest difference allowed between two results, as a share of their greatest number


def near(got: Tensor, wanted: Tensor) -> bool:
    """Whether two results have one shape, and differ by no more than rounding."""
    apart = (got.float() - wanted.float()).abs() if got.shape == wanted.shape else None
    return apart is not None and bool(apart.max() <= CLOSE * wanted.float().abs().max())


class Trials(Generic[Result]):
    """Trials of a model's modules, one for all that differ in weights alone; and a count of those that kernels replace.

    A trial returns how the kernel computes what the module does; None if it does not, and the module's own code stays.
    """

    def __init__(self, found: dict[Hashable, Result | None] | None = None) -> None:
        """Begin with the results `found` of earlier trials, to which new ones are added."""
        self._found = {} if found is None else found
        self._values = ReadValues()
        self._agree: Counter[str] = Counter()
        self._differ: Counter[str] = Counter()

    def result(self, module: nn.Module, run: Callable[[], Result | None], without: str = "") -> Result | None:
        """Return what `run`, the trial of a module, returns; None if it raises. `without` is as of `ReadValues.of`."""
        key = self._values.of(module, without)
        if key not in self._found:
            try:
                self._found[key] = run()
            except Exception:  # of any kind, from a family's code
                self._found[key] = None
        return self._found[key]

    def count(self, module: nn.Module, agrees: bool) -> bool:
        """Count a module that was tried; return `agrees`."""
        (self._agree if agrees else self._differ)[type(module).__name__] += 1
        return agrees

    def done(self) -> dict[str, int]:
        """Return the number of modules replaced, by class; log how many of a class keep their own code."""
        for name, count in self._differ.items():
            log.info("%d %s: the model's own code runs, because the kernel's results differ", count, name)
        return dict(self._agree)
