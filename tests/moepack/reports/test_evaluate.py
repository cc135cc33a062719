"""Scores of tokens, their intervals, and divergence from a bundle's own bf16."""

import math

import pytest
import torch
from support import ids, spy

import moepack
from moepack.calibrate import products
from moepack.pack.errors import InputError
from moepack.reports import scoring
from moepack.reports.evaluate import evaluate
from moepack.reports.intervals import MeanInterval, clustered
from moepack.reports.scoring import token_scores
from moepack.runtime.planning.options import LoadOptions


def test_the_interval_by_hand():
    """Sums 2, 4 and 9 over 1, 2 and 3 tokens: mean 2.5; deviations -0.5, -1 and 1.5; error sqrt(3/2 3.5) / 6."""
    got = clustered([2, 4, 9], [1, 2, 3])
    half = 4.31 * math.sqrt(1.5 * 3.5) / 6
    assert got.mean == 2.5 and got.low == pytest.approx(2.5 - half) and got.high == pytest.approx(2.5 + half)
    assert clustered([3], [2]) == MeanInterval(1.5, -math.inf, math.inf)
    assert clustered([0, 0], [1, 1]).exp() == MeanInterval(1, 1, 1)


def test_scores_are_those_of_whole_logits(bundle):
    """Logits of a token at a time, and of as many as there is room for."""
    drawn = ids(24, batch=2)
    best = moepack.load(bundle, policy="static:bf16", dtype=torch.float32)
    low = moepack.load(bundle, policy="static:w2", dtype=torch.float32)
    with torch.inference_mode():
        kept = token_scores(best, drawn, 1 << 26)
        got = token_scores(low, drawn, 1, kept.hidden)
        p, q = (torch.log_softmax(m(drawn, use_cache=False).logits[:, :-1].double(), -1) for m in (best, low))
    kl = (p.exp() * (p - q)).sum(-1)
    assert got.kl is not None and got.agrees is not None
    torch.testing.assert_close(got.kl, kl, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(got.nll, -q.gather(2, drawn[:, 1:, None])[..., 0], rtol=1e-4, atol=1e-4)
    assert torch.equal(got.agrees, (p.argmax(-1) == q.argmax(-1)).double()) and 0 < got.agrees.mean() < 1
    assert kept.kl is None and float(kl.mean()) > 1e-3


def test_divergence_of_bf16_from_itself_is_nothing(bundle, evaluation):
    options = {"length": 64, "samples": 6, "kl": True}
    same = evaluate(bundle, [str(evaluation)], LoadOptions(policy="static:bf16"), **options)
    assert same.kl == 0 and same.top1_agreement == 1 and same.kl_interval == (0, 0)
    low = evaluate(bundle, [str(evaluation), str(evaluation)], LoadOptions(policy="static:w1"), **options)
    assert low.kl is not None and low.kl_interval is not None and low.kl_interval[0] > 0.01
    assert low.kl_interval[0] < low.kl < low.kl_interval[1] and low.top1_agreement is not None
    assert low.files[0].kl == low.files[1].kl == pytest.approx(low.kl)
    low_end, high_end = low.files[0].perplexity_interval
    assert low_end < low.files[0].perplexity < high_end
    plain = evaluate(bundle, [str(evaluation)], LoadOptions(policy="static:w1"), length=64, samples=6)
    assert plain.kl is None and plain.perplexity == pytest.approx(low.perplexity)


def test_a_plain_model_multiplies_where_bf16_is_emulated(demo_model, evaluation, monkeypatch):
    """In float32, by one product at least for every layer and pass; where the processor can, torch does it."""
    taken, scores = [], []
    spy(monkeypatch, products, "product", lambda rows, *_: taken.append(len(rows)))
    for emulated in (False, True):
        monkeypatch.setattr(products, "emulated", lambda device, dtype, e=emulated: e)
        scores.append(evaluate(demo_model, [str(evaluation)], length=128, samples=4).perplexity)
        assert (len(taken) >= 4) == emulated
    assert scores[0] == pytest.approx(scores[1], rel=1e-3) and max(taken) >= products.FEWEST


def test_what_cannot_be_compared_is_refused(demo_model, evaluation):
    with pytest.raises(InputError, match="not a bundle: a divergence"):
        evaluate(demo_model, [str(evaluation)], length=64, samples=4, kl=True)


def test_a_head_that_cannot_run_alone(bundle, monkeypatch):
    """Perplexity from all logits at once; a divergence is refused."""
    drawn = ids(16)
    model = moepack.load(bundle, dtype=torch.float32)
    with torch.inference_mode():
        want = token_scores(model, drawn, 1)
        monkeypatch.setattr(type(model), "_supports_logits_to_keep", lambda self: False)
        got = token_scores(model, drawn, 1)
        torch.testing.assert_close(got.nll, want.nll, rtol=1e-4, atol=1e-4)
        assert got.hidden is None
        with pytest.raises(InputError, match="no comparison"):
            scoring.token_scores(model, drawn, 1, want.hidden)
