"""Kept states of linear attention, Mamba and short convolutions: where, who goes on from them, and room."""

import random
import threading
import time

import pytest
import torch
from arithmetic import said
from kept_prompts import MOST, STEP, SYSTEM, model_of, read, scheduled
from live_models import wait_for
from support import PATIENCE
from tiny_models import WITH_STATES

from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.server.batching.engine import Engine, StepInput
from moepack.server.batching.packed_cache import Alike, CacheShape, PackedKvCache

FAMILIES = ("qwen3_next", *WITH_STATES)


def states_of(engine, prompt):
    """After how many chunks of a prompt the states are kept."""
    prefixes = engine._rows.prefixes
    return [n for n, chunk in enumerate(prefixes.find(engine.keys(prompt)), 1) if prefixes.states(chunk) is not None]


def tensors_of(engine):
    """The bytes of all kept tensors, and of all rows' states, keys and values."""
    kept = [t for c in engine._rows.prefixes._chunks.values() for held in c.layers.values() for t in held]
    rows = [t for row in engine._rows.rows for held in row.layers for t in (held.keys, held.values)]
    states = [layer for row in engine._rows.rows for layer in row.states.layers if hasattr(layer, "conv_states")]
    rows += [t for layer in states for t in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return [sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if t is not None}.values())
            for held in (kept, rows)]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_of_all_their_tokens(family, tmp_path):
    """A prompt that differs in a chunk's last token goes on from no state after it. Where it went another way, states
    are kept: the next prompt goes on from there."""
    model = model_of(family, tmp_path)
    engine, plain = Engine(model, STEP, MOST), Engine(model, STEP)
    held = engine.add(1)  # while a row lives, what is kept does
    read(engine, SYSTEM, (200,))
    assert states_of(engine, SYSTEM) == [3]
    for token, taken in ((901, 0), (902, 128), (SYSTEM[191], 192)):
        prompt = [*SYSTEM[:191], token, *SYSTEM[192:]]
        found, logits = read(engine, prompt, (200,), 6)
        assert found == taken
        _, right = read(plain, prompt, (200,), 6)
        torch.testing.assert_close(logits, right, atol=5e-6, rtol=1e-4)
        assert logits.argmax(-1).tolist() == right.argmax(-1).tolist()
    assert states_of(engine, SYSTEM)[-2:] == [2, 3]
    assert engine.kept_tokens() == 64 * 5 and engine.kept_bytes == tensors_of(engine)[0]
    engine.remove(held)


def test_the_same_prompt_again_goes_on_from_states_before_its_last_token(tmp_path):
    engine = Engine(model_of("granitemoehybrid", tmp_path), STEP, MOST)
    for taken in (0, 128):
        assert read(engine, SYSTEM[:192], (192,))[0] == taken


def test_a_row_that_has_begun_goes_on_from_kept_states(tmp_path):
    """In the middle of a chunk, and its own states are replaced."""
    model = model_of("qwen3_next", tmp_path)
    engine, plain = Engine(model, STEP, MOST), Engine(model, STEP)
    slot = engine.add(200, engine.keys(SYSTEM))
    engine.run([StepInput(slot, SYSTEM[:20], 0, True)])
    read(engine, SYSTEM, (192, 200))
    assert engine.kept_ahead(slot, 171) == 0 and engine.kept_ahead(slot, 179) == 172
    logits = engine.run([StepInput(slot, SYSTEM[192:], 1, True, 172, 9)])[0]
    torch.testing.assert_close(logits, read(plain, SYSTEM, (192, 200))[1], atol=5e-6, rtol=1e-4)


