"""Rates of prompts and decoding by policy and limit: what is run, what is counted, and how it is printed."""

import pytest

from moepack.pack.errors import InputError
from moepack.reports import bench as module
from moepack.reports.bench import Lengths, bench

FEW = Lengths(prompts=(8,), new=(3,), context=4, clients=(1, 2), repeat=2)


def test_every_policy_in_every_limit(bundle, monkeypatch):
    """A limit that is too small is a row that says so, and the others are measured."""
    passes = []
    load = module.load_shown

    def loaded(*given):
        model = load(*given)
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: passes.append(tuple(out.shape[:2])))
        return model

    monkeypatch.setattr(module, "load_shown", loaded)
    rows = bench(bundle, ("static:w4", "static:w2"), ("1MB", "60MB"), lengths=FEW)
    assert [(r.policy, r.limit, r.clients, r.test, r.tokens) for r in rows] == [
        (policy, limit, clients, *test)
        for limit in ("1MB", "60MB")
        for policy in ("static:w4", "static:w2")
        for clients in (1, 2)
        for test in (("prompt", 8), ("decode", 3))
    ]
    refused, measured = rows[:8], rows[8:]
    assert all(r.tokens_per_second is None and "the budget is 1MB" in str(r.error) for r in refused)
    for row in measured:
        assert row.tokens_per_second is not None and row.tokens_per_second > 0 and row.deviation is not None
        assert row.experts == {row.policy.removeprefix("static:"): 64}
        assert row.device_bytes_peak is not None and 0 < row.device_bytes_peak <= 60_000_000
    turns = FEW.repeat + 1
    once = [(clients, n) for clients in (1, 2) for n in (*[8] * turns, *[4, 1, 1, 1] * turns)]
    assert passes == once * 2


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ({"prompts": (), "new": ()}, "nothing to measure"),
        ({"prompts": (0,)}, "prompt 0: at least 1"),
        ({"repeat": 0}, "repeat 0"),
    ],
)
def test_lengths_that_cannot_be_measured(lengths, words):
    with pytest.raises(InputError, match=words):
        Lengths(**lengths)
