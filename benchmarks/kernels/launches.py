"""The launches that the runtime makes on a GPU, as it makes them, on tensors without memory: nothing is launched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from benchmarks.kernels.layers import module_like
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.experts import gpu
from moepack.runtime.experts.handles import LayerCall
from moepack.runtime.kernels import (
    affine_triton,
    attend_triton,
    delta_triton,
    exponent_triton,
    latent_triton,
    step_triton,
    switch_triton,
)
from moepack.runtime.kernels.delta_native import DeltaSizes, DeltaWeights, Lies
from moepack.runtime.kernels.forms import Norm, Routing, make_forms
from moepack.runtime.kernels.routing_triton import Tally, route

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, arguments, named arguments
# Qwen3-30B-A3B's layers
HIDDEN = 2048
INNER = 768
EXPERTS = 128
TOP_K = 8
# its attention
HEADS = 32
KEYS = 4
SIZE = 128
ROUTERS = {  # Qwen3's, DeepSeek-V3's, and the largest
    "softmax": Routing(TOP_K, normed=True),
    "sigmoid": Routing(TOP_K, "sigmoid", True, 2.5, True, 8, 4, "two"),
    "many": Routing(16, "top"),
}


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """Keep launches of Triton's kernels instead of making them."""
    kept: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: object, warmup: object, **named: Any) -> None:
        kept.append((kernel, args, named))

    with (
        patch.object(JITFunction, "run", run),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(affine_triton, "capability", lambda device: 8),  # of no GPU
    ):
        yield kept


def version_of(name: str, group: int) -> Version:
    """A version by its name, behind which `/8` stands for scales of a byte."""
    name, _, scale_bits = name.partition("/")
    return Version.of(name, group, scale_bits=int(scale_bits or 16))


