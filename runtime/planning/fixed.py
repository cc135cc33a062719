"""M_fixed: what a served model takes of its device that is no expert and does not change (dynaexq, section 3.3).

Dense tensors, the KV cache that was asked for, room for a forward pass's activations, the staging buffer. Measured on a
skeleton (skeleton.py), the same for `load`, which holds it back, and for `moepack plan`, which foretells it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import ExpertLayer
from moepack.runtime.experts import backends
from moepack.runtime.planning.options import Workload

from .config import TOP_K
from .kv_cache import KvShape

log = logging.getLogger("moepack.runtime")
FAR = 4096  # tokens of context at which what a longer cache adds to activations is measured, at the least
LOOPED = 2048  # the longest context that is run where operations grow in number with it (0.1 ms each)


@dataclass(frozen=True, slots=True)
class Fixed:
    """M_fixed by its parts, in bytes.

    Attributes:
        dense: parameters and buffers outside the experts.
        kv: the cache that was asked for.
        activations: the most that a forward pass takes beside weights and cache.
        staging: the buffer that versions pass through on their way into their blocks.
        window: what experts are decoded into while their layer runs, where a policy pages them.
    """

    dense: int
    kv: int = 0
    activations: int = 0
    staging: int = 0
    window: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.dense + self.kv + self.activations + self.staging + self.window

    def __str__(self) -> str:
        parts = ((n, getattr(self, n)) for n in ("dense", "kv", "activations", "staging", "window"))
        return f"{self.total} bytes outside the experts: " + ", ".join(
            f"{n} {size}" for n, size in parts if size or n != "window"
        )


@dataclass(frozen=True, slots=True)
class Activations:
    """What a forward pass takes beside weights and cache, as bilinear in its tokens and in the cache's length.

    Attributes:
        passes, lengths: the tokens of two passes and two lengths of the cache after them, where it was measured.
        corners: bytes there, for one sequence: both lengths with the first pass, then with the second.
    """

    passes: tuple[int, int] = (1, 2)
    lengths: tuple[int, int] = (1, 2)
    corners: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def bytes(self, tokens: int, length: int, batch: int = 1) -> int:
        """Bytes of a pass of `tokens` tokens that leaves caches of `length` tokens."""
        x = (tokens - self.passes[0]) / max(1, self.passes[1] - self.passes[0])
        y = (length - self.lengths[0]) / max(1, self.lengths[1] - self.lengths[0])
        a, b, c, d = self.corners
        return max(0, int(batch * ((1 - x) * ((1 - y) * a + y * b) + x * ((1 - y) * c + y * d))))


@dataclass(frozen=True, slots=True)
class MeasuredNeeds:
    """What was measured for a workload.

    Attributes:
        workload: the workload.
        kv: how a sequence's cache grows.
        activations: bytes of the largest pass asked for, at the longest cache asked for.
        passes: those of other passes.
        kept: of the bytes for activations, what kernels keep between passes, and what weights are unpacked or converted
            to in parts; they come on top of `passes`.
    """

    workload: Workload
    kv: KvShape
    activations: int
    passes: Activations
    kept: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache asked for."""
        return self.kv.bytes(self.workload.kv_tokens, self.workload.batch)

    def beside(self, tokens: int, length: int, batch: int) -> int:
        """Bytes that a pass takes beside weights and caches: one as large as asked for, what is held back."""
        asked = self.workload
        if not asked.prefill_tokens:
            return 0
        takes = self.kept + self.passes.bytes(tokens, length, batch)
        within = tokens <= asked.prefill_tokens and length <= max(asked.kv_tokens, asked.prefill_tokens)
        return min(takes, self.activations) if within and batch <= asked.batch else takes


def dense_bytes(model: Any, layers: Sequence[ExpertLayer] = ()) -> int:
    """Bytes of a model's parameters and buffers, tied ones once; without the experts of `layers`."""
    from .skeleton import EXPERT_PARAMETERS

    modules = [model.get_submodule(layer.module) for layer in layers]
    skipped = {id(m._parameters[n]) for m in modules for n in EXPERT_PARAMETERS if m._parameters.get(n) is not None}
    held = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in skipped]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


