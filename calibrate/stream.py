"""A transformers model whose weights are in memory one decoder layer at a time.

The skeleton lives on the meta device. `load` brings one part of the checkpoint (a decoder layer, or all that is outside
them) through transformers' own renaming and conversion; `free` drops it. Nothing here runs the model.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack.families.mtp import mtp_tensors
from moepack.pack.errors import CODE_ERRORS, InputError, in_a_line
from moepack.pack.spec import ExpertLayer

from .checkpoint import Checkpoint, source_dtype
from .experts import ExpertWeights, describe, is_experts_module, parameter_names
from .held import empty, is_mapped, release
from .lazy import LazyWeights
from .some_experts import Parts, sources_of

# Bytes of a layer's experts, or of layers for MTP, that are read at once: reading takes up to three times as much.
AT_ONCE = 1 << 29
_TORCH_DTYPE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class StreamedModel:
    """The skeleton of a checkpoint's model, and the loading of its parts.

    Attributes:
        model: the transformers model; on meta but for what is loaded.
        layers: its decoder layers (a ModuleList).
        expert_layers: layer index -> descriptor, for the layers that have experts.
        expert_dtype: the dtype of the experts in the checkpoint, one of `moepack.pack.spec.EXPERT_DTYPES`.
        mtp: names of the checkpoint's tensors that are its layers for multi-token prediction, which the model has not.
        unused: names of its other tensors that have no place in the model.
        experts_in: a folder whose disk holds the matrices of a loaded layer's experts, where they are read some at a
            time; they stay on the CPU then. None is in memory.

    Raises:
        InputError: for a model without experts, one whose layers or experts are of an unknown layout, or a checkpoint
            that lacks a tensor.
    """

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> None:
        from moepack.families.model_class import model_of

        self.checkpoint, self.device = checkpoint, torch.device(device)
        config = checkpoint.config
        try:
            with torch.device("meta"):
                self.model = model_of(config, dtype=torch.bfloat16)
        except CODE_ERRORS as error:
            raise InputError(f"{checkpoint.name}: transformers does not make its model: {in_a_line(error)}") from error
        self.model.eval()
        experts = {n: m for n, m in self.model.named_modules() if is_experts_module(m)}
        if not experts:
            raise InputError(f"{checkpoint.name}: {config.model_type} {_why_none(self.model)}")
        found = {re.match(r"(.*?)\.(\d+)\.", name) for name in experts}
        prefixes = {m.group(1) for m in found if m}
        if len(prefixes) != 1 or None in found:
            raise InputError(
                f"{checkpoint.name}: experts of {config.model_type} are not in one stack of decoder layers"
            )
        self.prefix = prefixes.pop()
        layers = {re.match(rf"{re.escape(self.prefix)}\.\d+\.", name)[0] for name in experts}  # type: ignore[index]
        if len(layers) != len(experts):
            raise InputError(
                f"{checkpoint.name}: layers of {config.model_type} have several sets of experts: not supported"
            )
        self.layers = self.model.get_submodule(self.prefix)
        self.mtp: list[str] = []
        self.unused: list[str] = []
        self.experts_in: Path | None = None
        self._experts = {int(name[len(self.prefix) + 1 :].split(".")[0]): name for name in experts}
        self.expert_layers: dict[int, ExpertLayer] = {
            i: describe(i, name, experts[name]) for i, name in sorted(self._experts.items())
        }
        self._plan()
        self._materialise_buffers()

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The dtype of experts as `load` leaves them."""
        return _TORCH_DTYPE.get(self.expert_dtype, torch.bfloat16)

    def experts_module(self, layer: int) -> Any:
        """The experts module of a decoder layer."""
        return self.model.get_submodule(self._experts[layer])

    def is_low_precision(self, parameter: str) -> bool:
        """Whether transformers computes with a parameter in BF16, and not in float32."""
        return self._compute_dtype[parameter] == torch.bfloat16

    def _plan(self) -> None:
        """Find each checkpoint tensor's target, and give each parameter on meta the dtype it has in the checkpoint."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        state = self.model.state_dict()
        mapping = self._mapping()
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        tied = set(self.model.all_tied_weights_keys)
        self._compute_dtype = {name: self._dtype_for(name) for name in state}
        self._source_dtype = {name: tensor.dtype for name, tensor in state.items()}
        self._sources: dict[int | None, list[str]] = {}
        self.unused = []
        targets: dict[str, list[str]] = {}
        for key in self.checkpoint.weights:
            target, _ = rename_source_key(key, renamings, converters, self.model.base_model_prefix, state)
            if target not in state and key in state:
                target, _ = rename_source_key(key, [], [], self.model.base_model_prefix, state)
            if target in state:
                if target not in tied:
                    self._sources.setdefault(self.layer_of(target), []).append(key)
                    targets.setdefault(target, []).append(key)
            else:
                self.unused.append(key)
        self.mtp = mtp_tensors(self.unused, len(self.layers))
        self.unused = sorted(set(self.unused) - set(self.mtp))
        self._merged = {target for target, keys in targets.items() if len(keys) > 1}
        self._targets = targets
        expert_sources: list[str] = []
        for name in self._experts.values():
            module = self.model.get_submodule(name)
            for weight, _ in parameter_names(module).values():
                expert_sources += targets.get(f"{name}.{weight}", [])
        if not expert_sources:
            raise InputError(f"{self.checkpoint.name}: no tensor of the checkpoint belongs to an expert")
        self.expert_dtype = source_dtype(self.checkpoint, expert_sources)
        for target, keys in targets.items():
            dtype = _TORCH_DTYPE.get(self.checkpoint.dtype(keys[0]))
            if dtype is not None and state[target].is_floating_point():
                self._source_dtype[target] = dtype
                _set(self.model, target, torch.empty_like(state[target], dtype=dtype))
        self._bytes: dict[int | None, dict[str, int]] = {}  # of each part's tensors, as the checkpoint has them
        for name, tensor in state.items():
            if name not in tied:
                size = tensor.numel() * self._source_dtype[name].itemsize
                self._bytes.setdefault(self.layer_of(name), {})[name] = size
        lost = sorted(set(state) - set(targets) - tied)
        if lost and not any(len(c.target_patterns) > 1 for c in converters):
            raise InputError(f"{self.checkpoint.name}: the checkpoint has nothing for {lost[0]}: it is not complete")

    def _dtype_for(self, name: str) -> torch.dtype:
        """The dtype transformers computes with for a parameter of a BF16 model."""
        plan = self.model._get_dtype_plan(torch.bfloat16)
        return torch.float32 if any(re.search(pattern, name) for pattern in plan) else torch.bfloat16

    def _mapping(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return list(get_model_conversion_mapping(self.model))

    def layer_of(self, name: str) -> int | None:
        """The decoder layer that a module or parameter of this name is in."""
        match = re.match(re.escape(self.prefix) + r"\.(\d+)\.", name)
        return int(match.group(1)) if match else None

    def _materialise_buffers(self) -> None:
        """Give rotary tables and other buffers that no checkpoint holds their values."""
        for module in self.model.modules():
            names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
            if names:
                for n in names:
                    buffer = module._buffers[n]
                    if buffer is not None:
                        module._buffers[n] = torch.empty_like(buffer, device=self.device)
                with torch.no_grad():
                    self.model._init_weights(module)

    def names(self, layer: int | None) -> list[str]:
        """Names of a part's parameters and persistent buffers, those tied to others left out."""
        return list(self._bytes.get(layer, ()))

    def part_bytes(self, layer: int | None) -> int:
        """Bytes of a part in memory, as `load` leaves it."""
        return sum(self._bytes.get(layer, {}).values())

    def file_bytes(self, layer: int | None) -> int:
        """Bytes of a part that lie on disk with `experts_in`."""
        if layer is None or not self.expert_ranges(layer):
            return 0
        sizes = self._bytes[layer]
        return sum(sizes[name] for name in self._expert_parameters(layer) if self._is_matrices(name))

    def loading_bytes(self, layer: int | None, on_disk: bool = False) -> int:
        """The most bytes that `load` of a part takes: its tensors, the mapped pages of the files, and copies.

        Args:
            layer: the part.
            on_disk: with `experts_in`.
        """
        sizes, parts = dict(self._bytes.get(layer, {})), self.expert_ranges(layer)
        if layer is None or not parts:
            return self._read_bytes(sizes)
        few, all_of_them = len(parts[0]), self.expert_layers[layer].experts
        experts = {name: sizes.pop(name) for name in self._expert_parameters(layer)}
        kept, part = sum(experts.values()), self._read_bytes(experts) * few // all_of_them
        if on_disk:  # but for what a part has written
            kept -= self.file_bytes(layer) * (all_of_them - few) // all_of_them
        return kept + max(part, self._read_bytes(sizes))

    def _is_matrices(self, parameter: str) -> bool:
        """Whether a parameter of an experts module is their matrices, and not their biases."""
        return bool(self.model.get_parameter_or_buffer(parameter).ndim > 2)

    def _read_bytes(self, sizes: Mapping[str, int]) -> int:
        """The most bytes that reading these parameters at once takes."""
        merged = [size for name, size in sizes.items() if name in self._merged]
        return 2 * sum(sizes.values()) + sum(merged) // 2 + max(merged, default=0)

    def expert_ranges(self, layer: int | None) -> list[range]:
        """Experts of a layer that are read together, about AT_ONCE bytes; empty where they are read with all else."""
        if layer not in self._experts:
            return []
        assert layer is not None
        experts, sizes = self.expert_layers[layer].experts, self._bytes[layer]
        each = sum(sizes[name] for name in self._expert_parameters(layer)) // experts
        step = max(1, AT_ONCE // max(1, each))
        if step >= experts or self._expert_parts(layer, range(1)) is None:
            return []
        return [range(a, min(a + step, experts)) for a in range(0, experts, step)]

    def dense_rows(self, layer: int) -> int:
        """Rows of a layer's Linears, all together, the experts' left out."""
        modules = self.layers[layer].modules()
        return sum(int(m.out_features) for m in modules if isinstance(m, torch.nn.Linear))

    def load(self, layer: int | None) -> dict[str, Tensor]:
        """Load a decoder layer, or with None all that is outside them, in the checkpoint's own dtypes on the CPU.

        What is stored as codes and scales is decoded to BF16 (encoded.py).

        Returns the part's tensors by name; they are also in the model until `free`.

        Raises:
            InputError: when the checkpoint lacks one of them or has it in another shape.
        """
        experts = self._load_experts(layer)
        skip = {key for name in experts for key in self._targets.get(name, [])}
        info = self._read(dict.fromkeys(key for key in self._sources.get(layer, []) if key not in skip))
        for name, tensor in experts.items():
            _set(self.model, name, tensor)
        self._refuse(info)
        for name in self.names(layer):
            tensor = self.model.get_parameter_or_buffer(name)
            # A tensor of one source is a view of the mapped file, and would keep all that was read of it in memory.
            if not tensor.is_meta and name not in self._merged and name not in experts:
                _set(self.model, name, tensor.detach().clone())
        state = self.model.state_dict()
        out = {name: state[name].detach() for name in self.names(layer)}
        lost = [name for name, tensor in out.items() if tensor.is_meta]
        if lost:
            raise InputError(f"{self.checkpoint.name}: the checkpoint has nothing for {lost[0]}: it is not complete")
        return out

    def _read(self, parts: Parts) -> Any:
        """Bring weights of the checkpoint into the model; what transformers says of them."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        with contextlib.ExitStack() as stack, quiet_transformers():
            reader = LazyWeights(self.checkpoint, stack)
            sources = {key: reader.weight(key, part) for key, part in parts.items()}
            config = LoadStateDictConfig(dtype=None, device_map={"": "cpu"}, weight_mapping=self._mapping())
            info, _ = convert_and_load_state_dict_in_model(self.model, sources, config)
        return info

    def _refuse(self, info: Any) -> None:
        """Raise InputError for what transformers said that it could not load."""
        if info.mismatched_keys:
            name, got, want = sorted(info.mismatched_keys)[0]
            raise InputError(f"{self.checkpoint.name}: {name} has shape {tuple(got)}, its config says {tuple(want)}")
        if info.conversion_errors:
            name, error = sorted(info.conversion_errors.items())[0]
            raise InputError(
                f"{self.checkpoint.name}: {name} cannot be converted: {str(error).strip().splitlines()[-1]}"
            )

    def _load_experts(self, layer: int | None) -> dict[str, Tensor]:
        """A layer's experts, parameter by parameter, read some at a time; nothing where they are read with the rest."""
        out: dict[str, Tensor] = {}
        for some in self.expert_ranges(layer):
            assert layer is not None
            few = self._read_experts(layer, some)
            if few is None and self.experts_in is not None:  # reading all of them would take what is not there
                raise InputError(
                    f"{self.checkpoint.name}: experts of layer {layer} are not read some at a time, which --memory "
                    "counts on: give it room for a whole layer"
                )
            if few is None:  # `load` finds out why
                return {}
            for name, tensor in few.items():
                if name not in out:
                    shape = (self.expert_layers[layer].experts, *tensor.shape[1:])
                    out[name] = empty(shape, tensor.dtype, self.experts_in if tensor.ndim > 2 else None)
                out[name][some.start : some.stop] = tensor
                release(out[name])
            del few, tensor  # before the next are read
        return out

    def _read_experts(self, layer: int, some: range) -> dict[str, Tensor] | None:
        """The parameters of some experts of a layer, views of the mapped files among them; None where that fails."""
        parts = self._expert_parts(layer, some)
        if parts is None:
            return None
        meta = {name: self.model.get_parameter_or_buffer(name) for name in self._expert_parameters(layer)}
        try:
            for name, whole in meta.items():
                _set(self.model, name, torch.empty(len(some), *whole.shape[1:], dtype=whole.dtype, device="meta"))
            info = self._read(parts)
            got = {name: self.model.get_parameter_or_buffer(name).detach() for name in meta}
        finally:
            for name, whole in meta.items():
                _set(self.model, name, whole)
        if self.experts_in is not None:
            self._refuse(info)
        lacks = info.mismatched_keys or info.conversion_errors or any(tensor.is_meta for tensor in got.values())
        return None if lacks else got

    def experts(self, layer: int, some: range) -> ExpertWeights:
        """Some experts of a layer as the checkpoint has them: only they are read, where its layout lets that be told.

        The layer must not be loaded.

        Raises:
            InputError: see `load`.
        """
        got = self._read_experts(layer, some)
        if got is not None:
            own = {n.rpartition(".")[2]: t if n in self._merged else t.clone() for n, t in got.items()}
            few = replace(self.expert_layers[layer], experts=len(some))
            return ExpertWeights.of(few, self.experts_module(layer), own)
        try:
            _, weights = self.split(layer, self.load(layer))
        finally:
            self.free(layer)
        assert weights is not None
        return weights.select(some).copied()

    def expert_files(self, layer: int, some: range) -> set[str]:
        """The files that `experts` reads."""
        parts = self._expert_parts(layer, some)
        return self.checkpoint.files_of(self._sources.get(layer, []) if parts is None else parts)

    def tensors(self, layer: int | None, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors of a part as `load` gives them: only they are read, where the checkpoint's layout lets that be
        told. They may be views of the mapped files. The part must not be loaded.

        Raises:
            InputError: see `load`.
        """
        keys = self._own_sources(names)
        if keys is not None:
            meta = {name: self.model.get_parameter_or_buffer(name) for name in names}
            try:
                info = self._read(dict.fromkeys(keys))
                got = {name: self.model.get_parameter_or_buffer(name).detach() for name in names}
            finally:
                for name, empty in meta.items():
                    _set(self.model, name, empty)
            if not (info.mismatched_keys or info.conversion_errors or any(t.is_meta for t in got.values())):
                return got
        try:
            whole = self.load(layer)
        finally:
            self.free(layer)
        return {name: whole[name] for name in names}

    def dense_names(self, layer: int | None) -> list[str]:
        """Names of a layer's tensors but for its experts' matrices and biases."""
        own = set(self._expert_parameters(layer)) if layer in self._experts else set()
        return [name for name in self.names(layer) if name not in own]

    def dense_apart(self, layer: int | None) -> bool:
        """Whether the layout lets `tensors` read a part's `dense_names` and nothing else."""
        return self._own_sources(self.dense_names(layer)) is not None

    def tensor_files(self, layer: int | None, names: Sequence[str]) -> set[str]:
        """The files that `tensors` reads."""
        keys = self._own_sources(names)
        return self.checkpoint.files_of(self._sources.get(layer, []) if keys is None else keys)

    def _own_sources(self, names: Sequence[str]) -> list[str] | None:
        """The weights of the checkpoint that these tensors are made of, one each; None where that is otherwise."""
        found = [self._targets.get(name, []) for name in names]
        if any(len(keys) != 1 for keys in found):
            return None
        shapes = [tuple(self.model.get_parameter_or_buffer(name).shape) for name in names]
        keys = [key for (key,) in found]
        return keys if all(tuple(self.checkpoint.shape(k)) == s for k, s in zip(keys, shapes, strict=True)) else None

    def _expert_parameters(self, layer: int) -> list[str]:
        prefix, module = self._experts[layer], self.experts_module(layer)
        return [f"{prefix}.{p}" for pair in parameter_names(module).values() for p in pair if p is not None]

    def _expert_parts(self, layer: int, some: range) -> Parts | None:
        sources = {name: self._targets.get(name, []) for name in self._expert_parameters(layer)}
        shapes = {key: self.checkpoint.shape(key) for keys in sources.values() for key in keys}
        return sources_of(some, self.expert_layers[layer].experts, sources, shapes)

    @property
    def mtp_bytes(self) -> int:
        """Bytes of the tensors of `mtp_groups`."""
        return sum(self.checkpoint.weight_bytes(name) for name in self.mtp)

    @property
    def mtp_loading_bytes(self) -> int:
        """The most bytes that one of `mtp_groups`, of AT_ONCE bytes, takes: its tensors, the mapped pages of the files,
        and the last tensor as it is decoded and copied."""
        largest = max((self.checkpoint.weight_bytes(name) for name in self.mtp), default=0)
        return 2 * min(self.mtp_bytes, AT_ONCE + largest) + 2 * largest

    def mtp_groups(self, most: int) -> Iterator[dict[str, Tensor]]:
        """The tensors of the MTP layers, by their names in the checkpoint, about so many bytes at a time: as they are
        stored, those that are codes and scales decoded to BF16. To be emptied before the next are asked for."""
        left = list(reversed(self.mtp))
        while left:
            group: dict[str, Tensor] = {}
            with contextlib.ExitStack() as stack:  # whose end lets go of what was mapped
                reader = LazyWeights(self.checkpoint, stack)
                while left and sum(t.nbytes for t in group.values()) < most:
                    name = left.pop()
                    group[name] = reader.weight(name)[...].clone()  # not a view of the mapped file
            yield group

    def split(self, layer: int, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ExpertWeights | None]:
        """A loaded layer as its dense tensors and, where it has them, its experts."""
        if layer not in self._experts:
            return dict(tensors), None
        module, prefix = self.experts_module(layer), self._experts[layer] + "."
        owned = {prefix + p for pair in parameter_names(module).values() for p in pair if p is not None}
        dense = {n: t for n, t in tensors.items() if n not in owned}
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n in owned}
        return dense, ExpertWeights.of(self.expert_layers[layer], module, own)

    def _inside(self, layer: int | None) -> set[str]:
        """Names of what a layer's experts module has beside the experts' matrices."""
        if layer is None or layer not in self._experts:
            return set()
        prefix = self._experts[layer] + "."
        own = {prefix + p for pair in parameter_names(self.experts_module(layer)).values() for p in pair if p}
        return {n for n in self.names(layer) if n.startswith(prefix)} - own

    def to_compute(self, layer: int | None, dtype: torch.dtype) -> None:
        """Bring a loaded part to the device and to the dtypes transformers would compute with; what lies in a file to
        another one, in these dtypes."""
        for name in self.names(layer):
            tensor = self.model.get_parameter_or_buffer(name).detach()
            wanted = tensor.dtype
            if tensor.is_floating_point():
                wanted = torch.float32 if self._compute_dtype[name] == torch.float32 else dtype
            _set(self.model, name, self._filed(tensor, wanted) if is_mapped(tensor) else tensor.to(self.device, wanted))

    def _filed(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A mapped tensor of experts in a dtype, in a file."""
        if tensor.dtype == dtype:
            return tensor
        out = empty(tensor.shape, dtype, self.experts_in)
        for here, expert in zip(out, tensor, strict=True):
            here.copy_(expert)
            release(out)
            release(tensor)
        return out

    def free(self, layer: int | None) -> None:
        """Put a part back on the meta device; its dtypes are again the checkpoint's. What an experts module has beside
        its matrices (a norm behind each expert) stays, on the device: quantising asks it."""
        state, inside = self.model.state_dict(), self._inside(layer)
        for name in self.names(layer):
            if name in inside:
                _set(self.model, name, state[name].detach().to(self.device))
                continue
            _set(self.model, name, torch.empty_like(state[name], device="meta", dtype=self._source_dtype[name]))


def _why_none(model: Any) -> str:
    """What to say of a model in which no experts were found."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name.rpartition(".")[2] == "experts" or re.search("Experts$|Mo[eE]$", kind):
            return f"has experts ({kind}) that transformers' experts interface does not run: not supported"
    return "has no experts: not a Mixture-of-Experts model"


def _set(model: Any, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence its progress bar ("Loading weights") and its load reports: parts are loaded dozens of times."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