def test_a_long_prompt_keeps_states_that_take_no_more_than_keys_and_values(tmp_path):
    """So a prompt goes on from near the place where it differs, although nobody differed there before."""
    engine = Engine(model_of("qwen3_next", tmp_path), STEP, MOST)
    held, prompt = engine.add(1), [1 + n * 37 % 900 for n in range(1000)]
    read(engine, prompt, (256, 512, 768, 1000))
    prefixes = engine._rows.prefixes
    apart = -(-prefixes.state_bytes // prefixes.chunk_bytes)
    # the sizes are known after the first pass
    assert apart > 1 and states_of(engine, prompt) == [n for n in range(5, 16) if n % apart == 0 or n == 15]
    taken, _ = read(engine, [*prompt[:900], *range(1, 101)], (1000,))
    assert taken == 64 * (14 // apart * apart)
    engine.remove(held)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_pass_keep_their_own_states(family, tmp_path):
    """Three rows with other places in their prompts, of which two keep states in the pass and one goes on from kept
    ones. What is held during the pass is never more than was foretold."""
    model = model_of(family, tmp_path)
    engine, plain = Engine(model, STEP, MOST), Engine(model, STEP)
    read(engine, SYSTEM, (200,))
    prefixes = engine._rows.prefixes
    held = tensors_of(engine)[0]
    token = (held - prefixes.state_bytes) // 192
    engine._rows.shape = CacheShape((Alike(2, token // 2),), prefixes.state_bytes)
    prompts = [SYSTEM, [n + 1 for n in SYSTEM], [7] * 70]
    slots = [engine.add(200, engine.keys(prompt)) for prompt in prompts]
    items = [
        StepInput(slot, prompt[taken:], 1, True, taken, 9)
        for slot, prompt, taken in zip(slots, prompts, (192, 0, 0), strict=True)
    ]
    assert engine.kept_ahead(slots[0], 199) == 192
    foretold, own = engine._rows.after(items), PackedKvCache.ran
    seen = []

    def ran(self, layer, number):
        own(self, layer, number)
        copies = [t for part in self._parts for by in part.states.values() for held in by.values() for t in held]
        seen.append(sum(tensors_of(engine)) + sum(t.numel() * t.element_size() for t in copies))
        assert seen[-1] <= self.held_bytes == foretold

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedKvCache, "ran", ran)
        logits = engine.run(items)
    assert seen[-1] > seen[0] > held
    for found, prompt, ends in zip(logits, prompts, ((192, 200), (200,), (70,)), strict=True):
        torch.testing.assert_close(found, read(plain, prompt, ends)[1], atol=5e-6, rtol=1e-4)
    for prompt, taken in zip(prompts, (192, 192, 64), strict=True):
        assert states_of(engine, prompt)[-1] * 64 == taken == read(engine, prompt, (len(prompt),))[0]
    assert engine.kept_bytes == tensors_of(engine)[0]


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_what_no_copy_can_be_made_of_is_not_kept(error, tmp_path, monkeypatch):
    """Neither states nor keys and values."""
    engine = Engine(model_of("lfm2_moe", tmp_path), STEP, MOST)
    held = engine.add(1)

    def short(tensor):
        raise error("short")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", short)
        read(engine, SYSTEM, (200,))
    assert engine.kept_bytes == 0
    assert read(engine, SYSTEM, (200,))[0] == 0 and read(engine, SYSTEM, (200,))[0] == 192
    engine.remove(held)


# --- the scheduler


@pytest.fixture
def asked(bench, tokenizer):
    return lambda model, *given, **limits: scheduled(bench, model, tokenizer, *given, **limits)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_requests_at_once_read_a_shared_prompt_once(family, asked, tmp_path):
    """All come before the first pass. The first reads what they share, and the others wait for its states."""
    model = model_of(family, tmp_path)
    come = threading.Event()
    one, plain = asked(model, MOST, lambda items: come.wait(PATIENCE)), asked(model, 0)
    held = one.ask([5], 1)  # whose pass lasts until the others have come
    prompts = [[*SYSTEM, 3 + n, 5, 7 + n] for n in range(8)]
    told = [one.ask(prompt, 6) for prompt in prompts]
    come.set()
    assert [said(events) for events in told] == plain.answers(prompts, 6)
    said(held)
    totals = one.scheduler.totals
    assert totals.prompt_tokens == 1 + 203 + 7 * 11 and totals.prefix_hits == 7 * 192


@pytest.mark.parametrize("chunks", [0, 4, 1000])
def test_any_mix_of_requests_is_answered_as_without(chunks, asked, tmp_path):
    """Prompts of a tree of beginnings, at random times, of which some leave and for some of which the budget has no
    room: with room for no states, a few, many or all. Every request ends, and greedy text is that without."""
    model = model_of("qwen3_next", tmp_path)
    draw = random.Random(chunks)
    engine = Engine(model, STEP, MOST)
    held = engine.add(1)
    read(engine, SYSTEM, (200,))
    prefixes = engine._rows.prefixes
    most = 100 if not chunks else prefixes.state_bytes + chunks * prefixes.chunk_bytes
    engine.remove(held)
    refused = []

    def refuse(items):
        by_chance = not refused or draw.random() < 0.1
        if sum(len(item.tokens) for item in items) > 8 and by_chance and len(refused) < 20:
            refused.append(len(items))
            raise BudgetExceeded("planted")

    one, plain = asked(model, most, refuse, sequences=5), asked(model, 0)
    sent = []
    for _ in range(24):
        length = draw.choice((10, 63, 64, 65, 128, 150, 192, 320, 500))
        branch = draw.choice((0, 0, 64, 127, 128, 200, 300))
        other = draw.choice((0, 1, 2))
        prompt = [1 + n * 37 % 900 + (n >= branch) * other for n in range(length)]
        sent.append((prompt, one.ask(prompt, 6)))
        one.jobs[-1].cancelled = draw.random() < 0.15
        if draw.random() < 0.4:
            time.sleep(0.02)
    kept = [pair for pair, job in zip(sent, one.jobs, strict=True) if not job.cancelled]
    assert [said(told) for _, told in kept] == plain.answers([prompt for prompt, _ in kept], 6)
    wait_for(lambda: not one.scheduler.running and not one.scheduler.waiting)
    assert one.machine.kept_bytes <= most and refused and one.scheduler.health()["ok"]
    assert bool(one.scheduler.totals.prefix_hits) == (chunks > 0)
