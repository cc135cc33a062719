"""Packed passes: every family's answers are those of plain transformers; rows hold the bytes that they report."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny_models import save_tiny

from benchmarks.families import small
from moepack.families.arguments import with_cache
from moepack.families.model_class import auto_class
from moepack.runtime.experts import backends
from moepack.runtime.kv.growing import layer_bits, new_cache
from moepack.runtime.kv.sizes import storages
from moepack.server.batching import packed_cache
from moepack.server.batching.engine import CacheSlot, Engine, StepInput
from moepack.server.batching.packed_cache import Alike, CacheShape, NotPackable, PackedKvCache, windows_of

NEW, STEP = 12, 16
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.0, "long_mscale": 1.2,
}  # fmt: skip
LENGTHS = (3, 40, 17, 1)
PACKED = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_next", "jamba")


def model_of(family, folder, **extra):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(save_tiny(family, folder / family, dtype=torch.float32, **extra)).eval()


def prompts_of(lengths=LENGTHS):
    torch.manual_seed(1)
    return [torch.randint(1, 4096, (n,)).tolist() for n in lengths]


def answers(engine, prompts, apart=2, chunk=STEP):
    """Greedy answers. Each sequence joins `apart` steps after the one before it; prompts are read in chunks."""
    tokens, logits = [list(p) for p in prompts], [[] for _ in prompts]
    slots = [None] * len(prompts)
    step = 0
    while any(len(row) < NEW for row in logits):
        items, who = [], []
        for n, row in enumerate(logits):
            if step < apart * n or len(row) == NEW:
                continue
            slot = slots[n] = slots[n] or engine.add(len(prompts[n]), prompt=len(prompts[n]))
            part = tokens[n][slot.length : slot.length + chunk]
            items.append(StepInput(slot, part, int(slot.length + len(part) == len(tokens[n]))))
            who.append(n)
        step += 1
        for n, found in zip(who, engine.run(items), strict=True):
            if found is not None:
                logits[n].append(found[0])
                tokens[n].append(int(found[0].argmax()))
                if len(logits[n]) == NEW:
                    engine.remove(slots[n])
    return [(row[len(p) :], torch.stack(x)) for row, p, x in zip(tokens, prompts, logits, strict=True)]


def plain_answers(model, prompts, kv="16"):
    out = []
    for prompt in prompts:
        caches = {} if kv == "16" else with_cache(model, new_cache(model, layer_bits(model, kv)))
        made = model.generate(
            torch.tensor([prompt]), **caches, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        )  # fmt: skip
        out.append((made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)))
    return out


def check(engine, wanted, atol=5e-6):
    """See that an engine's answers are these, and its logits within rounding."""
    for (tokens, logits), (right, plain) in zip(answers(engine, prompts_of()), wanted, strict=True):
        assert tokens == right
        torch.testing.assert_close(logits, plain, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("kv", ["16", "8", "k8v4"] if backends.library() else ["16"])
@pytest.mark.parametrize("family", PACKED)
def test_answers_are_those_of_plain_transformers(family, kv, tmp_path):
    """Windows and sinks (gpt_oss), latents (deepseek), states (qwen3_next, jamba): logits differ by rounding alone.

    With codes rounding may move a code to the next one.
    """
    model = model_of(family, tmp_path)
    wanted = plain_answers(model, prompts_of(), kv)
    engine = Engine(model, STEP)
    engine._kv = layer_bits(model, kv)
    check(engine, wanted, 5e-6 if kv == "16" else 5e-3)
    assert engine.is_packed


@pytest.mark.parametrize(
    ("family", "extra", "why"),
    (
        # has its own cache
        ("minimax", {"layer_types": ["linear_attention", "full_attention"]}, "states of their own"),
        ("phimoe", {"rope_parameters": LONGROPE}, "longrope"),
        ("jamba", {}, "its policy reads attention weights"),
    ),
)
def test_what_cannot_be_packed_is_served_one_by_one(family, extra, why, tmp_path, caplog):
    """A prompt in several passes too: Jamba's scan goes on from its state."""
    model = model_of(family, tmp_path, **extra)
    wanted = plain_answers(model, prompts_of())
    if "policy" in why:
        policy = SimpleNamespace(needs=SimpleNamespace(importance=True))
        manager = SimpleNamespace(policy=policy, waited=0.0)
        model.moepack = SimpleNamespace(manager=manager, caches=None, kv=(), budget_bytes=None)
    engine = Engine(model, STEP)
    assert not engine.is_packed and why in str(engine.why_not_packed)
    assert "each has forward passes of its own" in caplog.text
    check(engine, wanted, 1e-2)  # minimax sums the parts of its linear attention in another order


def test_a_prompt_in_several_passes_is_one_prompt():
    """To layers that keep a prompt and a window of the answer (unlimited_ocr): as in a single pass of it."""
    torch.manual_seed(0)
    config = small("unlimited_ocr")
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    wanted = plain_answers(model, prompts_of())
    check(Engine(model, STEP), wanted)


def test_a_model_that_changes_its_cache_is_found_out(tmp_path, monkeypatch):
    """Planted: an attention that doubles its keys after its cache. The first pass fails; then each sequence has one."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as code

    model = model_of("qwen3_moe", tmp_path)
    forward = code.ALL_ATTENTION_FUNCTIONS.get_interface

    def doubled(name, default):
        inner = forward(name, default)
        return lambda module, q, k, v, *a, **given: inner(module, q, 2 * k, v, *a, **given)

    interface = type(code.ALL_ATTENTION_FUNCTIONS)
    monkeypatch.setattr(interface, "get_interface", lambda _, name, default: doubled(name, default))
    wanted = plain_answers(model, prompts_of())
    engine = Engine(model, STEP)
    with pytest.raises(NotPackable, match="changes what its cache returns"):
        answers(engine, prompts_of())
    assert not engine.is_packed
    check(engine, wanted)


def test_attention_that_sees_more_than_its_cache_keeps_is_found_out(tmp_path):
    """As in qwen3_omni_moe_thinker: the configuration has a window, so caches have, and no layer's attention does."""
    model = model_of("qwen3_moe", tmp_path, sliding_window=16, use_sliding_window=True)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    engine = Engine(model, STEP)
    with pytest.raises(NotPackable, match="sees all keys"):
        answers(engine, prompts_of())
    check(engine, plain_answers(model, prompts_of()))


@pytest.mark.parametrize(("family", "windows"), (("qwen3_moe", [None, None]), ("gpt_oss", [32, None])))
def test_rows_say_what_they_hold(family, windows, tmp_path, monkeypatch):
    """Held bytes are exact after every step; within a step, and predicted, they are never fewer than what lives."""
    model = model_of(family, tmp_path)
    assert windows_of(model.config) == windows
    heads, dim = 2, 16
    token = 2 * heads * dim * 4  # keys and values in float32
    shape = CacheShape(tuple(Alike(2, token // 2, window) for window in windows))
    engine = Engine(model, STEP)
    engine._rows = rows = PackedKvCache(windows, shape, STEP)
    moved = packed_cache._moved

    def watched(*given):
        made = moved(*given)
        parts = [(p.keys, p.values) for row in slots for p in row.layers]
        assert sum(storages([*parts, (made, made)]).values()) <= rows.held_bytes
        return made

    monkeypatch.setattr(packed_cache, "_moved", watched)
    slots = [rows.add(n) for n in (20, 3)]
    places = [CacheSlot(row) for row in slots]
    for step in range(90):
        items = [StepInput(place, [5] * (STEP if n == 0 and step < 2 else 1)) for n, place in enumerate(places)]
        after = rows.after(items)
        engine.run(items)
        held = sum(storages([(p.keys, p.values) for row in slots for p in row.layers]).values())
        assert held <= rows.held_bytes <= after
        assert held == rows.held_bytes or family == "gpt_oss"  # a window's memory grows when it is full
        assert all(row.length <= row.room < row.length + 160 for row in slots)
    engine._rows.remove(slots[0])
    assert rows.held_bytes == shape.bytes(slots[1].room, STEP)


def test_a_cache_is_gone_when_its_last_row_is(tmp_path):
    """Without a garbage collection: the budget counts it while it lives."""
    engine = Engine(model_of("qwen3_moe", tmp_path), STEP)
    gc.collect()
    gc.disable()
    try:
        slot = engine.add(4)
        engine.run([StepInput(slot, [1, 2, 3])])
        left = weakref.ref(engine._rows)
        engine.remove(slot)
        assert left() is None
    finally:
        gc.enable()
