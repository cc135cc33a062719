"""The skeleton of a checkpoint's model on the meta device: the place of each tensor, and the bytes that reading takes.

It reads headers and runs transformers' renaming rules. stream.py loads weights.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.families.layouts import conversions_of
from moepack.pack.errors import InputError
from moepack.pack.spec import Version

from .accounting import FLOATS, MTP, account
from .checkpoint import Checkpoint, native_version, source_dtype
from .experts import describe, is_experts_module, parameter_names

if TYPE_CHECKING:
    from transformers.utils.loading_report import LoadStateDictInfo

    from moepack.families.interface import ExpertsModule

# Bytes of experts or MTP layers that are read at once; reading takes up to three times these bytes.
AT_ONCE = 1 << 29
Parts = dict[str, range | None]  # checkpoint weight -> a range of its first axis; None is the whole weight


class Skeleton:
    """A checkpoint's model without weights. A part is a decoder layer's index, or None for all else.

    Raises InputError for a model without experts or of an unknown layout, or a missing tensor.
    """

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        # Whether the checkpoint has an output projection of its own although config.json ties it to the embeddings: the
        # checkpoint's is served, as by transformers, and the bundle's config.json says so.
        self.untied = False
        self._make()
        if self._separate():
            self.untied = True
            self.checkpoint = checkpoint.untied()
            self._make()
        if separate := self._separate():
            raise InputError(f"{checkpoint.name}: {separate[0]} is not the tensor to which its model ties it")
        self._materialise_buffers()

    def _make(self) -> None:
        from moepack.families.model_class import check_top_k, meta_model

        name = self.checkpoint.name
        config = self.checkpoint.config
        self.model = meta_model(config, name)
        self.model.eval()
        experts = {n: m for n, m in self.model.named_modules() if is_experts_module(m)}
        if not experts:
            raise InputError(f"{name}: {config.model_type} {_why_none(self.model)}")
        stacks = {(m[1], int(m[2])) if (m := re.match(r"(.*?)\.(\d+)\.", n)) else None for n in experts}
        if None in stacks or len({place[0] for place in stacks if place}) != 1:
            raise InputError(f"{name}: experts of {config.model_type} are not in one stack of decoder layers")
        if len(stacks) != len(experts):
            raise InputError(f"{name}: layers of {config.model_type} have several sets of experts: not supported")
        self.prefix = next(place[0] for place in stacks if place)
        self.layers = self.model.get_submodule(self.prefix)  # a ModuleList
        # A folder for files that hold a loaded layer's expert matrices, mapped and on the CPU, if the layout lets them
        # be read some at a time. None keeps them in memory.
        self.experts_in: Path | None = None
        self._experts = {int(n[len(self.prefix) + 1 :].split(".")[0]): n for n in experts}
        # By layer index, of layers with experts.
        self.expert_layers = {i: describe(i, n, experts[n]) for i, n in sorted(self._experts.items())}
        check_top_k(config, max(layer.experts for layer in self.expert_layers.values()), f"{name}: its config.json")
        self._plan()

    def _plan(self) -> None:
        """Find each checkpoint tensor's target, and give each meta parameter its dtype in the checkpoint."""
        state = self.model.state_dict()
        plan = self.model._get_dtype_plan(torch.bfloat16)
        in_float32 = {name for name in state if any(re.search(pattern, name) for pattern in plan)}
        self._compute_dtype = {name: torch.float32 if name in in_float32 else torch.bfloat16 for name in state}
        self.ledger = account(self.checkpoint, self.model, self._mapping(), len(self.layers))
        self._targets = self.ledger.targets
        self._source_dtype = {name: tensor.dtype for name, tensor in state.items()} | self.ledger.dtypes
        self._sources: dict[int | None, list[str]] = {}  # part -> the checkpoint's weights
        for target, keys in self._targets.items():
            self._sources.setdefault(self.layer_of(target), []).extend(keys)
        # Names of the checkpoint's weights for multi-token prediction, and of others that the model lacks.
        self.mtp = [key for key, why in self.ledger.left_out.items() if why == MTP]
        self.unused = sorted(self.ledger.left_out.keys() - set(self.mtp))
        self._merged = {target for target, keys in self._targets.items() if len(keys) > 1}
        expert_sources: list[str] = []
        for name in self._experts.values():
            for weight, _ in parameter_names(self.model.get_submodule(name)).values():
                expert_sources += self._targets.get(f"{name}.{weight}", [])
        if not expert_sources:
            raise InputError(f"{self.checkpoint.name}: no tensor of the checkpoint belongs to an expert")
        self.expert_dtype = source_dtype(self.checkpoint, expert_sources)  # in the checkpoint, one of EXPERT_DTYPES
        self._native_sources = expert_sources
        for name, dtype in self.ledger.dtypes.items():
            set_tensor(self.model, name, torch.empty_like(state[name], dtype=dtype))
        self._bytes: dict[int | None, dict[str, int]] = {}  # by part and name, in the checkpoint's dtypes
        for name, tensor in state.items():
            if name not in self.model.all_tied_weights_keys:
                size = tensor.numel() * self._source_dtype[name].itemsize
                self._bytes.setdefault(self.layer_of(name), {})[name] = size

    def _separate(self) -> list[str]:
        ties = self.model.all_tied_weights_keys
        made = self.ledger.targets
        return [k for k, target in self.ledger.ties.items() if not self.checkpoint.same(k, made.get(ties[target], ()))]

    def _mapping(self) -> list[Any]:  # transformers types its loader's argument more narrowly than its own mapping
        from transformers.conversion_mapping import get_model_conversion_mapping

        return [*get_model_conversion_mapping(self.model), *conversions_of(self.model)]

    def _convert(self, sources: Mapping[str, object]) -> LoadStateDictInfo:
        """Load tensors, by the names of the checkpoint's weights, into the model; returns transformers' report."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        with quiet_transformers():
            config = LoadStateDictConfig(dtype=None, device_map={"": "cpu"}, weight_mapping=self._mapping())
            info: LoadStateDictInfo
            info, _ = convert_and_load_state_dict_in_model(self.model, dict(sources), config)
        return info

    def _apart(
        self,
        load: Callable[[], LoadStateDictInfo],
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype | None = None,
    ) -> tuple[dict[str, Tensor], LoadStateDictInfo]:
        meta = {name: self.model.get_parameter_or_buffer(name) for name in shapes}
        try:
            for name, whole in meta.items():
                set_tensor(self.model, name, torch.empty(*shapes[name], dtype=dtype or whole.dtype, device="meta"))
            info = load()
            got = {name: self.model.get_parameter_or_buffer(name).detach() for name in meta}
        finally:
            for name, whole in meta.items():
                set_tensor(self.model, name, whole)
        lacks = info.mismatched_keys or info.conversion_errors or any(tensor.is_meta for tensor in got.values())
        return ({} if lacks else got), info

    def convert_apart(self, sources: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor | None:
        """The parameter of this shape that int64 tensors in place of weights make; None if they do not."""
        return self._apart(lambda: self._convert(sources), {name: shape}, torch.int64)[0].get(name)

    def _materialise_buffers(self) -> None:
        """Compute rotary tables and other buffers that are not in checkpoints."""
        for module in self.model.modules():
            names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
            for n in names:
                module._buffers[n] = torch.empty_like(module._buffers[n], device=self.device)
            if names:
                with torch.no_grad():
                    self.model._init_weights(module)

    @property
    def native(self) -> Version:
        """The version that keeps the experts as released. Raises InputError if no version does."""
        return native_version(self.checkpoint, self._native_sources)

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The dtype of experts after loading."""
        return FLOATS.get(self.expert_dtype, torch.bfloat16)

    def experts_module(self, layer: int) -> ExpertsModule:
        """The experts module of a decoder layer."""
        module = self.model.get_submodule(self._experts[layer])
        assert is_experts_module(module)
        return module

    def is_low_precision(self, parameter: str) -> bool:
        """Whether transformers computes with a parameter in BF16 instead of float32."""
        return self._compute_dtype[parameter] == torch.bfloat16

    def layer_of(self, name: str) -> int | None:
        """The decoder layer's index in a name; None outside the layers."""
        match = re.match(re.escape(self.prefix) + r"\.(\d+)\.", name)
        return int(match[1]) if match else None

    def names(self, part: int | None) -> list[str]:
        """Names of a part's parameters and persistent buffers, except tied ones."""
        return list(self._bytes.get(part, ()))

    def dense_names(self, part: int | None) -> list[str]:
        """Names of a part's tensors without its experts' matrices and biases."""
        own = set(self._expert_parameters(part)) if part in self._experts else set()
        return [name for name in self.names(part) if name not in own]

    def dense_size(self, layer: int) -> tuple[int, int]:
        """The sums of the rows and of the weights of a layer's Linears, without the experts'."""
        found = [m for m in self.layers[layer].modules() if isinstance(m, torch.nn.Linear)]
        return sum(m.out_features for m in found), sum(m.weight.numel() for m in found)

    def part_bytes(self, part: int | None) -> int:
        """Bytes of a part in memory after loading."""
        return sum(self._bytes.get(part, {}).values())

    def file_bytes(self, part: int | None) -> int:
        """Return the bytes of a part's expert matrices, which are on disk if `experts_in` is set."""
        if part is None or not self.expert_ranges(part):
            return 0
        sizes = self._bytes[part]
        matrices = (n for n in self._expert_parameters(part) if self.model.get_parameter_or_buffer(n).ndim > 2)
        return sum(sizes[name] for name in matrices)

    def loading_bytes(self, part: int | None, on_disk: bool = False) -> int:
        """Upper bound of the bytes that loading a part takes: tensors, mapped pages and copies.

        `on_disk` says whether `experts_in` will be set.
        """
        sizes = dict(self._bytes.get(part, {}))
        ranges = self.expert_ranges(part)
        if part is None or not ranges:
            return self._read_bytes(sizes)
        few = len(ranges[0])
        all_of_them = self.expert_layers[part].experts
        experts = {name: sizes.pop(name) for name in self._expert_parameters(part)}
        kept = sum(experts.values())
        read = self._read_bytes(experts) * few // all_of_them
        if on_disk:  # only the range written last is in memory
            kept -= self.file_bytes(part) * (all_of_them - few) // all_of_them
        return kept + max(read, self._read_bytes(sizes))

    def _read_bytes(self, sizes: Mapping[str, int]) -> int:
        merged = [size for name, size in sizes.items() if name in self._merged]
        return 2 * sum(sizes.values()) + sum(merged) // 2 + max(merged, default=0)

    def expert_ranges(self, part: int | None) -> list[range]:
        """Split a layer's experts into ranges of about AT_ONCE bytes, read together; empty if all are read at once."""
        if part is None or part not in self._experts:
            return []
        experts = self.expert_layers[part].experts
        sizes = self._bytes[part]
        each = sum(sizes[name] for name in self._expert_parameters(part)) // experts
        step = max(1, AT_ONCE // max(1, each))
        if step >= experts or self._expert_parts(part, range(1)) is None:
            return []
        return [range(a, min(a + step, experts)) for a in range(0, experts, step)]

    @property
    def mtp_bytes(self) -> int:
        """Bytes of the tensors of the MTP layers, decoded."""
        return sum(self.checkpoint.weight_bytes(name) for name in self.mtp)

    @property
    def mtp_loading_bytes(self) -> int:
        """Upper bound of the bytes allocated while reading MTP layers: tensors, mapped pages, a decoded tensor."""
        largest = max((self.checkpoint.weight_bytes(name) for name in self.mtp), default=0)
        return 2 * min(self.mtp_bytes, AT_ONCE + largest) + 2 * largest

    def weights_of(self, parameter: str) -> tuple[str, ...]:
        """The checkpoint's weights that a parameter or buffer is made of."""
        return tuple(self._targets.get(parameter, ()))

    def _own_sources(self, names: Sequence[str]) -> list[str] | None:
        """The checkpoint weights of these tensors, one for each, of equal shape; None if the layout differs."""
        found = [self._targets.get(name, []) for name in names]
        if any(len(keys) != 1 for keys in found):
            return None
        shapes = [tuple(self.model.get_parameter_or_buffer(name).shape) for name in names]
        keys = [key for (key,) in found]
        return keys if all(tuple(self.checkpoint.shape(k)) == s for k, s in zip(keys, shapes, strict=True)) else None

    def _expert_parameters(self, layer: int) -> list[str]:
        prefix = self._experts[layer]
        module = self.experts_module(layer)
        return [f"{prefix}.{p}" for pair in parameter_names(module).values() for p in pair if p is not None]

    def _expert_parts(self, layer: int, some: range) -> Parts | None:
        sources = {name: self._targets.get(name, []) for name in self._expert_parameters(layer)}
        shapes = {key: self.checkpoint.shape(key) for keys in sources.values() for key in keys}
        return sources_of(some, self.expert_layers[layer].experts, sources, shapes)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bar and load reports: a build loads dozens of parts."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def set_tensor(model: torch.nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer of a model."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value


def sources_of(
    experts: range, total: int, sources: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]]
) -> Parts | None:
    """The weights to read for `experts` of a layer that has `total`; None for an unknown layout.

    A family stores a tensor for each expert, or all experts along the first axis of one tensor. `sources` maps a
    parameter of the layer's experts to its weights in the checkpoint, `shapes` a weight to its stored shape.
    """
    out: Parts = {}
    for keys in sources.values():
        numbers = _numbers(total, tuple(keys))
        part: Parts | None = None
        if numbers is not None:
            part = {key: None for key, number in numbers.items() if number in experts}
        elif keys and all(len(shapes[k]) > 1 and shapes[k][0] == total for k in keys):
            part = dict.fromkeys(keys, experts)
        if part is None:
            return None
        out |= part
    return out


