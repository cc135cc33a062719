"""The experts' kernels: whether each is exact, and how long a layer takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.kernels import gpu
from benchmarks.kernels.layers import module_like, random_matrix
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.experts.forward import reference_forward
from moepack.runtime.experts.gpu import forward
from moepack.runtime.experts.handles import LayerCall, LayerExperts, Snapshot
from moepack.runtime.kernels.affine_triton import TERMS

from .bundles import VERSIONS
from .rows import Entry, Measured, Rows, Setting

LIMITS = {torch.bfloat16: 0.01, torch.float16: 2e-3, torch.float32: 1e-4}  # relative errors of two rounded products
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BATCHES = (1, 4, 16, 512, 2048)
INTERPRETED = ("bf16", "w4-128", "mxfp4-32")  # forms that are tried without a GPU
SMALL = (256, 128, 8, 2)  # hidden, inner, experts, top_k: numbers as divisible as a real layer's, so the same kernels


# --- whether they are exact


def exact(setting: Setting) -> Rows:
    """A row a form, dtype and tile: a small layer against plain torch."""
    from benchmarks.resources import BIASED, FORMS

    out: Rows = {}
    cases = [(f, False) for f in FORMS] + [(f, True) for f in BIASED]
    for dtype in TERMS:  # BF16 first: time may end
        for (name, group), bias in cases:
            form = f"{name}-{group}" if group else name
            for tile, tokens in zip(("decode", "prefill"), (1, 320), strict=True):
                tried = form in INTERPRETED and tile == "decode" and dtype == torch.bfloat16 and not bias
                label = f"exact, {form}{' with biases' * bias}, {NAMES[dtype]}, {tile}"
                work = partial(error, setting, Version.of(name, group), dtype, tokens, bias)
                out[label] = Entry(work, on_cpu=tried)
    return out


def error(setting: Setting, version: Version, dtype: torch.dtype, tokens: int, bias: bool) -> Measured:
    """The relative error of a layer's forward, in the norm."""
    hidden, inner, experts, top_k = SMALL
    matrices = Matrix("gate_up", 2 * inner, hidden, bias=bias), Matrix("down", hidden, inner, bias=bias)
    layer = _layer(matrices, version, experts, setting.torch)
    torch.manual_seed(0)  # the roundings of one token came to 0.008 to 0.010, as it was drawn
    x = torch.randn(tokens, hidden, device=setting.torch).to(dtype)
    index = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(setting.torch)
    gates = torch.rand(tokens, top_k, device=setting.torch)
    module = module_like()
    with torch.inference_mode():
        got = forward(LayerCall(module, layer, x, index, gates)).double()
        want = reference_forward(LayerCall(module, layer, x.float(), index, gates)).double()
    return Measured(float((got - want).norm() / want.norm()), "relative error", limit=LIMITS[dtype])


def _layer(matrices: tuple[Matrix, ...], version: Version, experts: int, device: torch.device) -> Snapshot:
    """Experts like trained ones: scales of one size, zero points about the middle, biases."""
    if version.plain:
        return gpu.layer_like(matrices, version, experts, device, 0)
    made = LayerExperts(ExpertLayer(0, "experts", experts, matrices), [version], device)
    rng = np.random.default_rng(0)
    for e in range(experts):
        drawn = [random_matrix(m, version.at(i), rng) for i, m in enumerate(matrices)]
        biases = [rng.integers(0x3D00, 0x3E00, m.rows).astype(np.uint16) if m.bias else None for m in matrices]
        parts = [replace(d, bias=b) for d, b in zip(drawn, biases, strict=True)]
        extent = np.zeros(version.resident_size(matrices), np.uint8)
        version.restore(matrices, version.encode(matrices, parts)[0], extent)
        room = torch.empty(len(extent) + 64, dtype=torch.uint8, device=device)
        there = room[-room.data_ptr() % 64 :][: len(extent)].copy_(torch.from_numpy(extent))
        made.publish(e, made.of.over(version, there))
    return made.current


# --- how long a layer takes


def layers(setting: Setting) -> Rows:
    """A row a version and batch, of Qwen3-30B-A3B's layer, as a graph; a run's experts take over 4 times the L2."""
    out = {}
    for name, version in VERSIONS.items():
        for tokens in BATCHES:
            tried = name == "w4" and tokens in (1, 16)
            out[f"layer, {name}, {tokens} tokens"] = Entry(partial(layer, setting, version, tokens), on_cpu=tried)
    return out


def layer(setting: Setting, version: Version, tokens: int) -> Measured:
    """Microseconds of a layer's forward, routing to weighted sum."""
    sizes = (128, 32, 4, 2) if setting.small else (2048, 768, 128, 8)
    row = gpu.measure(sizes, version, tokens, 3 if setting.small else 20, setting.torch, setting.cache)
    return Measured(row.pop("ours us"), "us", more=row)
