"""Sequences: what a policy is told of them, in which order, whatever happens to their caches."""

import copy
import gc
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from listening import Listener, heard, listened_to
from live_models import ids
from support import at_once
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from moepack.runtime.policies.contract import DecodingBegan, PrefillEnded, SequenceBegan, SequenceEnded
from moepack.runtime.policies.reducers import GATES
from moepack.runtime.residency.sequences import Sequences
from moepack.runtime.step.counters import Counters

TOP_K = 2


class Cache:
    """As much of one as is looked at."""

    def __init__(self, length=0):
        self.length = length

    def get_seq_length(self):
        return self.length


def one_pass(sequences, tokens, cache=None, makes=None, batch=1, keep=0):
    """Number, tokens of a prompt, and whether the sequence and decoding began."""
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    given = {"input_ids": ids, "past_key_values": cache, "logits_to_keep": keep}
    with sequences.reading(given) as (prompt, told):
        left = cache if cache is not None else makes
        if isinstance(left, Cache):
            left.length += tokens
        told(SimpleNamespace(past_key_values=left))
    return prompt.sequence, prompt.tokens, prompt.begins, prompt.decodes


def test_a_sequence_is_what_stands_behind_a_cache():
    sequences, cache = Sequences(), Cache()
    assert one_pass(sequences, 5, None, cache, batch=2) == (1, 10, True, False)
    assert one_pass(sequences, 3, cache) == (1, 3, False, False), "another chunk"
    assert one_pass(sequences, 1, cache) == (1, 0, False, True)
    assert one_pass(sequences, 1, cache) == (1, 0, False, False)
    assert one_pass(sequences, 4, cache, keep=4) == (1, 0, False, False), "guesses"
    assert one_pass(sequences, 4, cache, keep=1) == (1, 4, False, False), "another turn"
    assert one_pass(sequences, 65, cache, keep=65) == (1, 65, False, False), "a chunk whose tokens are all scored"
    assert one_pass(sequences, 4, cache, keep=4) == (1, 0, False, True)
    assert one_pass(sequences, 1, None, None) == (2, 1, True, False), "one token, and no cache"
    assert one_pass(sequences, 4, None, None, keep=4) == (3, 4, True, False), "a prompt is one, whatever is asked of it"
    assert sequences.over() == [2, 3]
    del cache
    assert sequences.over() == [1] and sequences.over() == [] and not sequences._followed


def test_caches_that_were_not_made_by_a_pass():
    sequences, empty, full = Sequences(), Cache(), Cache(7)
    assert one_pass(sequences, 1, empty) == (1, 1, True, False), "a prompt of one token"
    assert one_pass(sequences, 1, full) == (2, 0, True, True), "read elsewhere"
    twin = copy.copy(empty)
    assert one_pass(sequences, 1, twin) == (3, 0, True, True)
    empty.length = 0
    assert one_pass(sequences, 2, empty) == (4, 2, True, False), "emptied, to be used again"
    assert sequences.over() == [1]

    class Unfollowed:
        __slots__ = ("length",)

    assert one_pass(sequences, 2, Unfollowed())[:3] == (5, 2, True)
    assert sequences.over() == [5]
    with sequences.reading({}) as (prompt, _):
        assert prompt.sequence == 0


def test_what_fails_ends_with_its_pass():
    sequences = Sequences()
    with pytest.raises(KeyboardInterrupt), sequences.reading({"input_ids": torch.zeros(1, 2)}):
        raise KeyboardInterrupt
    assert sequences.over() == [1]


# --- served


@pytest.fixture
def model(bundle):
    with listened_to(bundle) as made:
        yield made


def kinds(events):
    return [type(e).__name__ for e in events]


WHOLE = ["SequenceBegan", "PrefillEnded", "DecodingBegan", "SequenceEnded"]


def has_ended(events):
    return any(isinstance(e, SequenceEnded) for e in events)


def test_a_generation(model):
    with torch.inference_mode():
        out = model.generate(
            ids(0, 12), max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True
        )
    assert kinds(heard(model)) == WHOLE[:3]
    del out
    events = heard(model, has_ended)
    assert kinds(events) == WHOLE
    began, prompt = events[:2]
    assert isinstance(began, SequenceBegan) and isinstance(prompt, PrefillEnded) and began.tokens == 12
    assert all(e.sequence == began.sequence > 0 for e in events)
    assert [int(row.sum()) for row in prompt.counts] == [12 * TOP_K] * 4
    assert [float(row.sum()) for row in prompt.sums[GATES]] == pytest.approx([12.0] * 4, rel=0.02), (
        "weights of a token sum to 1"
    )


