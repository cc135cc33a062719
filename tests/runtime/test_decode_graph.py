"""A decode step on a GPU can be one CUDA graph: its operations are few, the same at every epoch, and wait for nothing.

No GPU is there: torch's operations and Triton's launches are recorded on a stand-in, where a graph is the record.
"""

import gc
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import fake_graph
import pytest
import torch
from graph_recorder import recording
from live_models import at, ids, load, wait_for
from support import PATIENCE, ROOT
from tiny_models import INDEXED, build_tiny
from transformers import StaticCache

from moepack.pack.errors import InputError
from moepack.runtime import decode_graph
from moepack.runtime.devices import graphs
from moepack.runtime.forward_wrapper import decode_graphs
from moepack.runtime.kernels import attend_triton
from moepack.runtime.policies.paged import PagedInPlace
from moepack.server.batching import packed_cache, row_table
from moepack.server.batching.engine import Engine, StepInput

RECIPE = """
versions: [bf16, w4, w2]
dense: [w8]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 32, batch_size: 4}
allocation: {average_bits: 4}
"""
LIVE = "hotness:hi=w4,lo=w2,prior=none,interval=0.02,rate=0,margin=0,slack=0"
PINNED = LIVE.replace("lo=w2", "lo=w2@pinned")
PAGED = "paged:lo=pinned,interval=0.02,rate=0"
ROOM, TOKENS, PASSES = 120_000, 32, 5
# The families of docs/gpu.md's table: the word for which their configuration stands, and sizes of a tiny model
FAMILIES = {
    "Qwen3-MoE": ("qwen3_moe", {"head_dim": 32}),
    "Mixtral": ("mixtral", {"head_dim": 32}),
    "gpt-oss": ("gpt_oss", {"head_dim": 32}),
    "DeepSeek-V3": ("deepseek_v3", {"first_k_dense_replace": 0, "num_hidden_layers": 2}),
    "GLM-5": (
        "glm_moe_dsa",
        {**INDEXED, "index_topk": 8, "mlp_layer_types": ["sparse"] * 2, "indexer_types": ["full", "shared"]},
    ),
    "Qwen3-Next": (
        "qwen3_next",
        {"head_dim": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Kimi-Linear": ("kimi_linear", {"num_key_value_heads": 4, "first_k_dense_replace": 0}),
    "Nemotron-H": ("nemotron_h", {}),
}
PLAIN = """
versions: [bf16, w4]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 32, batch_size: 4}
"""


def rows_of(family):
    """The rows of docs/gpu.md's table of a family: kind of layer, operations, waits, operations beside, graphs."""
    cells = (line.strip("| \n").split(" | ") for line in (ROOT / "docs" / "gpu.md").read_text().splitlines())
    return [row[1:] for row in cells if row[0] == family and len(row) == 7]


@pytest.fixture(scope="session")
def bundles(demo_model, text, made_once):
    """Bundles of tiny models, by the number of layers."""

    def bundle(layers):
        def make(folder):
            build_tiny("qwen3_moe", folder, RECIPE, demo_model, text, num_hidden_layers=layers, head_dim=32)

        return Path(made_once(f"decode-{layers}", make) / "bundle")

    return bundle


@pytest.fixture(autouse=True)
def dense_kernels(gpu, monkeypatch):
    """Norms, routers and projections by launches, which the stand-in leaves to torch."""
    monkeypatch.setenv("MOEPACK_DENSE_KERNELS", "on")
    monkeypatch.setenv(graphs.VARIABLE, "off")


@pytest.fixture
def captured(monkeypatch):
    """The graphs that are captured, by the stand-in."""
    made = []
    monkeypatch.setenv(graphs.VARIABLE, "on")
    monkeypatch.setattr(
        graphs, "capture", lambda run, device, beside: made.append(fake_graph.capture(run, device)) or made[-1]
    )
    return made


class Served:
    """A model whose versions change when a test lets them, and a static cache that holds a prompt."""

    def __init__(self, path, policy=LIVE, dense="bf16", tokens=2 * TOKENS):
        given = {"kv_tokens": tokens, "prefill_tokens": TOKENS, "dtype": torch.float32, "dense": dense}
        # Under `paged` caches take of it, too
        room = 4 * ROOM if policy == PAGED else ROOM
        self.model = load(path, policy, room=room, **given)
        if (manager := self.model.moepack.manager) is not None:
            ended = threading.Event()
            self._round, manager.worker._round = manager.worker._round, lambda now: ended.set()
            manager.worker.wake()
            assert ended.wait(PATIENCE), "a round does not end"
        self.cache = self.filled()

    def filled(self):
        cache = StaticCache(config=self.model.config, max_cache_len=TOKENS)
        self.run(ids(0, 5), cache)
        return cache

    def run(self, tokens, cache):
        with torch.no_grad():
            out = self.model(tokens, use_cache=True, cache=cache).logits
        return out

    def record(self, seed):
        tokens = ids(seed, 1)
        with recording() as made:
            self.run(tokens, self.cache)
        return made

    def promote(self):
        """Go on until an expert has another version, or under `paged` another place."""
        before, policy = self.model.moepack.versions, self.model.moepack.manager.policy
        if isinstance(policy, PagedInPlace):
            shares = policy.shares
            shares.order, policy._before = [row[::-1] for row in shares.order], []  # the others come first

        def changed():
            self._round(time.monotonic())
            return bool(self.model.moepack.versions != before)

        wait_for(changed)


@pytest.mark.parametrize("dense", ["bf16", "w8"])
def test_a_layer_is_few_operations_the_same_at_every_epoch(bundles, gpu, dense, monkeypatch):
    """Models of 2 and of 4 layers; the first step of a model shows whether its layers hand on what routers made.

    A layer asks for 2 norms, 2 sums, 3 products, the heads, a count, attention's 2; routing, experts' 2 products, their
    sum.
    """
    # As of a cache on another device than the host, whose memory is the stand-in's
    monkeypatch.setattr("moepack.runtime.residency.sequences.cached_tokens", lambda cache: None)
    counts = []
    for layers in (2, 4):
        served = Served(bundles(layers), LIVE, dense)
        assert served.model.moepack.replaced["Qwen3MoeAttention"] == layers
        served.record(1)
        seen = []
        for seed in range(3):
            made = served.record(seed)
            assert made.broken == []
            begins = made.names.index("embedding")  # before it, handles of a new epoch are copied, and counters cleared
            assert set(made.names[:begins]) <= {"copy_", "zero_", "zeros"}
            seen.append(made.names[begins:])
            served.promote()
        assert all(names == seen[0] for names in seen) and at(served.model, "w4") > 0
        counts.append(len(seen[0]))
    assert (counts[1] - counts[0]) / 2 == int(rows_of("Qwen3-MoE")[0][1]), counts


def kinds_of(model):
    """What a model's decoder layers are by their kinds, in order, with the number of each."""
    config = model.config
    kinds = getattr(config, "indexer_types", None) or getattr(config, "layer_types", None)
    return [*(kinds or ["full_attention"] * config.num_hidden_layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_operations(family, demo_model, text, made_once, gpu, captured, monkeypatch):
    """docs/gpu.md says how many operations a decode step in BF16 asks for, and which steps are replayed.

    Where a step is captured, its replays are the bits of steps without a graph.
    """
    name, extra = FAMILIES[family]
    monkeypatch.setattr("moepack.runtime.residency.sequences.cached_tokens", lambda cache: None)
    monkeypatch.setattr(attend_triton, "PROGRAMS", 4)  # the interpreter runs one after another
    monkeypatch.setattr(decode_graph, "WARM", 0)

    def make(folder):
        build_tiny(name, folder, PLAIN, demo_model, text, **extra)

    bundle = Path(made_once(f"operations-{name}", make) / "bundle")
    model = load(bundle, "static:w4", room=1 << 22, kv_tokens=4 * TOKENS, prefill_tokens=TOKENS, dtype=torch.bfloat16)
    kinds, wrapper = kinds_of(model), model._moepack_wrapper
    layers = next(m.layers for m in model.modules() if hasattr(m, "layers") and len(m.layers) == len(kinds))
    caches = [StaticCache(config=model.config, max_cache_len=TOKENS) for _ in range(2)]
    begins, ends, captures = [], [], wrapper.graphs

    def run(tokens, cache):
        with torch.no_grad():
            return model(tokens, use_cache=True, past_key_values=cache).logits

    for cache in caches:
        run(ids(0, 5), cache)
    for seed in range(2):
        wrapper.graphs = None
        want = run(ids(seed, 1), caches[0])
        wrapper.graphs = captures
        assert torch.equal(run(ids(seed, 1), caches[1]), want), seed
    static = [graph.replays for graph in captured]
    wrapper.graphs = None
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(lambda *_: begins.append((len(made.names), len(made.broken)))),
            layer.register_forward_hook(lambda *_: ends.append((len(made.names), len(made.broken)))),
        )
    ]
    with recording() as made:
        run(ids(0, 1), caches[0])
    for hook in hooks:
        hook.remove()
    # The last layer of a kind, because the first one makes what others find
    spans = list(zip(kinds, begins, ends, strict=True))
    asked = {kind: tuple(e - b for b, e in zip(begin, end, strict=True)) for kind, begin, end in spans}
    beside = len(made.names) - sum(asked[kind][0] for kind in kinds)
    assert len(made.broken) == sum(asked[kind][1] for kind in kinds), Counter(made.broken)
    wrapper.graphs = captures
    captured.clear()
    del caches
    engine = Engine(model, TOKENS)
    slots = [engine.add(TOKENS) for _ in range(2)]
    engine.run([StepInput(slot, ids(0, 5)[0].tolist()) for slot in slots])
    for seed in range(2):
        outs = []
        for slot, wrapper.graphs in zip(slots, (None, captures), strict=True):
            outs += engine.run([StepInput(slot, [5 + seed])])
        assert torch.equal(*outs), seed
    replayed = ["yes" if replays == [2] else "no" for replays in (static, [graph.replays for graph in captured])]
    found = [[kind, *map(str, count), str(beside), *replayed] for kind, count in asked.items()]
    assert rows_of(family) == found


@pytest.mark.parametrize("policy", [LIVE, PINNED, PAGED, "static:w4"])
def test_replays_are_the_steps(bundles, captured, policy):
    """The bits of the same pass without a graph, promotions between replays, counts included."""
    served = Served(bundles(2), policy)
    wrapper, other = served.model._moepack_wrapper, served.filled()
    captures, live = wrapper.graphs, policy != "static:w4"
    for seed in range(PASSES):
        tokens, wrapper.graphs = ids(seed, 1), None
        counts = served.model.moepack.manager.statistics._ended if live else []
        want = served.run(tokens, other)
        wrapper.graphs = captures
        got = served.run(tokens, served.cache)
        assert torch.equal(got, want), seed
        if live:
            eager, graph = (step.counters.counts for _, step in list(counts)[-2:])
            assert torch.equal(eager, graph) and eager.sum() == 4, seed
            served.promote()
    assert len(captured) == 1 and captured[0].replays == PASSES - decode_graph.WARM
    for mine, theirs in zip(served.cache.layers, other.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        assert mine.cumulative_length == theirs.cumulative_length == 5 + PASSES
    served.cache.layers[0].keys = served.cache.layers[0].keys.clone()  # as another order of beams does
    assert torch.equal(served.run(tokens, served.cache), served.run(tokens, other)), "a graph of other addresses ran"
    assert captured[0].replays == PASSES - decode_graph.WARM


def test_replays_of_the_servers_passes(bundles, captured, monkeypatch):
    """Two sequences of other lengths, one of which gets other memory meanwhile, and one of them alone.

    Each step is also run, without graphs, by rows of their own. Bits are the same, promotions between, counts included.
    """
    passes = decode_graph.WARM + 2
    monkeypatch.setattr(attend_triton, "PROGRAMS", 4)  # the interpreter runs one after another
    monkeypatch.setattr(packed_cache, "GRAIN", 8)
    served = Served(bundles(2), tokens=1024)
    del served.cache
    wrapper, engine = served.model._moepack_wrapper, Engine(served.model, 64)
    captures, wrapper.graphs = wrapper.graphs, None
    assert engine.at_once() == 16
    prompts = [torch.randint(1, 4096, (n,)).tolist() for n in (3, 5)]
    pairs = [[engine.add(len(p)) for p in prompts] for _ in range(2)]
    for slots in pairs:
        engine.run([StepInput(s, p) for s, p in zip(slots, prompts, strict=True)])
    rooms = []
    for step in range(2 * passes):
        some = slice(0, 2 if step < passes else 1)
        counts = served.model.moepack.manager.statistics._ended
        outs = []
        for slots, wrapper.graphs in zip(pairs, (None, captures), strict=True):
            items = [StepInput(s, [5 + step + n]) for n, s in enumerate(slots[some])]
            outs.append(torch.stack(engine.run(items)))
        assert torch.equal(*outs), step
        rooms.append([s.cache.room for s in pairs[1]])
        eager, graph = (step.counters.counts for _, step in list(counts)[-2:])
        assert torch.equal(eager, graph) and eager.sum() == 4 * len(items), step
        served.promote()
    assert rooms[0] == [8, 8] and rooms[-1][1] > 8, "no row was to get other memory"
    assert [graph.replays for graph in captured] == [2, 2]
    mine, theirs = (slots[1].cache.layers for slots in pairs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.end == b.end == 5 + passes
        assert torch.equal(a.keys[:, :, : a.end], b.keys[:, :, : b.end])
        assert torch.equal(a.values[:, :, : a.end], b.values[:, :, : b.end])
    del mine, theirs, a, b
    table = engine._table
    table.sequences = 2  # so that a pass of both is one of the most rows
    with monkeypatch.context() as refusing:
        refusing.setattr(decode_graph.DecodeGraphs, "_may", lambda *given: False)
        for _ in range(row_table.REFUSED):
            assert engine.at_once() == 2
            engine.run([StepInput(s, [5]) for s in pairs[1]])
    assert engine.at_once() is None
    engine.run([StepInput(s, [5]) for s in pairs[1]])
    assert engine.at_once() == 2, "a replay shows that it goes again"
    table.sequences = 16
    held = [weakref.ref(s.cache.layers[0].keys.untyped_storage()) for s in pairs[1]]
    for slot in [*pairs[0], *pairs[1]]:
        engine.remove(slot)
    gc.collect()
    assert [ref() for ref in held] == [None, None], "a graph holds a sequence's memory"
    assert len(captures._made) == 2, "graphs outlive sequences"
    slot, wrapper.graphs = engine.add(3), captures
    engine.run([StepInput(slot, prompts[0])])
    (made_by_graph,) = engine.run([StepInput(slot, [5])])
    assert captured[1].replays == 3
    served.model.config._attn_implementation = engine._native
    with torch.no_grad():
        want = served.model(torch.tensor([[*prompts[0], 5]])).logits[0, -1:]
    torch.testing.assert_close(made_by_graph, want, rtol=1e-4, atol=1e-5)


def test_replays_of_latents_and_states(demo_model, text, made_once, captured, monkeypatch):
    """Several sequences of latent layers through the server's table, in other orders; two in one static cache.

    Each step is also run without graphs. Beams give a static cache's states other memory, and a reset begins anew.
    """
    monkeypatch.setattr("moepack.runtime.residency.sequences.cached_tokens", lambda cache: None)
    monkeypatch.setattr(attend_triton, "PROGRAMS", 4)  # the interpreter runs one after another
    monkeypatch.setattr(packed_cache, "GRAIN", 8)
    monkeypatch.setattr(decode_graph, "WARM", 0)
    given = {"room": 1 << 22, "kv_tokens": 16 * TOKENS, "prefill_tokens": TOKENS, "dtype": torch.bfloat16}
    models = []
    for family in ("DeepSeek-V3", "Kimi-Linear"):
        name, extra = FAMILIES[family]
        made = made_once(
            f"operations-{name}", lambda f, n=name, e=extra: build_tiny(n, f, PLAIN, demo_model, text, **e)
        )
        models.append(load(Path(made) / "bundle", "static:w4", **given))
    model, hybrid = models
    wrapper, engine = model._moepack_wrapper, Engine(model, TOKENS)
    captures = wrapper.graphs
    prompts = [torch.randint(1, 4096, (n,)).tolist() for n in (1, 3, 7)]
    pairs = [[engine.add(len(p)) for p in prompts] for _ in range(2)]
    for slots in pairs:
        engine.run([StepInput(s, p) for s, p in zip(slots, prompts, strict=True)])
    for step, some in enumerate(((0, 1, 2), (2, 0, 1), (1,), (1, 2), (2, 1, 0), (0, 2))):
        outs = []
        for slots, wrapper.graphs in zip(pairs, (None, captures), strict=True):
            outs.append(torch.stack(engine.run([StepInput(slots[n], [5 + step + n]) for n in some])))
        assert torch.equal(*outs), step
    assert [graph.replays for graph in captured] == [3, 1, 2]
    captured.clear()
    wrapper = hybrid._moepack_wrapper
    captures = wrapper.graphs
    caches = [StaticCache(config=hybrid.config, max_cache_len=TOKENS) for _ in range(2)]
    for step, tokens in enumerate((4, 1, 1, 1, 1, 4, 1, 1)):
        outs = []
        for cache, wrapper.graphs in zip(caches, (None, captures), strict=True):
            if step == 3:
                cache.reorder_cache(torch.tensor([1, 1]))
            if step == 5:
                cache.reset()
            with torch.no_grad():
                x = torch.cat((ids(step, tokens), ids(step + 50, tokens)))
                outs.append(hybrid(x, use_cache=True, past_key_values=cache).logits)
        assert torch.equal(*outs), step
    assert sum(graph.replays for graph in captured) >= 4 and not captures.failures


def test_what_is_not_captured(bundles, gpu, monkeypatch):
    """Several tokens, other caches, gradients, padding; a step that cannot be captured goes on as it is."""
    monkeypatch.setenv(graphs.VARIABLE, "on")
    monkeypatch.setattr(decode_graph, "WARM", 0)
    tries = []

    def refuses(run, device, beside):
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "capture", refuses)
    served = Served(bundles(2), "static:w4")
    model, cache = served.model, served.cache
    served.run(ids(1, 2), cache)
    with torch.no_grad():
        grown = model(ids(1, 3), use_cache=True)
        model(ids(2, 1), use_cache=True, cache=grown.cache)
        model(ids(2, 1), use_cache=True, cache=cache, attention_mask=torch.ones(1, 8))
    assert not tries
    want = served.run(ids(4, 1), cache)
    assert len(tries) == 1 and want.isfinite().all()
    served.run(ids(4, 1), cache)
    assert len(tries) == 1 == model.moepack.counters()["graph_failures"], "it is not tried again at once"
    monkeypatch.setenv(graphs.VARIABLE, "yes")
    with pytest.raises(InputError, match="MOEPACK_CUDA_GRAPH=yes"):
        decode_graphs(model.moepack.layers)
