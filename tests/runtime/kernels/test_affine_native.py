"""The compiled CPU kernels against float64 at every width, group and instruction set; and against pack's weights."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from expert_layers import (
    MIXED,
    RELEASED,
    SMALL,
    TOLERANCE,
    TRELLIS,
    VERSIONS,
    activations,
    expected,
    make_layer,
    native,
    product,
    relative,
)
from support import at_once

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels import reference
from moepack.runtime.kernels.forms import handle

# Matrices of Qwen3-30B-A3B, DeepSeek-V2-Lite and gpt-oss: true columns, fewer rows; and shapes that divide nothing.
SHAPES = [(96, 2048), (64, 1408), (32, 2880), (1, 1), (17, 31), (33, 100), (65, 33), (130, 257)]
BEST = native.use_level()
LEVELS = range(min(BEST, native.LEVELS.index("avx512-vnni")) + 1)
TILES = range(native.LEVELS.index("avx512-bf16"), len(native.LEVELS))
ALL_IN_TILES = np.zeros(8, np.int64)  # limits

PACKED = [
    *(Version.of(f"w{bits}", size) for bits in (8, 4, 3, 2, 1) for size in (128, 64, 32)),
    *MIXED,
    *RELEASED,
    *SMALL,
    *TRELLIS,
    *(Version.of(f"w{bits}", 64, symmetric=True) for bits in (8, 4, 3, 2)),
    Version.of("int4fp16", 32, symmetric=True),
]


def named(version):
    return f"{version.name}-{version.bits}-{version.group_size}-{version.scale_bits}"


@pytest.mark.parametrize("level", range(BEST + 1))
@pytest.mark.parametrize("version", [Version.of("bf16"), *PACKED], ids=named)
def test_products_against_float64(version, level):
    """Every shape; one token, and as many as take all tile sizes (4 + 2 + 1)."""
    assert native.use_level(level) == level
    for k, (rows, cols) in enumerate(SHAPES):
        m = Matrix("m", rows, cols, bias=bool(k % 2))
        layer = make_layer(m, [version], [0, 0], seed=k)
        index = torch.tensor([[0], [1], [1], [1], [1], [1], [1], [1]])
        for dtype in TOLERANCE:
            x = activations(len(index), cols, dtype)
            want = expected(layer, x, index)
            for out_dtype in TOLERANCE:
                out = product(layer, x, index, dtype=out_dtype, threads=1)
                for row in (slice(0, 1), slice(1, None)):
                    assert relative(out[row], want[row]) <= TOLERANCE[out_dtype], (rows, cols, dtype, out_dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("version", PACKED, ids=named)
def test_unpacked_weights_are_packs(version, level):
    """The same numbers, as torch's of the reference are: exact in float32, rounded once in BF16."""
    native.use_level(level)
    for k, (rows, cols) in enumerate(SHAPES):
        m = Matrix("m", rows, cols, bias=True)
        layer = make_layer(m, [version], [0], seed=k)
        first = 16 if rows > 32 else 0
        for dtype in TOLERANCE:
            tile = torch.full((cols, -(-(rows - first) // 16) * 16), torch.nan, dtype=dtype)
            native.unpack(layer.forms, 0, 0, layer.extents[0], tile, first)
            want = torch.from_numpy(layer.weights[0]).float().to(dtype)
            assert torch.equal(tile.T[: rows - first], want[first:]), (rows, cols, dtype)
            if level == LEVELS[-1]:  # the reference is the same at every level
                (sections,) = reference.sections_of((m,), version)
                made = reference.dequantise(layer.extents[0], sections, m, version, dtype)
                assert torch.equal(made, want), (rows, cols, dtype)


def use_tiles(level):
    if native.use_level(level) != level:
        pytest.skip(f"{native.LEVELS[level]} is above {native.LEVELS[BEST]}, which is used here")


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize("version", [Version.of("bf16"), *PACKED], ids=named)
def test_tiles_against_float64(version, level):
    """Every shape, with slots that leave tiles and, at the last one, batches of 512 unfilled.

    Of many tokens, and of trellis codes, weights are rounded to BF16: float32 results hold to the one or the other.
    """
    use_tiles(level)
    for k, (rows, cols) in enumerate(SHAPES):
        layer = make_layer(Matrix("m", rows, cols, bias=bool(k % 2)), [version], [0, 0, 0, 0], seed=k)
        many = 530 if k == len(SHAPES) - 1 else 0
        index = torch.cat([torch.zeros(1), torch.ones(33), torch.full((17,), 2), torch.full((many,), 3)])
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(k))].long()[:, None]
        x = activations(len(index), cols, torch.bfloat16)
        exact = expected(layer, x, index)
        as_bf16 = [torch.from_numpy(w).bfloat16().double().numpy() for w in layer.weights]
        rounded = expected(replace(layer, weights=as_bf16), x, index)
        out = product(layer, x, index, ALL_IN_TILES)
        short = product(layer, x, index, ALL_IN_TILES, dtype=torch.bfloat16)
        for e in range(int(index.max()) + 1):
            mine = np.flatnonzero((index[:, 0] == e).numpy())
            for batch in (mine[:512], mine[512:]):
                got = [relative(out[batch], want[batch]) for want in (exact, rounded) if len(batch)]
                few = len(batch) <= 16 and not version.trellis
                assert min(got[: 1 if few else 2], default=0) <= 1e-5, (rows, cols, e)
        assert relative(short, exact) <= 4e-3, (rows, cols)


@pytest.mark.parametrize("level", TILES)
def test_tiles_beside_packed_bytes_and_whatever_the_threads(level):
    """Busy experts in tiles, the others not, sentinels left alone; more activations than have room at a time."""
    use_tiles(level)
    layer = make_layer(Matrix("m", 40, 14336), VERSIONS, [e % 5 for e in range(10)])
    index = torch.randint(0, 10, (500, 2), generator=torch.Generator().manual_seed(1))
    index[index == 7] = 6
    index[0], index[4, 1] = 7, 10
    x = activations(len(index), 14336, torch.bfloat16)
    want, absent = expected(layer, x, index), (index.reshape(-1) == 10).numpy()
    outs = [product(layer, x, index, np.full(5, 3), fill=7.0, threads=threads) for threads in (1, 2, 5)]
    assert (outs[0][absent] == 7).all() and relative(outs[0][~absent], want[~absent]) <= 4e-3
    few = (index.reshape(-1) == 7).numpy()
    assert few.sum() == 2 and relative(outs[0][few], want[few]) <= 1e-5
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    "versions", [VERSIONS, list({v.name: v for v in [*RELEASED, *TRELLIS]}.values())], ids=["own", "others"]
)
def test_neither_threads_nor_company_change_a_bit(versions):
    layer = make_layer(Matrix("m", 200, 300), versions, [e % len(versions) for e in range(20)])
    index = torch.randint(0, 20, (9, 4), generator=torch.Generator().manual_seed(1))
    index[2, 1] = 20  # past the last expert: nothing is written
    x = activations(9, 300, torch.bfloat16)

    one = product(layer, x, index, threads=1, fill=7)
    assert (one[9] == 7).all()
    try:
        for borrowed in (True, False):
            native.use_openmp(borrowed)
            for threads in (2, 3, 7):
                assert all(torch.equal(product(layer, x, index, threads=threads, fill=7), one) for _ in range(5))
    finally:
        native.use_openmp()
    for s, e in enumerate(index.reshape(-1).tolist()):
        if (index == e).sum() == 1:
            alone = product(layer, x[s // 4 : s // 4 + 1], index.reshape(-1)[s : s + 1], fill=7)
            assert torch.equal(alone[0], one[s])


@pytest.mark.parametrize("level", LEVELS)
def test_neither_rounds_nor_batches_change_a_bit(level):
    """Activations that fit at once, that each thread prepares for itself, and that threads prepare in rounds."""
    native.use_level(level)
    layer = make_layer(Matrix("m", 40, 14336), VERSIONS, [2, 1, 4, 0, 3, 2])
    index = torch.randint(0, 6, (45, 1), generator=torch.Generator().manual_seed(2))
    index[:20] = 0  # more slots than an expert batch or a round has room for
    x = activations(45, 14336, torch.bfloat16)
    alone = torch.cat([product(layer, x[s : s + 1], index[s : s + 1], threads=1) for s in range(45)])
    for threads in (1, 3, 20):  # 0.7 MB an activation: 20 threads cannot have four each
        assert torch.equal(product(layer, x, index, threads=threads), alone), threads


@pytest.mark.parametrize(("borrowed", "tiles"), [(True, False), (False, True)])
def test_calls_from_several_threads_at_once(borrowed, tiles):
    layer = make_layer(Matrix("m", 128, 256), VERSIONS, [e % 5 for e in range(10)])
    index = torch.arange(10).repeat(20 if tiles else 1, 1)
    x = activations(len(index), 256, torch.bfloat16 if tiles else torch.float32)
    if tiles and not native.has_tiles(x.dtype):
        pytest.skip("this processor does not multiply BF16")
    limits = ALL_IN_TILES if tiles else None
    want = product(layer, x, index, limits, threads=1)

    def work(_):
        for _ in range(50):
            assert torch.equal(product(layer, x, index, limits, fill=0, threads=2), want)

    try:
        native.use_openmp(borrowed)
        at_once(work, 3)
    finally:
        native.use_openmp()


def end_in(seconds):
    """End a child that hangs in the kernels, where no handler of Python's would run."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def test_after_a_fork_the_child_has_threads_of_its_own():
    layer = make_layer(Matrix("m", 300, 256), VERSIONS, [0, 1, 2, 3, 4])
    x, index = activations(1, 256, torch.float32), torch.arange(5)[None]
    native.use_openmp(False)
    try:
        first = product(layer, x, index, threads=2)
        if (child := os.fork()) == 0:
            end_in(20)
            same = all(torch.equal(product(layer, x, index, threads=2), first) for _ in range(20))
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        native.use_openmp()


def test_a_fork_while_another_thread_has_the_arena():
    """Its lock is then held in the child by nobody: what waits for it would wait for ever."""
    layer = make_layer(Matrix("m", 256, 2048), VERSIONS, [e % 5 for e in range(8)])
    index = torch.randint(0, 8, (256, 2), generator=torch.Generator().manual_seed(0))
    x, stop = torch.randn(256, 2048), threading.Event()

    def busy():
        while not stop.is_set():
            product(layer, x, index)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(8):
            if (child := os.fork()) == 0:
                end_in(5)
                native.release()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_combine(dtype):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(12, 1300, generator=generator).to(dtype)
    y[5] = torch.nan  # a sentinel's row was never written
    index = torch.arange(12).reshape(4, 3) % 11
    index[1, 2] = 12
    gates = torch.rand(4, 3, generator=generator)
    out = torch.empty(4, 1300, dtype=dtype)
    native.combine(y, index, gates, 12, out)
    weights = gates.clone()
    weights[1, 2] = 0
    want = (y.nan_to_num().double().view(4, 3, -1) * weights[..., None].double()).sum(1)
    assert relative(out, want.numpy()) <= TOLERANCE[dtype]


def test_what_does_not_fit_is_refused():
    layer = make_layer(Matrix("m", 20, 64), VERSIONS, [1, 2])
    x, index, out = torch.zeros(2, 64), torch.tensor([[0], [1]]), torch.empty(2, 20)
    table = layer.table
    for bad in (
        (table, x[:, :32], index, out),
        (table, x, index, out[:1]),
        (table, x, index.int(), out),
        (table, x.half(), index, out),
        (table, x, index, torch.empty(20, 2).T),
        (table.astype(np.int64), x, index, out),
        (table, torch.zeros(3, 64), index, out),
    ):
        with pytest.raises(ValueError, match="m:"):
            native.product(layer.forms, 0, *bad)
    with pytest.raises(ValueError, match="do not fit"):
        native.unpack(layer.forms, 0, 1, layer.extents[0], torch.empty(64, 20))
    with pytest.raises(ValueError, match="multiple of 64"):
        handle(8, 0)


@pytest.mark.parametrize("level", sorted({LEVELS[-1], BEST}))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_forward_is_the_fallbacks(bundle, dtype, tokens, level, monkeypatch):
    """Few tokens and many, in all versions, with tiles of our own and torch's product: what a machine without a
    compiler computes. BF16 rounds three times."""
    import moepack
    from moepack.runtime.attach import load_map
    from moepack.runtime.experts import cpu
    from moepack.runtime.experts.forward import reference_forward
    from moepack.runtime.experts.handles import LayerCall

    native.use_level(level)
    model = moepack.load(bundle, dtype=dtype, policy="static:w2")
    module = model.model.layers[1].mlp.experts
    names = [("bf16", "w4", "w3", "w2", "w1")[e % 5] for e in range(16)]
    experts = load_map(model.moepack.bundle, (tuple(names),) * 4, [torch.device("cpu")] * 4)[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 128, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(17, generator=generator)[:4] for _ in range(tokens)])
    index[: tokens // 2, 0] = 3  # one busy expert
    gates = torch.rand(tokens, 4, generator=generator).to(dtype)

    def compare():
        call = LayerCall(module, experts.current, x, index, gates)
        want = reference_forward(call).double().numpy()
        assert relative(cpu.forward(call), want) <= (1e-5 if dtype == torch.float32 else 1e-2)

    with torch.inference_mode():
        compare()
        call = LayerCall(module, experts.current, x, index, gates)
        assert torch.equal(cpu.forward(call), cpu.forward(call))
        before, other = experts.current.table.copy(), model.model.layers[1].mlp.experts._moepack.current.handles[0]
        experts.publish(0, other)
        changed = experts.current.table != before
        assert changed.tolist() == [True] + [False] * 15
        compare()
        if tokens == 1:  # an expert that a token chooses twice has more slots than there are tokens
            index[0, 1] = index[0, 2] = 3
            monkeypatch.setattr(cpu.backends, "direct_limits", lambda *_: np.ones(len(experts.of.versions), np.int64))
            compare()


def test_without_the_extension_the_fallback_serves(bundle):
    """The fault: a module that imports the compiled kernels wherever it is imported."""
    code = (
        "import sys\n"
        "sys.modules['moepack.runtime.kernels.affine_native'] = None\n"
        "import moepack, moepack.server.http.app, torch\n"
        f"model = moepack.load({str(bundle)!r}, dtype=torch.float32, policy='static:w3')\n"
        "assert model.model.layers[0].mlp.experts._moepack.of.backend == 'reference'\n"
        "assert model(torch.arange(1, 20)[None]).logits.isfinite().all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
