"""Every policy under the server. Concurrent answers equal lone ones where no version changes, and a policy hears of
each sequence of a packed pass."""

import concurrent.futures
import itertools
from contextlib import contextmanager

import pytest
import torch
from listening import Listener, heard, listened_to
from live_models import least, wait_for
from server_fixtures import ask, serving
from support import load_for_logits

import moepack
from moepack.pack.errors import InputError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.plan import ROOM
from moepack.runtime.policies.contract import PrefillEnded, SequenceEnded
from moepack.runtime.policies.reducers import GATES
from moepack.runtime.residency.sequences import Sequences
from moepack.server.batching.engine import CacheSlot, Engine, StepInput
from moepack.server.batching.packed_cache import PackedKvCache
from moepack.server.batching.prefixes import chunk_keys
from moepack.server.command import HELD, Serve, serve

PROMPTS = ("The history of the town", "def f(x):", "Tom has 3 apples and", "In the year")
TOP_K, STEP = 2, 16
ATTENTION = "importance:hi=w4,lo=w2"  # reads attention weights, which packed passes do not show


@contextmanager
def served(bundle, tokenizer, options, policy):
    room = {"prefill_tokens": 64, "all_logits": False, "kv_tokens": 256, "dtype": torch.float32}
    if policy.startswith("static"):
        model = moepack.load(bundle, policy=policy, dtype=torch.float32)
    else:
        budget = least(bundle, policy, **room) + 1_500_000
        model = load_for_logits(bundle, policy=policy, device_memory=budget, **room)
    with serving(model, tokenizer, options) as server:
        yield server


@pytest.mark.parametrize(
    "policy, changes",
    [
        ("static:w4", False), ("hotness:interval=0.05", True),
        ("lru:hi=bf16,lo=w2", True), ("lru:lo=absent", False), (ATTENTION, True),
        ("prefill:hi=bf16,k=4,bits=3", True), ("paged", False),
    ],
)  # fmt: skip
def test_requests_at_once_are_answered_as_alone(policy, changes, bundle, tokenizer, options):
    with served(bundle, tokenizer, options, policy) as server:
        limits = {"max_tokens": 12, "ignore_eos": True}
        alone = [ask(server.url, prompt, **limits)["text"] for prompt in PROMPTS]
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
                together = list(pool.map(lambda prompt: ask(server.url, prompt, **limits)["text"], PROMPTS))
            assert all(together)
            assert changes or together == alone
        totals, serving = server.server.scheduler.totals, server.model.moepack
        assert (totals.finished, totals.failed) == (3 * len(PROMPTS), 0)
        assert server.server.engine.is_packed == (policy != ATTENTION)
        if serving.budget_bytes is not None:
            assert serving.resident_bytes_peak <= serving.budget_bytes
            assert not (policy.startswith("hotness") and serving.counters()["forward_waits"])
        if serving.manager is not None:
            wait_for(lambda: not any(read() for read, _ in serving.manager.statistics.sequences._followed.values()))


# --- what policies are told


@pytest.fixture
def engine(bundle):
    with listened_to(bundle) as model:
        yield Engine(model, STEP)


def test_every_sequence_of_a_packed_pass_is_heard_of_by_itself(engine):
    """Three sequences overlap; one prompt comes in two chunks, the last of one token. Each sequence has its own events,
    and its prompt's counts equal those of the same prompt read alone."""
    prompts = [list(range(5, 5 + n)) for n in (7, 9, 3)]
    a, b, c = (engine.add(16) for _ in prompts)
    engine.run([StepInput(a, prompts[0], is_prompt=True), StepInput(b, prompts[1][:8], 0, is_prompt=True)])
    engine.run(
        [StepInput(a, [1]), StepInput(b, prompts[1][8:], is_prompt=True), StepInput(c, prompts[2], is_prompt=True)]
    )
    engine.run([StepInput(a, [2]), StepInput(b, [3]), StepInput(c, [4])])
    engine.remove(a)
    engine.run([StepInput(b, [5]), StepInput(c, [6])])
    engine.remove(b)
    engine.remove(c)
    events = heard(engine._model, lambda all: sum(isinstance(e, SequenceEnded) for e in all) == 3)
    names = {
        n: [type(e).__name__ + str(getattr(e, "tokens", "")) for e in events if e.sequence == n] for n in (1, 2, 3)
    }
    whole = ["PrefillEnded", "DecodingBegan", "SequenceEnded"]
    assert names == {
        1: ["SequenceBegan7", *whole], 2: ["SequenceBegan8", "PrefillEnded", *whole], 3: ["SequenceBegan3", *whole],
    }  # fmt: skip
    packed = [e for n in (1, 2, 3) for e in events if isinstance(e, PrefillEnded) and e.sequence == n]
    assert [[int(row.sum()) for row in e.counts] for e in packed] == [[TOP_K * n] * 4 for n in (7, 8, 1, 3)]
    Listener.heard.clear()
    for prompt in prompts:
        slot = engine.add(16)
        engine.run([StepInput(slot, prompt[:8], is_prompt=True)])
        if prompt[8:]:
            engine.run([StepInput(slot, prompt[8:], is_prompt=True)])
        engine.remove(slot)
    alone = [e for e in heard(engine._model, lambda all: len(all) == 10) if isinstance(e, PrefillEnded)]
    for mine, right in zip(packed, alone, strict=True):
        assert mine.counts[0].tolist() == right.counts[0].tolist(), "the first layer routes by the token alone"
        for row, other in zip(mine.sums[GATES][:1], right.sums[GATES][:1], strict=True):
            assert row == pytest.approx(other, rel=2e-2, abs=2e-3), "bfloat16's order"


