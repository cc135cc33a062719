"""A transformers model with one decoder layer's weights in memory at a time.

`load` reads a part of the checkpoint (a decoder layer, or all else) into the skeleton with transformers' own renaming
and conversion; `free` drops it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from moepack.pack.errors import InputError, NotFiniteError
from moepack.pack.spec import Version

from .checkpoint import native_version
from .experts import ExpertWeights, parameter_names
from .finite import BF16_HOLDS, not_finite
from .held import empty, is_mapped, release
from .native import NativeWeight, RowPlaces, place, read, write_plain
from .released import DAMAGED
from .skeleton import Parts, Skeleton, set_tensor
from .skeleton import quiet_transformers as quiet_transformers

if TYPE_CHECKING:
    from transformers.utils.loading_report import LoadStateDictInfo


class StreamedModel(Skeleton):
    """The skeleton of a checkpoint's model, with methods that load and free its parts."""

    def load(self, part: int | None) -> dict[str, Tensor]:
        """Load a part in the checkpoint's dtypes on the CPU; encoded weights are decoded to BF16.

        Returns the part's tensors by name; they are also in the model until `free`. Raises InputError if the checkpoint
        lacks one of the tensors or has it in another shape.
        """
        experts = self._load_experts(part)
        skip = {key for name in experts for key in self._targets.get(name, [])}
        info = self._read(dict.fromkeys(key for key in self._sources.get(part, []) if key not in skip))
        for name, tensor in experts.items():
            set_tensor(self.model, name, tensor)
        self._refuse(info)
        for name in self.names(part):
            tensor = self.model.get_parameter_or_buffer(name)
            # A tensor made of one source is a view of the mapped file, whose pages would stay in memory.
            if not tensor.is_meta and name not in self._merged and name not in experts:
                set_tensor(self.model, name, tensor.detach().clone())
        state = self.model.state_dict()
        out = {name: state[name].detach() for name in self.names(part)}
        lost = [name for name, tensor in out.items() if tensor.is_meta]
        if lost:
            raise InputError(f"{self.checkpoint.name}: the checkpoint has nothing for {lost[0]}: it is not complete")
        return out

    def _read(self, parts: Parts) -> LoadStateDictInfo:
        with contextlib.ExitStack() as stack:
            reader = LazyWeights(self, stack)
            return self._convert(
                {self.ledger.turned.get(key, key): reader.weight(key, part) for key, part in parts.items()}
            )

    def check(self, weight: str, tensor: Tensor) -> None:
        """Raise NotFiniteError for a number of a weight that is NaN, or infinite in the dtype that serves it.

        Infinity is allowed in buffers alone, which may be masks, or bounds that nothing passes (gemma4's clipped maps).
        """
        target = self._target_of.get(weight)
        largest = BF16_HOLDS if target is not None and self.is_low_precision(target) else math.inf
        if found := not_finite(tensor, largest, bounds=target in self._buffers):
            index, value = found
            raise NotFiniteError(weight, f"is {value:g}: {DAMAGED}", index)

    def stacked_experts(self, weight: str) -> range | None:
        """The experts along the first axis of a weight of the checkpoint; None for a weight without such an axis."""
        layer = self.layer_of(self._target_of.get(weight, ""))
        if layer not in self.expert_layers:
            return None
        every = range(self.expert_layers[layer].experts)
        return (self._expert_parts(layer, every) or {}).get(weight)

    @cached_property
    def _target_of(self) -> Mapping[str, str]:
        """The parameter or buffer that a weight of the checkpoint becomes, or becomes a part of."""
        return {key: target for target, keys in self._targets.items() for key in keys}

    @cached_property
    def _buffers(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.model.named_buffers())

    def _read_apart(
        self, parts: Parts, shapes: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, Tensor], LoadStateDictInfo]:
        """Read parameters in these shapes without changing the model; tensors may be views of mapped files.

        Returns the tensors (none if transformers could not load one of them), and transformers' report.
        """
        return self._apart(lambda: self._read(parts), shapes)

    def _refuse(self, info: LoadStateDictInfo) -> None:
        """Raise InputError for weights that transformers reports it could not load."""
        if info.mismatched_keys:
            name, got, want = sorted(info.mismatched_keys)[0]
            raise InputError(f"{self.checkpoint.name}: {name} has shape {tuple(got)}, its config says {tuple(want)}")
        if info.conversion_errors:
            name, error = sorted(info.conversion_errors.items())[0]
            why = str(error).strip().splitlines()[-1]
            raise InputError(f"{self.checkpoint.name}: {name} cannot be converted: {why}")

    def _load_experts(self, part: int | None) -> dict[str, Tensor]:
        """Read a layer's expert parameters, some experts at a time; empty if `load` reads them with the rest."""
        out: dict[str, Tensor] = {}
        for some in self.expert_ranges(part):
            assert part is not None
            few = self._read_experts(part, some)
            if not few and self.experts_in is not None:  # no memory for all of them
                raise InputError(
                    f"{self.checkpoint.name}: experts of layer {part} are not read some at a time, which --memory "
                    "counts on: give it room for a whole layer"
                )
            if not few:  # `load` reports the error
                return {}
            for name, tensor in few.items():
                if name not in out:
                    shape = (self.expert_layers[part].experts, *tensor.shape[1:])
                    out[name] = empty(shape, tensor.dtype, self.experts_in if tensor.ndim > 2 else None)
                out[name][some.start : some.stop] = tensor
                release(out[name])
            del few, tensor  # before the next are read
        return out

    def _read_experts(self, layer: int, some: range) -> dict[str, Tensor]:
        """Read the parameters of some experts of a layer, perhaps views of mapped files; empty if this fails."""
        parts = self._expert_parts(layer, some)
        if parts is None:
            return {}
        names = self._expert_parameters(layer)
        shapes = {n: (len(some), *self.model.get_parameter_or_buffer(n).shape[1:]) for n in names}
        got, info = self._read_apart(parts, shapes)
        if self.experts_in is not None:
            self._refuse(info)
        return got

    def experts(self, layer: int, some: range) -> ExpertWeights:
        """Read some experts of a layer as they are in the checkpoint, and only these if its layout allows it.

        The layer must not be loaded. Raises InputError as `load` does.
        """
        if got := self._read_experts(layer, some):
            own = {n.rpartition(".")[2]: t if n in self._merged else t.clone() for n, t in got.items()}
            few = replace(self.expert_layers[layer], experts=len(some))
            return ExpertWeights.of(few, self.experts_module(layer), own)
        try:
            _, weights = self.split(layer, self.load(layer))
        finally:
            self.free(layer)
        assert weights is not None
        return weights.select(some).copied()

    def native_experts(self, layer: int, some: range) -> tuple[NativeWeight, ...]:
        """Some experts' matrices as the checkpoint's codes and scales: a NativeWeight each, [experts, rows, ..].

        Rows keep the module's order, and columns are those of a Linear whichever way the module keeps them. Raises
        InputError for a matrix that has no such form, and for codes or scales that are no numbers.
        """
        with contextlib.ExitStack() as stack:
            reader = LazyWeights(self, stack).reader
            return tuple(read(self.checkpoint.name, reader, *of) for of in self._native_places(layer, some))

    def write_back(self, layer: int, some: range, matrices: Sequence[NativeWeight | Tensor]) -> dict[str, Tensor]:
        """The inverse of `native_experts`: the checkpoint's tensors byte for byte, by name, without their leftovers.

        Of a tensor with all experts along its first axis, that is `some` of it. Experts that the checkpoint has as
        plain tensors are given so, [experts, rows, cols]. Raises InputError for a layout that is not undone.
        """
        out: dict[str, Tensor] = {}
        turned = bool(self.experts_module(layer).is_transposed)
        parts = self._parts(layer, some)
        for name, matrix in zip(self._matrices(layer), matrices, strict=True):
            own = {key: parts[key] for key in self._targets.get(name, []) if key in parts}
            if isinstance(matrix, Tensor):
                out |= write_plain(self, name, own, matrix, turned)
            else:
                out |= place(self, name, turned).select(some, own).restore(matrix)
        return out

    def _native_places(self, layer: int, some: range) -> Iterator[tuple[RowPlaces, Parts]]:
        parts = self._parts(layer, some)
        for whole in self._layer_places(layer):
            own = {key: parts[key] for key, _ in whole.sources if key in parts}
            yield whole.select(some, own), own

    def _parts(self, layer: int, some: range) -> Parts:
        parts = self._expert_parts(layer, some)
        if parts is None:
            raise InputError(f"{self.checkpoint.name}: experts of layer {layer} are not stored one by one or stacked")
        return parts

    def _matrices(self, layer: int) -> tuple[str, ...]:
        prefix = self._experts[layer]
        return tuple(f"{prefix}.{weight}" for weight, _ in parameter_names(self.experts_module(layer)).values())

    @cached_property
    def _layer_places(self) -> Callable[[int], tuple[RowPlaces, ...]]:
        """Places the matrices of all experts of a layer: transformers takes 5 ms for one expert's, 80 for 128."""

        def placed(layer: int) -> tuple[RowPlaces, ...]:
            turned = bool(self.experts_module(layer).is_transposed)
            return tuple(place(self, name, turned) for name in self._matrices(layer))

        return lru_cache(maxsize=1)(placed)

    def native_dense(self, module: str) -> NativeWeight | None:
        """A Linear's weight as the checkpoint's codes and scales, [rows, ..]; None if the checkpoint has none.

        Raises InputError as `native_experts` does.
        """
        parts = self._dense_parts(module)
        if parts is None:
            return None
        with contextlib.ExitStack() as stack:
            reader = LazyWeights(self, stack).reader
            return read(self.checkpoint.name, reader, place(self, f"{module}.weight"), parts)

    def write_back_dense(self, module: str, weight: NativeWeight) -> dict[str, Tensor]:
        """The inverse of `native_dense`: the checkpoint's tensors byte for byte, by name, without their leftovers."""
        return place(self, f"{module}.weight").restore(weight)

    @cached_property
    def dense_versions(self) -> Mapping[str, Version]:
        """Map each Linear to the version that keeps its weight as the checkpoint stores it, if there is one."""
        out: dict[str, Version] = {}
        for name, module in self.model.named_modules() if self.checkpoint.encoded else ():
            parts = self._dense_parts(name) if type(module) is torch.nn.Linear else None
            if parts is not None:
                with contextlib.suppress(InputError):  # for groups or an order of rows that no version has
                    version = native_version(self.checkpoint, list(parts))
                    if place(self, f"{name}.weight").fits(version):
                        out[name] = version
        return out

    def _dense_parts(self, module: str) -> Parts | None:
        """The weights that a Linear's is made of; None unless all of them are encoded."""
        keys = self._targets.get(f"{module}.weight", [])
        return dict.fromkeys(keys) if keys and all(k in self.checkpoint.encoded for k in keys) else None

    def expert_files(self, layer: int, some: range) -> set[str]:
        """The files that `experts` reads."""
        parts = self._expert_parts(layer, some)
        return self.checkpoint.files_of(self._sources.get(layer, []) if parts is None else parts)

    def tensors(self, part: int | None, names: Sequence[str]) -> dict[str, Tensor]:
        """Read some tensors of a part as `load` would, and only these if the checkpoint's layout allows it.

        They may be views of mapped files. The part must not be loaded. Raises InputError as `load` does.
        """
        keys = self._own_sources(names)
        if keys is not None:
            shapes = {name: self.model.get_parameter_or_buffer(name).shape for name in names}
            if got := self._read_apart(dict.fromkeys(keys), shapes)[0]:
                return got
        try:
            whole = self.load(part)
        finally:
            self.free(part)
        return {name: whole[name] for name in names}

    def dense_apart(self, part: int | None) -> bool:
        """Whether `tensors` can read a part's `dense_names` without the rest of the part."""
        return self._own_sources(self.dense_names(part)) is not None

    def tensor_files(self, part: int | None, names: Sequence[str]) -> set[str]:
        """The files that `tensors` reads."""
        keys = self._own_sources(names)
        return self.checkpoint.files_of(self._sources.get(part, []) if keys is None else keys)

    def mtp_groups(self, most: int) -> Iterator[dict[str, Tensor]]:
        """Yield the decoded tensors of the MTP layers by their checkpoint names, about `most` bytes at a time.

        Empty each group before taking the next, so that only one is in memory.
        """
        left = list(reversed(self.mtp))
        while left:
            group: dict[str, Tensor] = {}
            with contextlib.ExitStack() as stack:  # leaving it unmaps the files
                reader = LazyWeights(self, stack)
                while left and sum(t.nbytes for t in group.values()) < most:
                    name = left.pop()
                    group[name] = reader.weight(name)[...].clone()  # not a view of the mapped file
            yield group

    def split(self, layer: int, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ExpertWeights | None]:
        """Split a loaded layer into its dense tensors and its experts, None without experts."""
        if layer not in self._experts:
            return dict(tensors), None
        owned = set(self._expert_parameters(layer))
        dense = {n: t for n, t in tensors.items() if n not in owned}
        own = {n.rpartition(".")[2]: tensors[n] for n in tensors if n in owned}
        return dense, ExpertWeights.of(self.expert_layers[layer], self.experts_module(layer), own)

    def to_compute(self, part: int | None, dtype: torch.dtype) -> None:
        """Move a loaded part to the device in its compute dtypes; mapped tensors are converted into another file."""
        for name in self.names(part):
            tensor = self.model.get_parameter_or_buffer(name).detach()
            wanted = tensor.dtype
            if tensor.is_floating_point():
                wanted = torch.float32 if self._compute_dtype[name] == torch.float32 else dtype
            ready = self._filed(tensor, wanted) if is_mapped(tensor) else tensor.to(self.device, wanted)
            set_tensor(self.model, name, ready)

    def _filed(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert a mapped tensor to `dtype`, in another file."""
        if tensor.dtype == dtype:
            return tensor
        out = empty(tensor.shape, dtype, self.experts_in)
        for here, expert in zip(out, tensor, strict=True):
            here.copy_(expert)
            release(out)
            release(tensor)
        return out

    def free(self, part: int | None) -> None:
        """Move a part back to the meta device, in the checkpoint's dtypes.

        Further tensors of an experts module (a norm after each expert) stay on the device for quantising.
        """
        state = self.model.state_dict()
        dense = set(self.dense_names(part))
        prefix = f"{self._experts[part]}." if part in self._experts else None
        for name in self.names(part):
            if prefix and name.startswith(prefix) and name in dense:
                set_tensor(self.model, name, state[name].detach().to(self.device))
            else:
                empty_like = torch.empty_like(state[name], device="meta", dtype=self._source_dtype[name])
                set_tensor(self.model, name, empty_like)


class LazyWeights:
    """Lazy slices of a checkpoint's weights. The files stay open until `stack` closes."""

    def __init__(self, model: StreamedModel, stack: contextlib.ExitStack) -> None:
        self.model = model
        self._stack = stack
        self._handles: dict[str, safe_open] = {}

    def weight(self, name: str, part: range | None = None) -> _LazyWeight:
        """A weight that is read when indexed, and decoded to BF16 if encoded; `part` is a range of its first axis."""
        return _LazyWeight(self, name, part)

    def reader(self, part: range | None = None) -> Callable[[str], Tensor]:
        """Return a function that reads a tensor of the checkpoint by name; `part` is a range of the first axis."""
        at = ... if part is None else slice(part.start, part.stop)
        return lambda name: self._slice(name)[at]

    def _slice(self, tensor: str) -> Any:
        checkpoint = self.model.checkpoint
        file = checkpoint.file_of[tensor]
        if file not in self._handles:
            path = checkpoint.path / file
            self._handles[file] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._handles[file].get_slice(tensor)


class _LazyWeight:
    """A weight, an encoded weight or a range of one, read and checked when indexed."""

    def __init__(self, weights: LazyWeights, name: str, part: range | None) -> None:
        self._weights = weights
        self._name = name
        self._part = part

    def __getitem__(self, index: Any) -> Tensor:
        model = self._weights.model
        name = self._name
        get = self._weights.reader(self._part)
        encoded = model.checkpoint.encoded.get(name)
        try:
            values = get(name) if encoded is None else encoded.decode(get)
            model.check(name, values)
            return values[index]
        except NotFiniteError as error:
            raise error.within(model.checkpoint.name, self._part or model.stacked_experts(name)) from None
        except InputError as error:
            raise InputError(f"{model.checkpoint.name}: {error}") from None
