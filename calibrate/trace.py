"""What a model's own code passes from decoder layer to decoder layer, recorded once and then replayed batch by batch.

Most models hand hidden states alone from one layer to the next. Others pass on what a layer returns beside them (an
indexer's choice, a router's state), compute with earlier layers' outputs, or let layers share keys and values in a
mapping. A recording runs the model with recorders in place of its layers. It keeps, in order, the layers' calls and the
operations on their outputs; outputs in arguments become `Ref`s, shared mappings `Store`s. It knows nothing of weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

MOST = 4  # the most values that a layer is taken to return
_IN_PLACE = re.compile(r"^(__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|.*[^_]_)$")
Arguments = dict[int | str, object]  # arguments by position or name
Values = dict[int, Any]  # by node: a tensor, or what else a layer returns beside hidden states
Filled = dict[str, tuple[Tensor, ...]]  # what layers have put into a mapping
T = TypeVar("T")


@dataclass(frozen=True)
class Ref:
    """In recorded arguments: a value that a layer or an operation made."""

    node: int


@dataclass(frozen=True)
class Store:
    """In recorded arguments: a mapping that layers fill for later layers."""

    number: int


@dataclass(frozen=True)
class TraceStep:
    """A call of a layer, or an operation on layers' outputs."""

    layer: int | None  # None for an operation
    function: Callable[..., object] | None  # None for a layer
    made: tuple[int, ...]  # the nodes that it makes
    whole: bool  # whether it returns one tensor, not a sequence of them


class ReturnsMore(Exception):
    """Raised by a model that unpacks what its layers return, if they return one value."""


class Unsupported(Exception):
    """Raised for a model whose layers cannot run one by one; the message says what they do."""


class _Value(Tensor):
    recording: Recording
    node: int
    is_output: bool  # a layer's only output, which the model may try to unpack

    def __iter__(self) -> Iterator[Tensor]:
        if self.is_output:
            raise ReturnsMore
        return iter(self.unbind(0))

    def __getitem__(self, index: Any) -> Tensor:
        if self.is_output and type(index) is int:
            raise ReturnsMore
        return super().__getitem__(index)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        recording = next(x.recording for x in tree_iter((args, kwargs)) if isinstance(x, _Value))
        return recording.operation(func, args, kwargs)


@dataclass(frozen=True)
class _Other:
    """Stands for what a layer returns beside hidden states. Models pass it on without looking at it."""

    node: int


