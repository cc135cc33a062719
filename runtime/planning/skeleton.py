"""Measure the memory of forward passes beside weights on a model's skeleton: tensors that have shapes and no memory.

The skeleton is the real transformers model, built and run under torch's FakeTensorMode. Each family's own code makes
cache and temporaries, in about a second and without memory. On the ten families of the test suite the storages equal
those of a real forward pass on a CPU, to the byte. Memory that a torch operation uses inside is not seen, except for
attention on a CPU, for which it is known.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.integrations.moe import ExpertsInterface

from moepack.families.arguments import attends_by_name, cache_in, with_cache
from moepack.families.model_class import model_of
from moepack.pack.spec import ExpertLayer, Matrix, align
from moepack.runtime.experts import backends
from moepack.runtime.kernels.by_torch import FLOATS, attend_by_groups, bytes_beside
from moepack.runtime.kv.forms import PLAIN_KV
from moepack.runtime.kv.growing import layer_bits, new_cache
from moepack.runtime.kv.latents import MAP, SHARE_BF16, LatentSizes, heads_at_once
from moepack.runtime.kv.sizes import cache_bytes, sliding_window, storages

from .fixed import KvShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

IMPLEMENTATION = "moepack-probe"
SHORT = 8  # tokens; a cache's bytes a token are measured between this length and twice this length


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from the operation that makes them until they are freed, except those of `model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0  # live bytes, and the most at one time
        self.calls = 0  # operations so far
        self._held = [*model.parameters(), *model.buffers()]  # kept alive, so that no new storage gets their identity
        self._seen: dict[int, object] = {t.untyped_storage()._cdata: None for t in self._held}

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation and count the storages it returns, and those of numbers that it reads from coded rows."""
        with self:  # which counts nothing within its own dispatch
            args, kwargs = _numbers((args, kwargs))
        out: object = _of_all(function, args)
        if out is None:
            out = function(*_without_masks(function, args), **(kwargs or {}))
        self.calls += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._follow(storage, storage._cdata, storage.nbytes())
        if function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.peak = max(self.peak, self.now + _packed(*args[:3]))
        return out

    def _follow(self, storage: torch.UntypedStorage, key: int, size: int) -> None:
        def gone(_: object) -> None:
            self.now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _numbers(x: Any) -> Any:
    """Return the numbers that coded rows in an operation's arguments stand for; anything else as it is."""
    kernels = sys.modules.get("moepack.runtime.kernels.kv_rows")  # without it nothing is coded
    return x if kernels is None else tree_map(kernels.plain, x)


def _of_all(function: object, args: tuple[Any, ...]) -> Tensor | None:
    """Return the places of non-zero values, if an operation asks for them: all, because a skeleton has no values."""
    if function is not torch.ops.aten.nonzero.default or not isinstance(args[0], FakeTensor):
        return None
    return args[0].new_zeros(args[0].numel(), args[0].ndim, dtype=torch.int64)