def measure(
    bundle: Bundle, config: Any, dtype: torch.dtype, device: torch.device, workload: Workload
) -> tuple[MeasuredNeeds, int]:
    """Measure a workload on the skeleton of a model; about ten forward passes without arithmetic.

    Returns:
        what it takes, and the bytes of the skeleton's dense tensors.

    Raises:
        InputError: for a model whose forward pass does not run on a skeleton.
    """
    layers = tuple(bundle.layers)
    same = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    model = json.dumps(same, sort_keys=True, default=str), getattr(config, "_attn_implementation", None)
    key = (*model, dtype, device.type, layers, torch.get_num_threads(), workload)
    found = _known.get(key)
    if found is None:
        try:
            found = _measure(config, dtype, device, layers, workload)
        except Exception as error:  # a family whose code looks at values, which a skeleton does not have
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise InputError(
                f"{bundle.path}: what its forward pass takes cannot be measured ({why}): serve it without a budget"
            ) from error
        for old in list(_known)[: 1 - KEPT]:
            _known.pop(old, None)
        _known[key] = found
    return found


KEPT = 8  # measurements: the same model is often planned for, and loaded again
_known: dict[Any, tuple[MeasuredNeeds, int]] = {}


def _measure(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    layers: Sequence[ExpertLayer],
    workload: Workload,
) -> tuple[MeasuredNeeds, int]:
    from .skeleton import Probe, skeleton  # which imports transformers' models

    model, mode = skeleton(config, dtype)
    probe = Probe(model, layers, device, mode)
    shape = probe.kv_shape()
    short, cached = probe.calls, bool(shape.parts)
    activations, kept, passes = 0, 0, Activations()
    tokens, batch = workload.prefill_tokens, workload.batch
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
            once, twice = activations / batch, double / batch
            passes = Activations((tokens, 2 * tokens), (0, 1), (once, once, twice, twice))
        activations = max(activations, passes.bytes(tokens, max(tokens, workload.kv_tokens), batch))
        if device.type == "cpu":
            kept = max(arena_bytes(x, tokens * batch, top_k(config)) for x in layers)
            kept = max(kept, dense_arena(model, tokens * batch))
            widths = [m.cols for x in layers for m in x.matrices]
            widths += [m.in_features for m in model.modules() if type(m) is torch.nn.Linear]
            kept += backends.unpacked_bytes(tokens * batch, max(widths))
    return MeasuredNeeds(workload, shape, activations + kept, passes, kept), dense_bytes(model, layers)


def top_k(config: Any) -> int:
    """Experts of a token, by its config's names for it."""
    text = config.get_text_config()
    return int(next((k for name in TOP_K if (k := getattr(text, name, None))), 8))


def arena_bytes(layer: ExpertLayer, tokens: int, top_k: int) -> int:
    """Bytes that the CPU kernels keep between calls: by shapes, tokens and threads alone, whichever of them run."""
    return backends.kept_bytes(layer, tokens, top_k)


def dense_arena(model: Any, tokens: int) -> int:
    """The same of a model's linear maps, those that may share an input together."""
    together: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            key = name.rpartition(".")[0], module.in_features
            together.setdefault(key, []).append((module.out_features, module.in_features))
    return max((backends.dense_kept_bytes(shapes, tokens) for shapes in together.values()), default=0)


def on_cuda(model: Any, layers: Sequence[ExpertLayer], device: torch.device, needs: MeasuredNeeds) -> int:
    """Bytes that the allocator takes at the peak of the largest pass asked for, run on a GPU: libraries' own included.

    The skeleton does not see what cuBLAS and attention kernels take for themselves. Long caches are left to it.
    """
    from .skeleton import Probe

    asked = needs.workload
    if not asked.prefill_tokens:
        return 0
    probe = Probe(model, layers, device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    probe.headroom([asked.prefill_tokens], asked.batch, 0, asked.all_logits, bool(needs.kv.parts))
    taken = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return max(0, taken - needs.kv.bytes(asked.prefill_tokens, asked.batch))