def test_padding_never_counts(model):
    """Prompts of three lengths, padded on the left: what is counted is what each counts by itself."""
    lengths = (3, 9, 1)
    rows = [ids(n, length)[0] for n, length in enumerate(lengths)]
    batch, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for n, row in enumerate(rows):
        batch[n, 9 - len(row) :], mask[n, 9 - len(row) :] = row, 1
    with torch.inference_mode():
        model(batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
    events = heard(model, has_ended)
    assert kinds(events) == ["SequenceBegan", "PrefillEnded", "SequenceEnded"]
    assert [int(row.sum()) for row in events[1].counts] == [13 * TOP_K] * 4
    with torch.inference_mode():
        for row in rows:
            model(row[None], use_cache=False)
    alone = [e for e in heard(model, lambda all: len(all) == 12) if isinstance(e, PrefillEnded)][1:]
    first = sum(e.counts[0] for e in alone)
    assert events[1].counts[0].tolist() == first.tolist(), "the first layer routes by the token alone"


@pytest.mark.parametrize("how", ["lookup", "a draft model", "early exit", "the draft model"])
def test_guesses_are_no_prompt(model, demo_model, how):
    """Several tokens at once are verified, or caught up with; of each sequence one prompt is heard, one decoding."""
    passes = []
    prompt = ids(8).repeat(1, 6)  # so that there is something to look up
    handle = model.register_forward_pre_hook(
        lambda module, args, given: passes.append(int(given["input_ids"].shape[1])), with_kwargs=True
    )
    plain = AutoModelForCausalLM.from_pretrained(demo_model)
    given = {
        "lookup": {"prompt_lookup_num_tokens": 4}, "a draft model": {"assistant_model": plain},
        "early exit": {"assistant_early_exit": 2}, "the draft model": {"assistant_model": model},
    }[how]  # fmt: skip
    with torch.inference_mode():
        (plain if how == "the draft model" else model).generate(prompt, max_new_tokens=24, do_sample=False, **given)
        handle.remove()
        gc.collect()
    assert sum(n > 1 for n in passes[1:]) > 3, "tokens were guessed"
    sequences = {"early exit": 2}.get(how, 1)
    events = heard(model, lambda all: sum(isinstance(e, SequenceEnded) for e in all) >= sequences)
    for number in {e.sequence for e in events}:
        mine = [e for e in events if e.sequence == number]
        assert kinds(mine) == WHOLE
    assert len(events) == 4 * sequences


def test_counts_that_arrive_late_are_heard_in_their_order(model, monkeypatch):
    """As on a GPU: decoding has begun long before the prompt's counts are there. It is heard of after them."""
    ready = threading.Event()
    monkeypatch.setattr(Counters, "arrived", lambda self: ready.is_set())
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for tokens in (ids(0, 8), ids(0, 1), ids(0, 1)):
            model(tokens, past_key_values=cache, use_cache=True)
    del cache
    gc.collect()
    time.sleep(0.1)
    assert kinds(Listener.heard) == ["SequenceBegan"]
    ready.set()
    assert kinds(heard(model, has_ended)) == WHOLE


def test_sequences_on_several_threads(model):
    """Each has a number of its own, and its events in their order."""

    def work(seed):
        with torch.inference_mode():
            for turn in range(4):
                model.generate(ids(10 * seed + turn, 6), max_new_tokens=3, min_new_tokens=3, do_sample=False)

    at_once(work, 3)
    gc.collect()
    events = heard(model, lambda all: sum(isinstance(e, SequenceEnded) for e in all) == 12)
    for number in {e.sequence for e in events if isinstance(e, DecodingBegan)}:
        mine = [e for e in events if getattr(e, "sequence", 0) == number]
        assert kinds(mine) == WHOLE
    assert len(events) == 48 and not model.moepack.manager.statistics.sequences._followed


def test_a_static_cache_is_not_asked_for_what_a_device_counts():
    """On a device without values, where asking fails: a prompt, tokens, and the same after it was emptied."""
    from transformers import Qwen3MoeConfig

    from moepack.runtime.planning.fixed import KvShape
    from moepack.runtime.residency.kv_reserve import KvBudget

    config = Qwen3MoeConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, head_dim=8
    )
    cache, sequences = StaticCache(config, max_cache_len=32), Sequences()
    budget = KvBudget.__new__(KvBudget)
    budget.needs = SimpleNamespace(kv=KvShape(((0, 64, None),)))
    for number in (1, 2):
        for tokens, began, decodes in ((5, True, False), (1, False, True), (1, False, False)):
            assert one_pass(sequences, tokens, cache) == (number, tokens * (tokens > 1), began, decodes)
            for layer in cache.layers:
                layer.update(*[torch.empty(1, 1, tokens, 8, device="meta")] * 2)
            with pytest.raises(RuntimeError, match="meta"):
                int(cache.get_seq_length())
            assert budget._after_pass(cache, 1, 1) == (2 * (2 * 32 * 8 * 4) + 16, 32)
        cache.reset()
    for layer in (copy.deepcopy(cache.layers[0]), pickle.loads(pickle.dumps(cache)).layers[0]):
        assert type(layer) is StaticLayer and vars(layer).keys() == vars(cache.layers[0]).keys()