def _without_masks(function: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operation's arguments. A mask by which it picks elements picks all: a skeleton has no values."""
    if function is not torch.ops.aten.index.Tensor:
        return args
    picked: list[Tensor | None] = []
    for at in args[1]:
        if isinstance(at, FakeTensor) and at.dtype == torch.bool:
            picked += [at.new_zeros(at.numel(), dtype=torch.int64) for _ in range(at.ndim)]
        else:
            picked.append(at)
    return (args[0], picked, *args[2:])


def _packed(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes into which attention on a CPU packs keys and values, once for every head of the query."""
    if query.element_size() != 2:
        return 0
    return query.shape[0] * query.shape[1] * key.shape[2] * (key.shape[3] + value.shape[3]) * key.element_size()


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make the plain model of a bundle's config, with tensors on the device meta."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = model_of(config, dtype=dtype)
    return model


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, FakeTensorMode]:
    """Build the model of a config without memory; return the model and the mode under which to run it."""
    model: Any = on_meta(config, dtype)  # not in `mode`: some models convert modules as they make them, which it cannot
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        _fill(model)
        plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if any(re.search(pattern, name) for pattern in plan):  # loading keeps this tensor in float32
                tensor.data = tensor.data.float()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)  # "dynamic" and "longrope" read values, which positions lack here
        if isinstance(kind, str):
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")
    return model.eval(), mode


def _fill(model: Any) -> None:
    """Replace a meta model's tensors by ones of the current mode on the CPU; shared tensors stay shared."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, so that no other gets its identity
    for module in model.modules():
        for own in (module._parameters, module._buffers, vars(module)):
            for name, tensor in own.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    if id(tensor) not in made:
                        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        made[id(tensor)] = tensor, torch.nn.Parameter(new, False) if is_parameter else new
                    own[name] = made[id(tensor)][1]


class Probe:
    """Runs a model with stand-in experts that allocate as real ones do, without weights; `calls` counts operations."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[ExpertLayer],
        device: torch.device,
        mode: FakeTensorMode | None = None,
        kv: str = PLAIN_KV,
        own: bool = False,
    ) -> None:
        """Prepare a model on `device`, or with `mode` a skeleton that stands for a model on `device`.

        `kv` is the form of caches (kv/forms.py). Attention takes what the kernels' does, or what the family's `own`
        code does.
        """
        self.model: Any = model
        self.calls = 0
        self._window = 0
        self._mode: AbstractContextManager[object] = nullcontext() if mode is None else mode
        self._on = torch.device("cpu") if mode is not None else device
        kind = backends.backend(device)
        self._bits = layer_bits(model, kv, kind == "native")
        for layer in layers:
            module: Any = model.get_submodule(layer.module)
            module._moepack_probe = layer, kind
        served = mode is not None and kind == "native" and backends.serves_dense() and not own
        if served:
            self._as_served()
        # A GPU's attention copies no keys for one token either.
        self._stands_in = served or (mode is not None and kind == "triton")

    def _as_served(self) -> None:
        """Let attention take what the kernels' does, and not what the family's own code does."""
        for _, module in latent_layers(self.model):
            if module._modules[MAP].weight.dtype in FLOATS:  # else its own code runs
                module.expand_kv = functools.partial(_unexpanded, module)
        for module in self.model.modules():
            if getattr(module, "num_key_value_groups", 1) > 1 and _attends_by_sdpa(module):
                module.num_key_value_groups = 1  # so that keys reach `_ServedAttention` uncopied

    def kv_shape(self, tokens: int = SHORT) -> KvShape:
        """Measure how a sequence's cache grows; a model without a cache has a shape without parts.

        `tokens` are those of the largest pass: behind it a layer with a window still holds all of them.
        """
        with self._running() as live:
            cache = self._forward(None, SHORT)
            self.calls = live.calls
            if cache is None:
                return KvShape()
            short = list(storages(cache).values())
            double = list(storages(self._forward(None, 2 * SHORT)).values())  # of one pass, which no window cuts
            far = None
            self._window = window = sliding_window(cache)
            if window:
                far, further = (self._held(window + n * SHORT, max(tokens, SHORT)) for n in (2, 3))
        if len(short) != len(double):
            raise ValueError("a cache whose number of tensors changes with its length")
        parts: list[tuple[int, int, int | None]] = []
        for i, (a, b) in enumerate(zip(short, double, strict=True)):
            slope = (b - a) // SHORT
            cap = far[i] if far is not None and slope and far[i] == further[i] else None
            parts.append((a - slope * SHORT, slope, cap))
        return KvShape(tuple(parts))

    def _held(self, context: int, tokens: int) -> list[int]:
        """Return the bytes of a cache's storages after a pass of `tokens` tokens behind `context` others."""
        cache = self._forward(None, context)
        self._forward(cache, tokens)
        return list(storages(cache).values())

    def shorten(self) -> None:
        """Leave out decoder layers that repeat earlier ones: what passes take beside caches stays the same.

        The shortest beginning stays in which each kind of layer is twice, or as often as it is. Passes over 48 layers
        of one kind so take a tenth of the time. Layers stay in a model with windows, whose caches shrink in a pass, or
        with another state than keys and values: passes may ask a certain layer whether they are the first.
        """
        config = self.model.config.get_text_config()
        if self._window or not {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}:
            return
        holds = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 2]
        layers = next((m for m in holds if len(m) == getattr(config, "num_hidden_layers", 0)), None)
        if layers is None:
            return
        kinds = [_kind(layer) for layer in layers]
        needed = 0
        for kind in set(kinds):
            needed = max(needed, *[i + 1 for i, other in enumerate(kinds) if other == kind][:2])
        del layers[needed:]

    def headroom(
        self, passes: Sequence[int], batch: int, context: int = 0, all_logits: bool = False, cached: bool = True
    ) -> list[int]:
        """Measure the peak bytes, beside weights and caches, of each of several passes over the same cache.

        A pass has `passes[i]` tokens of each of `batch` sequences; at first the cache holds `context` tokens. A pass
        returns the logits of every token if `all_logits`, else of the last; there is a cache if `cached`.
        """
        out = []
        with self._running() as live:
            cache = self._forward(None, context, batch) if context else None
            for tokens in passes:
                live.peak = live.now
                live.calls = 0
                cache = self._forward(cache, tokens, batch, all_logits, cached)
                out.append(max(0, live.peak - cache_bytes(cache)))
            self.calls = live.calls
        return out

    def _forward(
        self, cache: Cache | None, tokens: int, batch: int = 1, all_logits: bool = False, cached: bool = True
    ) -> Any:
        ids = torch.zeros(batch, tokens, dtype=torch.long, device=self._on)
        if cache is None and cached and self._bits:
            cache = new_cache(self.model, self._bits)
        some = {} if cache is None else with_cache(self.model, cache)
        if not all_logits and self.model._supports_logits_to_keep():
            some["logits_to_keep"] = 1
        out = self.model(input_ids=ids, use_cache=cached, **some)
        return cache_in(out)

    @contextmanager
    def _running(self) -> Iterator[LiveBytes]:
        """Replace the model's experts by stand-ins and count storages inside the context."""
        named = (getattr(module, "config", None) for module in self.model.modules())
        configs = {id(c): (c, c._experts_implementation_internal) for c in named if c is not None}
        try:
            for config, _ in configs.values():
                config._experts_implementation_internal = IMPLEMENTATION
            attention: AbstractContextManager[object] = _ServedAttention() if self._stands_in else nullcontext()
            # Not inference mode, in which composite operations are not decomposed.
            with self._mode, torch.no_grad(), attention, LiveBytes(self.model) as live:
                yield live
        finally:
            for config, before in configs.values():
                config._experts_implementation_internal = before


def _kind(layer: torch.nn.Module) -> tuple[object, ...]:
    """Return a key of a decoder layer's modules, plain settings (except the layer's number) and shapes."""
    found: list[object] = []
    for name, module in layer.named_modules():
        settings = vars(module).items()
        plain: dict[str, Any] = {k: v for k, v in settings if isinstance(v, str | int | float | list | tuple | None)}
        plain["layer_idx"] = None
        if (probe := plain.pop("_moepack_probe", None)) is not None:
            found.append((probe[0].experts, probe[0].matrices))
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        found.append((name, type(module), *sorted(map(repr, plain.items()))))
        found += [(n, t.shape, t.dtype) for n, t in tensors]
    return tuple(found)


def latent_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attention modules that make keys and values from latents and attend by "sdpa", and their maps' names."""
    for name, module in model.named_modules():
        if hasattr(type(module), "expand_kv") and MAP in module._modules and _attends_by_sdpa(module):
            yield f"{name}.{MAP}", module


def _attends_by_sdpa(module: Any) -> bool:
    """Whether a module asks transformers' table for its attention function, and gets "sdpa"."""
    config = getattr(module, "config", None)
    return attends_by_name(module) and getattr(config, "_attn_implementation", None) == "sdpa"


def _unexpanded(module: Any, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shapes of keys and values of all heads, which take no memory (`_ServedAttention`)."""
    batch, _, length, rotated = turned.shape
    sizes = LatentSizes(latent.shape[3], rotated, module.qk_nope_head_dim, module.v_head_dim)
    heads = module._modules[MAP].out_features // (sizes.first + sizes.second)
    nothing = torch.empty(1, dtype=turned.dtype, device=turned.device)
    keys: Any = nothing.expand(batch, heads, length, sizes.first + rotated)
    keys._moepack_latents = sizes, type(latent) not in (Tensor, FakeTensor)
    return keys, nothing.expand(batch, heads, length, sizes.second)


class _ServedAttention(TorchFunctionMode):
    """Allocates what served attention does for keys of `_unexpanded` (dense/latent.py), and keys that heads share."""

    def __torch_function__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch's, or allocate in its place."""
        given = dict(kwargs or {})
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            latents = getattr(key, "_moepack_latents", None)
            if latents is not None:
                return _over_latents(query, key.shape[2], *latents)
            mask = given.get("attn_mask")
            if mask is None and query.shape[2] == 1 and query.dtype == torch.bfloat16:
                return query.new_empty(*query.shape[:3], value.shape[3])  # by the kernel, from keys where they are
            if query.shape[1] != key.shape[1] and not given.get("enable_gqa"):
                if mask is not None:
                    return attend_by_groups(query, _numbers(key), _numbers(value), mask)
                given["enable_gqa"] = True
        return function(*args, **given)


def _over_latents(query: Tensor, length: int, sizes: LatentSizes, coded: bool) -> Tensor:
    """Allocate the most that either way of attention takes; return a result, [batch, heads, tokens, second]."""
    batch, heads, tokens, _ = query.shape
    item = query.element_size()
    expanded = sizes.expanded_bytes(batch * length, item)
    some = heads_at_once(heads, expanded)
    packed = 2 * batch * length * sizes.wide * item  # by torch's kernel, of a head's keys and values
    copied = 0  # numbers of coded latents beside a copy of their codes, or several sequences' latents in one matrix
    if coded or batch > 1:
        copied = batch * length * (sizes.rank + sizes.rotated) * (item + 2 * coded)
    by_heads = some * (expanded + packed) + copied + bytes_beside(batch * length, sizes.rank)
    by_heads += batch * tokens * heads * sizes.second * item  # results of some heads, before they are joined
    absorbed = 0
    if tokens <= sizes.most_absorbed(SHARE_BF16):
        absorbed = batch * tokens * heads * (sizes.first + 2 * sizes.rank + sizes.second) * item
    beside = query.new_empty(max(by_heads, absorbed), dtype=torch.uint8)
    out = query.new_empty(batch, heads, tokens, sizes.second)
    del beside
    return out


def probe_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Allocate as `experts_forward` does if all tokens choose the same expert, which takes the most memory.

    Arguments and result are those of `experts_forward`; the result's values are undefined.
    """
    layer, kind = module._moepack_probe
    tokens, top_k = top_k_index.shape
    x = hidden if hidden.dtype in (torch.float32, torch.bfloat16) else hidden.float()
    # of a GPU's sort, 12 bytes a slot and as many a block
    out = torch.empty_like(x)
    order = top_k_index.new_empty(tokens * top_k * (2 if kind == "triton" else 1))
    h = _product(x, layer.matrices[0], tokens, top_k, kind)
    h = (module._apply_gate(h) if module.has_gate else module.act_fn(h)).contiguous()
    y = _product(h, layer.matrices[1], tokens, top_k, kind)
    del h
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y.to(x.dtype))
    if kind not in ("native", "triton"):
        out = (y * top_k_weights.reshape(-1, 1)).view(tokens, top_k, -1).sum(dim=1)
    del order
    return out.to(hidden.dtype)


def _product(x: Tensor, m: Matrix, tokens: int, top_k: int, kind: str) -> Tensor:
    """Allocate a product's result [slots, rows], and beside it one expert's tokens, results and unpacked weights.

    On a CPU with kernels this is the most that any kernel takes, so that plans do not depend on the instruction set.
    measure.py counts the memory in which these kernels unpack weights.
    """
    out = x.new_empty(tokens * top_k, m.rows)
    if kind == "triton":
        width = align(m.cols, 128)
        terms = 1 if x.dtype == torch.bfloat16 else 3
        # what `arrange` makes: activations in BF16 numbers, and sums of groups, which have 16 columns at the least
        beside = [x.new_empty(terms, len(x), width, dtype=torch.bfloat16), x.new_empty(width // 16, len(x)).float()]
        return out
    beside = [x.new_empty(tokens, m.cols), x.new_empty(tokens, m.rows)]
    if kind != "native":
        beside += [x.new_empty(m.rows, m.cols), x.new_empty(m.rows, m.cols, dtype=torch.float32)]
    return out


ExpertsInterface.register(IMPLEMENTATION, probe_experts)
