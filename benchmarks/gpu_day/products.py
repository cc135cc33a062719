"""The experts' kernels: whether each is exact, and how long a layer takes."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels import gpu
from benchmarks.kernels.layers import module_like
from moepack.pack.spec import Matrix, Version
from moepack.runtime.experts.forward import reference_forward
from moepack.runtime.experts.gpu import forward
from moepack.runtime.experts.handles import LayerCall
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
    layer = gpu.layer_like(matrices, version, experts, setting.torch, alike=False)
    torch.manual_seed(0)  # the roundings of one token came to 0.008 to 0.010, as it was drawn
    x = torch.randn(tokens, hidden, device=setting.torch).to(dtype)
    index = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(setting.torch)
    gates = torch.rand(tokens, top_k, device=setting.torch)
    module = module_like()
    with torch.inference_mode():
        got = forward(LayerCall(module, layer, x, index, gates)).double()
        want = reference_forward(LayerCall(module, layer, x.float(), index, gates)).double()
    return Measured(float((got - want).norm() / want.norm()), "relative error", limit=LIMITS[dtype])


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