class Recording:
    """A run of the model's code for one batch, with recorders in place of its layers."""

    def __init__(self, outputs: int, values: Mapping[int, Tensor] | None = None) -> None:
        """`outputs`: values that a layer returns. `values`: nodes whose values are known and need no recorder."""
        self.steps: list[TraceStep] = []
        self.arguments: list[Arguments] = []
        self._outputs = outputs
        self._values = values or {}
        self._nodes = self._layers = 0
        self._stores: list[object] = []

    def layer(self, index: int, hidden: Tensor, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Record a layer's call, and return placeholders for the layer's outputs."""
        if index != self._layers:
            raise Unsupported("run more than once, or in another order, for a token")
        self._layers += 1
        if index and not self._values and not isinstance(hidden, _Value):
            raise Unsupported("do not read the layer before")
        given: Arguments = {**dict(enumerate((hidden if index else None, *args)))}
        given.update(kwargs.items())
        made = self._add(given, index, None, self._outputs, self._outputs == 1)
        first = self._stands(made[0], _plain(hidden), self._outputs == 1)
        others = [self._values.get(n, _Other(n)) for n in made[1:]]
        return first if self._outputs == 1 else (first, *others)

    def operation(
        self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Run an operation on layers' outputs, and record it if it makes tensors."""
        if _IN_PLACE.search(getattr(function, "__name__", "")):
            raise Unsupported("return what is changed in place between layers")
        plain = tree_map(_plain, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*plain[0], **plain[1])
        parts = list(out) if isinstance(out, tuple | list) else [out]
        tensors = [x for x in parts if isinstance(x, Tensor)]
        if not parts or len(tensors) < len(parts):
            return out
        given: Arguments = dict(enumerate(args))
        given.update(kwargs.items())
        made = self._add(given, None, function, len(parts), isinstance(out, Tensor))
        stand = [self._stands(n, x, False) for n, x in zip(made, tensors, strict=True)]
        return stand[0] if isinstance(out, Tensor) else tuple(stand)

    def _add(
        self,
        given: Arguments,
        layer: int | None,
        function: Callable[..., object] | None,
        outputs: int,
        whole: bool,
    ) -> tuple[int, ...]:
        made = tuple(range(self._nodes, self._nodes + outputs))
        self._nodes += outputs
        self.steps.append(TraceStep(layer, function, made, whole))
        self.arguments.append(tree_map(self._recorded, given, is_leaf=_is_store))
        return made

    def _stands(self, node: int, like: Tensor, is_output: bool) -> Tensor:
        if node in self._values:
            return self._values[node]
        out = like.as_subclass(_Value)
        out.recording = self
        out.node = node
        out.is_output = is_output
        return out

    def _recorded(self, argument: object) -> object:
        if isinstance(argument, _Value | _Other):
            return Ref(argument.node)
        if not _is_store(argument):
            return argument
        number = next((i for i, x in enumerate(self._stores) if x is argument), len(self._stores))
        self._stores[number:] = self._stores[number:] or [argument]
        return Store(number)


class Program:
    """The steps of a recording, and for how long their results are needed."""

    def __init__(self, recording: Recording) -> None:
        self.steps = tuple(recording.steps)
        self.at = [i for i, step in enumerate(self.steps) if step.layer is not None]  # by layer: its step
        self.outputs = len(self.steps[0].made) if self.steps else 1
        # By layer: the node of its input. The first layer's is made by no layer.
        self.hidden = [ref.node if isinstance(ref := recording.arguments[i][0], Ref) else -1 for i in self.at]
        self._last: dict[int, int] = {}  # node -> the last step that reads it, other than as a layer's hidden states
        for i, (step, given) in enumerate(zip(self.steps, recording.arguments, strict=True)):
            rest = {k: v for k, v in given.items() if k != 0 or step.layer is None}
            self._last |= {x.node: i for x in tree_iter(rest) if isinstance(x, Ref)}

    def between(self, layer: int) -> range:
        """Return the steps between a layer and the next one; no steps after the last layer."""
        return range(self.at[layer] + 1, self.at[layer + 1]) if layer + 1 < len(self.at) else range(0)

    def needed(self, values: Values, layer: int) -> Values:
        """The values that are still needed once a layer and the operations behind it have run."""
        done = self.between(layer).stop or self.at[layer] + 1
        return {n: x for n, x in values.items() if self._last.get(n, -1) >= done and x is not None}

    def same_as(self, recording: Recording) -> bool:
        """Whether another recording has the same steps, up to where it is now."""
        return self.steps[: len(recording.steps)] == tuple(recording.steps)


class Passed:
    """Values other than hidden states that layers pass on for one batch: by node, and by mapping."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.stores: dict[int, Filled] = {}

    def copy(self) -> Passed:
        """A copy for another batch; no tensor is written to once it is here."""
        out = Passed()
        out.values = dict(self.values)
        out.stores = dict(self.stores)
        return out

    def resolve(self, recorded: Arguments, values: Values, device: torch.device) -> tuple[Arguments, dict[int, Filled]]:
        """Recorded arguments with values in place of Refs and Stores, on `device`; and the mappings by number."""
        stores: dict[int, Filled] = {}

        def real(x: object) -> object:
            if isinstance(x, Ref):
                found = values.get(x.node)
                return found.to(device) if isinstance(found, Tensor) else found
            if isinstance(x, Store):
                if x.number not in stores:
                    kept = self.stores.get(x.number, {})
                    stores[x.number] = {k: tuple(t.to(device) for t in v) for k, v in kept.items()}
                return stores[x.number]
            return x

        return tree_map(real, recorded), stores

    def fill(self, stores: Mapping[int, Filled]) -> None:
        """Copy to the CPU the values that a layer has written into the mappings of `resolve`."""
        for number, store in stores.items():
            self.stores[number] = {k: tuple(t.to("cpu") for t in v) for k, v in store.items()}

    def named(self) -> dict[str, Tensor]:
        """All of it as tensors by name."""
        out = {str(n): x for n, x in self.values.items()}
        for number, store in self.stores.items():
            out |= {f"{number}.{i}.{k}": t for k, parts in store.items() for i, t in enumerate(parts)}
        return out

    def put(self, name: str, tensor: Tensor) -> None:
        """Store one tensor of `named`. Tensors of the same mapping key must be put in their order."""
        number, _, rest = name.partition(".")
        if not rest:
            self.values[int(number)] = tensor
            return
        key = rest.partition(".")[2]
        store = self.stores.setdefault(int(number), {})
        store[key] = (*store.get(key, ()), tensor)


def same(a: object, b: object, equal: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two recorded arguments are the same; `equal` compares tensors. Other objects count as the same."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y, equal) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(x, b[k], equal) for k, x in a.items())
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or equal(a, b)
    return (not isinstance(a, Ref | Store | None) and not isinstance(b, Ref | Store | None)) or a == b


def split(given: Arguments) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional arguments in their order, and those by name."""
    positions = sorted(k for k in given if isinstance(k, int))
    return tuple(given[k] for k in positions), {k: v for k, v in given.items() if isinstance(k, str)}


def outputs_of(step: TraceStep, out: Any) -> Iterable[tuple[int, Any]]:
    """A step's nodes and their values."""
    return zip(step.made, (out,) if step.whole else tuple(out), strict=True)


def _plain(x: T) -> T | Tensor:
    return x.as_subclass(Tensor) if isinstance(x, _Value) else x


def _is_store(x: object) -> bool:
    return isinstance(x, MutableMapping) and not x