@lru_cache(maxsize=4)  # a layer's, for one expert after another
def _numbers(total: int, keys: tuple[str, ...]) -> dict[str, int] | None:
    """The expert of each key; None unless one place in the names counts from 0 to `total` - 1."""
    split = [re.split(r"(?<=\.)(\d+)(?=\.)", key) for key in keys]  # every second part is a number
    if not split or len({len(parts) for parts in split}) != 1:
        return None
    every = set(range(total))
    places = [i for i in range(1, len(split[0]), 2) if {int(parts[i]) for parts in split} == every]
    if not places or (len(places) > 1 and total > 1):  # in layer 0 a single expert has two places of 0
        return None
    named: dict[tuple[str, ...], set[int]] = {}  # the other parts of a name -> its numbers
    for parts in split:
        at = places[0]
        named.setdefault((*parts[:at], *parts[at + 1 :]), set()).add(int(parts[at]))
    if any(numbers != every for numbers in named.values()):
        return None
    return {key: int(parts[places[0]]) for key, parts in zip(keys, split, strict=True)}


def _why_none(model: torch.nn.Module) -> str:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name.rpartition(".")[2] == "experts" or re.search("Experts$|Mo[eE]$", kind):
            return f"has experts ({kind}) that transformers' experts interface does not run: not supported"
    return "has no experts: not a Mixture-of-Experts model"