def test_of_a_prompt_that_is_kept_in_part_the_rest_is_heard(bundle):
    """It is a sequence of its own, whose only chunk is what was read; even a single token is of a prompt."""
    with listened_to(bundle) as model:
        engine = Engine(model, 256, 1 << 30)
        for length, taken in ((130, 0), (130, 128), (128, 127)):
            prompt = [1 + n * 7 % 900 for n in range(length)]
            slot = engine.add(160, chunk_keys(prompt))
            ahead = engine.kept_ahead(slot, length - 1)
            assert ahead == taken
            engine.run([StepInput(slot, prompt[taken:], 1, True, taken, 9)])
            engine.run([StepInput(slot, [5])])
            engine.remove(slot)
        events = heard(model, lambda all: sum(isinstance(e, SequenceEnded) for e in all) == 3)
        names = [type(e).__name__ + str(getattr(e, "tokens", "")) for n in (1, 2, 3) for e in events if e.sequence == n]
        rest = ["PrefillEnded", "DecodingBegan", "SequenceEnded"]
        assert names == ["SequenceBegan130", *rest, "SequenceBegan2", *rest, "SequenceBegan1", *rest]
        read = [[int(row.sum()) for row in e.counts] for e in events if isinstance(e, PrefillEnded)]
        assert read == [[TOP_K * n] * 4 for n in (130, 2, 1)]


@pytest.mark.parametrize("policy", ("static:w4", "hotness", "lru:lo=absent"))
def test_the_longest_sequence_that_a_budget_holds_is_read_to_its_end(policy, bundle):
    """Room that a row takes ahead of need, and what is copied while it grows, are no more than was promised."""
    room = {"kv_tokens": 340, "prefill_tokens": 32, "all_logits": False}
    model = moepack.load(bundle, policy=policy, device_memory=least(bundle, policy, **room), **room)
    with model.moepack:
        engine = Engine(model, 32)
        most = engine.most_tokens(4096)
        assert most == 288
        slot = engine.add(40, most=most)
        for first in range(0, most - 120, 30):
            engine.run([StepInput(slot, [7] * min(30, most - 120 - first), is_prompt=True)])
        while slot.length < most:
            engine.run([StepInput(slot, [5])])


def test_a_larger_budget_holds_no_much_shorter_sequence(bundle):
    """A better ladder of placements is not chosen where it leaves caches little room."""
    room = {"kv_tokens": 0, "prefill_tokens": 64, "all_logits": False}
    assert LoadOptions(**room).workload.grows
    assert not LoadOptions(kv_tokens=0, all_logits=True).workload.grows and not LoadOptions().workload.grows
    begin = least(bundle, "hotness", **room)
    found = []
    for more in range(0, 3_000_000, 250_000):
        model = moepack.load(bundle, policy="hotness", device_memory=begin + more, **room)
        with model.moepack as serving:
            found.append(Engine(model, 64).most_tokens(1 << 20))
    enough = begin // ROOM // serving.caches.shape.token_bytes
    for before, after in itertools.pairwise(found):
        assert after >= min(before // 2, enough // 2)
    assert max(found) >= enough


def test_a_row_that_is_read_again_is_a_sequence_of_its_own():
    """A sequence that gave up its cache begins anew."""
    rows, sequences = PackedKvCache([None], None, 8), Sequences()

    def reads(*parts):
        items = [StepInput(CacheSlot(row, row.length), [5] * count, is_prompt=prompt) for row, count, prompt in parts]
        with (
            rows.passing(items),
            sequences.reading({"input_ids": torch.zeros(1, 4), "past_key_values": rows}) as found,
        ):
            return [(p.sequence, p.tokens, p.begins, p.decodes) for p in found[0].each]

    row, other = rows.add(8), rows.add(8)
    assert reads((row, 3, True), (other, 1, True)) == [(1, 3, True, False), (2, 1, True, False)]
    assert reads((row, 1, True), (other, 1, False)) == [(1, 1, False, False), (2, 0, False, True)]
    assert reads((row, 1, False), (other, 1, False)) == [(1, 0, False, True), (2, 0, False, False)]
    rows.remove(row)
    del row
    assert sequences.over() == [1]
    again = rows.add(8)
    assert reads((other, 1, False), (again, 5, True)) == [(2, 0, False, False), (3, 5, True, False)]


def test_what_cannot_be_served_is_refused_by_name(bundle):
    tight = least(bundle, "uniform", kv_tokens=0, prefill_tokens=256, all_logits=False) + 10_000
    for policy, memory, held, words in (
        ("hotnes", "5MB", None, "policy 'hotnes' is unknown.*did you mean hotness"),
        ("prefill", None, None, "prefill: needs a memory budget"),
        ("importance:hi=w9", "5MB", None, "no version 'w9'"),
        ("uniform", str(tight), None, f"{HELD} tokens of KV cache are held back.*kv_tokens"),
        ("uniform", str(tight), 0, "does not hold a sequence of 16 tokens: it lacks [0-9]+ bytes"),
    ):
        with pytest.raises(InputError, match=words):
            options = LoadOptions(policy=policy, device_memory=memory, kv_tokens=held)
            serve(Serve(str(bundle), options, port=0), lambda where: pytest.fail("it serves"))
