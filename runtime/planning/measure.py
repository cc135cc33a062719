"""Measure what a model takes outside its experts: on a skeleton (skeleton.py), or on the model itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from moepack.families.model_class import top_k
from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.safetensors_file import DTYPES
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.experts import backends
from moepack.runtime.kernels.forms import compiled, slice_bytes, whole_blocks

from .fixed import Activations, MeasuredNeeds, described, holds_dense
from .matrices import ranges, served_bytes
from .options import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger("moepack.runtime")
FAR = 4096  # the longest context measured has at least this many tokens: activations grow with the cache
LOOPED = 2048  # the longest context measured for models whose number of operations (0.1 ms each) grows with the context
KEPT = 8  # measurements kept in the process: one model is often planned and loaded several times


def lone_embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding] | None:
    """Return a model's input embedding and its name, if it is a plain one that nothing else in the model uses."""
    try:
        module = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # from a family without one
        return None
    if type(module) is not nn.Embedding or module.max_norm is not None or "forward" in module.__dict__:
        return None
    names = [name for name, found in model.named_modules(remove_duplicate=False) if found is module]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    storage = module.weight.untyped_storage()._cdata
    users = [name for name, tensor in tensors if tensor.untyped_storage()._cdata == storage]
    return (names[0], module) if len(names) == len(users) == 1 else None


def measure(
    bundle: Bundle,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
    dense: Sequence[Version] = (),
    own_attention: bool = False,
) -> MeasuredNeeds:
    """Measure the memory of a workload on a model's skeleton, in about ten forward passes without arithmetic.

    Args:
        dense: the versions of the bundle's dense matrices.
        own_attention: whether attention is the family's own code even where kernels could serve every layer.

    Raises:
        InputError: for a model whose forward pass does not run on a skeleton, and for a cache that cannot be coded.
    """
    model = json.dumps(plain_config(config), sort_keys=True, default=str), getattr(config, "_attn_implementation", None)
    kernels = backends.library() is not None, backends.serves_dense(), own_attention
    key = (*model, described(bundle), dtype, device.type, torch.get_num_threads(), workload, tuple(dense), kernels)
    found = _known.get(key)
    if found is None:
        try:
            found = _measure(bundle, config, dtype, device, workload, dense, own_attention)
        except InputError:  # its caches cannot be coded
            raise
        except Exception as error:  # a family whose code reads values, which a skeleton does not have
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise InputError(
                f"{bundle.path}: what its forward pass takes cannot be measured ({why}): serve it without a budget"
            ) from error
        for old in list(_known)[: 1 - KEPT]:
            _known.pop(old, None)
        _known[key] = found
    return found


_known: dict[Hashable, MeasuredNeeds] = {}


def plain_config(config: PreTrainedConfig) -> dict[str, object]:
    """Return a model's config as a dictionary, without the entry that moepack adds to it."""
    return {name: value for name, value in config.to_dict().items() if name != "quantization_config"}


def _measure(
    bundle: Bundle,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
    dense: Sequence[Version],
    own_attention: bool,
) -> MeasuredNeeds:
    from .skeleton import SHORT, Probe, latent_layers, skeleton  # which imports transformers' models

    model, mode = skeleton(config, dtype)
    layers = bundle.layers
    packed = ranges(model, bundle, dense, moves=False).packed
    own_attention |= any(
        not whole_blocks(module.qk_nope_head_dim, module.v_head_dim) or not compiled([packed[name][1]])
        for name, module in latent_layers(model)
        if name in packed
    )
    probe = Probe(model, layers, device, mode, workload.kv, own_attention)
    shape = probe.kv_shape(workload.prefill_tokens)
    size = served_bytes(model, bundle, dense, device)
    table = _in_file(model, bundle)
    maps = dense_shapes(model)
    cached = bool(shape.parts)
    probe.shorten()
    probe.headroom([SHORT], 1, cached=cached)
    short = probe.calls
    activations = 0
    kept = 0
    passes = Activations()
    tokens = workload.prefill_tokens
    batch = workload.batch
    if tokens:
        activations = probe.headroom([tokens], batch, 0, workload.all_logits, cached)[0]
        most = LOOPED if probe.calls > 1.2 * short else 1 << 40
        after = max(0, workload.kv_tokens - tokens)
        near = min(after, most // 2)
        far = min(max(2 * near, FAR), most)
        if cached:
            at = [probe.headroom([tokens, 1], batch, c, workload.all_logits) for c in (near, far)]
            corners = (at[0][1] / batch, at[1][1] / batch, at[0][0] / batch, at[1][0] / batch)
            passes = Activations((1, tokens), (near + tokens, far + tokens), corners)
        else:
            double = probe.headroom([2 * tokens], batch, 0, workload.all_logits, False)[0]
            once = activations / batch
            twice = double / batch
            passes = Activations((tokens, 2 * tokens), (0, 1), (once, once, twice, twice))
        activations = max(activations, passes.bytes(tokens, max(tokens, workload.kv_tokens), batch))
        if device.type == "cpu":
            kept = max(backends.kept_bytes(x, tokens * batch, top_k(config)) for x in layers)
            kept = max(kept, dense_arena(maps, tokens * batch))
            widths = [m.cols for x in layers for m in x.matrices]
            widths += [cols for shapes in maps for _, cols in shapes]
            kept += backends.unpacked_bytes(tokens * batch, max(widths))
        elif bundle.manifest.dense:  # dense matrices may be: whichever are
            kept = max((slice_bytes(*shape, tokens * batch) for shapes in maps for shape in shapes), default=0)
    return MeasuredNeeds(workload, shape, activations + kept, passes, kept, table, size)


def _in_file(model: PreTrainedModel, bundle: Bundle) -> int:
    """Return the bytes of an embedding that stays in its file: none where transformers converts it to another dtype."""
    lone = lone_embedding(model)
    if lone is None:
        return 0
    if not holds_dense(bundle):  # as of a bundle on the Hub, whose embedding's dtype is not known here
        return 0
    name = f"{lone[0]}.weight"
    stored = bundle.dense(check_digests=False)
    own = str(lone[1].weight.dtype).removeprefix("torch.")
    return lone[1].weight.nbytes if name not in stored or DTYPES[stored.dtype(name)][1] == own else 0


def dense_shapes(model: PreTrainedModel) -> list[list[tuple[int, int]]]:
    """Return the shapes (rows, cols) of a model's linear maps, in lists of maps that share an input."""
    together: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            key = name.rpartition(".")[0], module.in_features
            together.setdefault(key, []).append((module.out_features, module.in_features))
    return list(together.values())


def dense_arena(shapes: Sequence[Sequence[tuple[int, int]]], tokens: int) -> int:
    """Return the bytes that CPU kernels keep between calls for linear maps of `dense_shapes`."""
    return max((backends.dense_kept_bytes(some, tokens) for some in shapes), default=0)


def on_cuda(model: PreTrainedModel, layers: Sequence[ExpertLayer], device: torch.device, needs: MeasuredNeeds) -> int:
    """Run the largest requested pass on a GPU, and return what torch's allocator then takes more of it, in bytes.

    They include memory of cuBLAS and attention kernels, which the skeleton does not see, and the allocator's rounding.
    Long caches are measured only on the skeleton.
    """
    from .skeleton import Probe

    asked = needs.workload
    if not asked.prefill_tokens:
        return 0
    probe = Probe(model, layers, device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    probe.headroom([asked.prefill_tokens], asked.batch, 0, asked.all_logits, bool(needs.kv.parts))
    taken = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return max(0, taken - needs.kv.bytes(asked.prefill_tokens, asked.batch))