def experts(name: str, group: int, dtype: torch.dtype, tokens: int, bias: bool) -> list[Launch]:
    """Of one layer's experts in one version, without a router's launch."""
    matrices = (Matrix("gate_up", 2 * INNER, HIDDEN, bias=bias), Matrix("down", HIDDEN, INNER, bias=bias))
    module = module_like()
    if bias:
        type(module)._apply_gate = lambda self, x: x[:, : x.shape[1] // 2]
    with FakeTensorMode(), launched() as kept:
        index, gates = (torch.zeros(tokens, TOP_K, dtype=d, device="cuda") for d in (torch.int64, dtype))
        table = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
        layer: Any = SimpleNamespace(
            layer=ExpertLayer(0, "experts", EXPERTS, matrices),
            device_table=lambda: table,
            served=[0],
            in_place=None,
            staged=None,
            forms={name: make_forms(matrices, version_of(name, group))},
        )
        layer.of = layer
        gpu.forward(LayerCall(module, layer, torch.zeros(tokens, HIDDEN, dtype=dtype, device="cuda"), index, gates))
    return kept


def products(made: list[Launch]) -> list[Launch]:
    """The launches among these that multiply."""
    return [launch for launch in made if "GATED" in launch[2]]


def dense(name: str, group: int, tokens: int) -> list[Launch]:
    """Of one matrix beside the experts."""
    matrix = Matrix("weight", HIDDEN, HIDDEN)
    version = Version.of(name, group)
    with FakeTensorMode(), launched() as kept, patch.object(torch.Tensor, "data_ptr", lambda self: 0):
        x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        extent = torch.zeros(version.resident_size((matrix,)), dtype=torch.uint8, device="cuda")
        affine_triton.dense(matrix, make_forms((matrix,), version)[0], extent, x, torch.empty_like(x))
    return kept


def switches(ladder: tuple[tuple[str, int], ...], dtype: torch.dtype, bias: bool) -> list[Launch]:
    """Of one layer's products for few tokens, whose experts have any of a ladder's versions."""
    matrices = (Matrix("gate_up", 2 * INNER, HIDDEN, bias=bias), Matrix("down", HIDDEN, INNER, bias=bias))
    versions = [make_forms(matrices, version_of(*of)) for of in ladder]
    with FakeTensorMode(), launched() as kept:
        table = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
        words = torch.zeros(TOP_K, affine_triton.DECODE.tokens, dtype=torch.int32, device="cuda")
        geometry = affine_triton.Geometry(words, words[:, 0], words[:, 0], words[:, 0], affine_triton.DECODE.tokens)
        for m, (matrix, forms) in enumerate(zip(matrices, zip(*versions, strict=True), strict=True)):
            x = torch.zeros(1 if m == 0 else TOP_K, matrix.cols, dtype=dtype, device="cuda")
            gated = m == 0 and not bias
            out = x.new_empty(TOP_K, matrix.rows >> gated)
            switch_triton.switched(matrix, forms, range(len(ladder)), table, geometry, x, out, gated)
    return kept


def decoders() -> dict[str, Launch]:
    """Of entropy-coded matrices: those of a list, and of experts that have slots (two launches), by a name."""
    out: dict[str, Launch] = {}
    with FakeTensorMode(), launched() as kept:
        zeros = partial(torch.zeros, device="cuda")
        expert = zeros(TOP_K, dtype=torch.int32)
        coded = zeros(EXPERTS, dtype=torch.int64)
        for what, biases, given in (("", False, expert), (" with biases", True, expert), (" of a prompt", False, None)):
            layer = exponent_triton.CodedLayer(
                zeros(EXPERTS, 2, exponent_triton.PLACES, dtype=torch.int64),
                zeros(EXPERTS, 2, 256).to(torch.uint16),
                coded,
                zeros(EXPERTS, 1024, dtype=torch.int32),
                zeros(EXPERTS, 4096, dtype=torch.uint8),
                expert,
                (2 * INNER * HIDDEN // 8192, 1024),
                biases,
            )
            exponent_triton.decode_chosen(
                layer, given, expert if given is not None else expert.new_zeros(EXPERTS), coded
            )
            out[f"bytes brought{what}"], out[f"choice{what}"] = kept[-2:]
        words = coded, expert, expert
    del out["bytes brought with biases"]  # the same as without
    named = {"K": exponent_triton.TILES, "num_warps": exponent_triton.TILES}
    return {"decoder": (exponent_triton._decode, words, named), **out}


def beside(dtype: torch.dtype) -> Iterator[tuple[str, list[Launch]]]:
    """What a decode step launches between products: a name, and its launches."""
    zeros = partial(torch.zeros, dtype=dtype, device="cuda")

    def routing(form: Routing, tokens: int, count: int) -> None:
        table = zeros(count, dtype=torch.int64)
        bias = zeros(count, dtype=torch.float32) if form.biased else None
        tally = Tally(torch.zeros_like(table), zeros(count, dtype=torch.float64), zeros(tokens, dtype=torch.int64))
        route(form, table, affine_triton.DECODE.tokens, zeros(tokens, count), bias, tally=tally)

    def attention(size: int, masked: bool) -> None:
        cache = zeros(1, KEYS, 4096, size)
        length = zeros(1, dtype=torch.int64)
        mask = zeros(1, 1, 1, 4096) if masked else None
        query = zeros(1, HEADS, 1, size)
        if attend_triton.takes(query, cache, cache, mask):
            attend_triton.attend(query, cache, torch.empty_like(cache), length, mask, size**-0.5)

    def rows() -> torch.Tensor:
        return zeros(attend_triton.FIELDS, attend_triton.SEQUENCES.value, dtype=torch.int64)

    def of_rows(size: int, sinks: bool) -> None:
        key = zeros(1, KEYS, 4, size)
        query = zeros(1, HEADS, 4, size)
        if attend_triton.takes_rows(query, key, key):
            own = zeros(HEADS) if sinks else None
            attend_triton.attend_rows(query, KEYS, rows(), size**-0.5, 128 if sinks else None, own)
        attend_triton.append(key, torch.empty_like(key), rows())

    def latents(heads: int, way: str) -> None:
        rank, rotated = 512, 64  # DeepSeek-V3's
        query = zeros(1, heads, rank), zeros(1, heads, rotated)
        if way == "rows":
            latent_triton.attend_rows(*query, rows(), SIZE**-0.5)
            return
        cache = zeros(1, 1, 4096, rank), zeros(1, 1, 4096, rotated)
        mask = zeros(1, 1, 1, 4096, dtype=torch.bool) if way == "masked" else None
        latent_triton.attend(*query, *cache, zeros(1, dtype=torch.int64), mask, SIZE**-0.5)

    def delta(shared: int, sigmoid: bool) -> None:
        sizes = DeltaSizes(16, shared, SIZE, SIZE, 4)
        own = {} if sigmoid else {"scale": zeros(16 * shared), "bias": zeros(16 * shared)}
        weights = DeltaWeights(zeros(*sizes.window), zeros(SIZE), 1e-6, sigmoid, **own)
        rule = delta_triton.GpuDelta(sizes, [Lies(0, 0, 0)] * (5 if sigmoid else 6), weights)
        states = zeros(1, *sizes.state, dtype=torch.float32)
        logs = zeros(1, 1, 16 * shared, SIZE, dtype=torch.float32) if sigmoid else None
        rule.run([zeros(1, 1, sizes.window[0])], zeros(1, *sizes.window), states, logs)

    def heads(normed: bool, placed: str) -> None:
        keys = zeros(1, KEYS, 4096, SIZE)
        place = zeros(1, dtype=torch.int64)
        own = Norm(zeros(SIZE), 0, 1e-6) if normed else None
        x = zeros(1, (HEADS + 2 * KEYS) * SIZE)
        angles = zeros(1, SIZE)
        static = (keys, torch.empty_like(keys), place) if placed else None
        step_triton.rotate(x, angles, angles, (HEADS, KEYS), (own, own), place=rows() if "rows" in placed else static)

    def norm(cols: int) -> None:
        step_triton.norm(zeros(1, cols), zeros(cols), 0, 1e-6)

    def total() -> None:
        switch_triton.summed(zeros(TOP_K, HIDDEN), zeros(1, TOP_K), zeros(TOP_K, dtype=torch.int32), dtype)

    sizes = ((1, 128), (1, 512), (4, 128), (16, 512))
    choices = (False, True)
    ways: dict[str, Callable[[], None]] = {"of experts": total}
    ways |= {f"{n} {t}x{c}": partial(routing, form, t, c) for n, form in ROUTERS.items() for t, c in sizes}
    ways |= {f"{n}{' masked' * m}": partial(attention, n, m) for n in (64, 128, 256) for m in choices}
    ways |= {f"{n} of rows{' with sinks' * s}": partial(of_rows, n, s) for n in (64, 128, 256) for s in choices}
    ways |= {f"latents of {n} {w}": partial(latents, n, w) for n in (16, 128) for w in ("full", "masked", "rows")}
    ways |= {"Qwen3-Next": partial(delta, 2, False), "Kimi-Linear": partial(delta, 1, True)}
    places = ("", " placed", " placed in rows")
    ways |= {f"heads{' normed' * n}{p}": partial(heads, n, p) for n in choices for p in places}
    ways |= {f"{cols}": partial(norm, cols) for cols in (2048, 7168)}
    for name, way in ways.items():
        with FakeTensorMode(), launched() as kept:
            way()
        yield name, kept
