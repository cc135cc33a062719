"""What tables say of losses: against the truth, the standard errors against how far off they are, sums by hand."""

import math

import pytest
import torch
from true_losses import Case, generated, inside, table_and_truth

from moepack.calibrate.forward import Observation
from moepack.pack.spec import Version
from moepack.quantize import crossfit, expert_batch
from moepack.quantize.losses import GROUPS, MODEL, Correction, Loss, Measured, RowErrors, measure
from moepack.quantize.moments import ExpertMoments, FoldSums, second_moments, shrink
from moepack.quantize.pooling import LEAST_SCATTER, MEASURED, UNKNOWN_SCATTER, measured_row, pool, pooled

TWO = (Version.of("w4", 64), Version.of("w2", 64))


@pytest.fixture(scope="module")
def found():
    """Experts of 128 columns by tokens: half as many, twice, eight times."""
    return {n: table_and_truth(generated(128, 64, 12, n, seed=1, unseen=2048)) for n in (64, 256, 1024)}


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_tables_say_what_is_lost_on_tokens_that_nothing_has_seen(found, tokens):
    """True over measured, mean over experts, at 4, 3, 2 and 1 bits."""
    ratio = (found[tokens]["true"] / found[tokens]["mse"]).mean(0)
    assert float(ratio.min()) > 0.87 and float(ratio.max()) < 1.15, ratio


def test_losses_on_the_tokens_learnt_from_are_too_low(found):
    """What is corrected: the same tokens and weights without it."""
    for tokens, least in ((64, 1.5), (256, 1.2), (1024, 1.05)):
        assert float((found[tokens]["true"] / found[tokens]["plain"]).mean(0).min()) > least, tokens


def test_standard_errors_cover(found):
    """Of 144 true losses 90 to 99 % are inside two; and they are no wider than they have to be."""
    within = torch.cat([inside(f) for f in found.values()]).double().mean()
    assert 0.90 <= float(within) <= 0.995
    for tokens, most in ((64, 0.2), (256, 0.1), (1024, 0.05)):
        assert float((found[tokens]["mse_error"] / found[tokens]["mse"]).mean()) < most


@pytest.mark.parametrize("leaks", [False, True])
def test_planted_violations_of_cross_fitting_are_seen(leaks, monkeypatch):
    """Losses as they are on the tokens learnt from; or rows fitted again to all tokens, with those of the fold."""
    mean = ExpertMoments.mean
    if leaks:
        monkeypatch.setattr(ExpertMoments, "mean", lambda self, without=None: mean(self))
    else:
        monkeypatch.setattr(expert_batch, "_crossfits", lambda tokens: False)
    found = table_and_truth(generated(128, 64, 4, 256, seed=1, unseen=2048), TWO)
    assert float((found["true"] / found["mse"]).mean(0).min()) > 1.2


def test_experts_that_hardly_a_token_reached():
    """With 0 and 3 tokens beside experts of 400: the table is near the truth, and says that it is less sure."""
    case = generated(128, 64, 12, 400, seed=2, unseen=2048)
    chosen = case.learn.experts.clone()
    for expert, left in ((0, 0), (1, 3)):
        token, slot = torch.where(chosen == expert)
        chosen[token[left:], slot[left:]] = 12
    rare = Case(case.module, case.weights, Observation(case.learn.inputs, chosen, case.learn.gates, 64), case.truth)
    found = table_and_truth(rare, TWO)
    ratio, error = found["true"] / found["mse"], found["mse_error"] / found["mse"]
    assert float(ratio[:2].min()) > 0.8 and float(ratio[:2].max()) < 1.25, ratio
    assert bool(((found["true"] - found["mse"]).abs() <= 3 * found["mse_error"])[:2].all())
    assert float(error[0].min()) >= math.sqrt(LEAST_SCATTER) and float(found["plain"][0].nan_to_num().max()) == 0


# --- parts, by hand


def test_the_jackknife_of_a_ratio():
    """Three groups, written out."""
    exact = torch.tensor([[2.0], [1.0], [1.0], [3.0]])
    got = exact - torch.tensor([[1.0], [0.0], [2.0], [1.0]])
    gates, groups = torch.tensor([1.0, 1.0, 0.5, 2.0]), torch.tensor([0, 0, 1, 5])
    made = measure(exact, got, gates, groups, torch.zeros(4, dtype=torch.bool), None)
    assert made.groups == 3 and made.doubt == 0
    assert made.loss.mse == pytest.approx(6 / 4) and made.loss.relative == pytest.approx(6 / 15)
    assert made.loss.gated == pytest.approx((1 + 1 + 4) / 4)
    for got_variance, without in (
        (made.variance.mse, [5 / 2, 2 / 3, 5 / 3]),
        (made.variance.relative, [5 / 10, 2 / 14, 5 / 6]),
        (made.variance.gated, [5 / 2, 5 / 3, 2 / 3]),
    ):
        mean = sum(without) / 3
        assert got_variance == pytest.approx(2 / 3 * sum((x - mean) ** 2 for x in without))
    nothing = measure(exact[:0], got[:0], gates[:0], groups[:0], torch.zeros(0, dtype=torch.bool), None)
    assert nothing == Measured(Loss(0, 0, 0), Loss(0, 0, 0), 0, 0)


def test_the_correction_is_of_the_tokens_learnt_from_alone():
    """rho = 1 + a (h / s - 1) of both matrices; errors x and y add up to x + y - x y of the output."""
    exact = torch.full((4, 1), 10.0)
    got = exact - 2.0
    groups, learnt = torch.tensor([0, 1, 2, 3]), torch.tensor([True, True, True, False])
    own, other = torch.zeros(2, 2, GROUPS, dtype=torch.float64)
    own[0, :3], other[0, :3] = 1.0, 1.5  # h / s = 1.5
    own[1, :3], other[1, :3] = 1.0, 2.0  # of down, whose rows stand for 1.5 each: 1.5 of a loss of 4
    rows = torch.tensor([[1.0, 2.0], [1.5, 3.0]], dtype=torch.float64)
    correction = Correction(
        tuple(RowErrors(torch.stack(e), rows, 1.5) for e in zip(own, other, strict=True)), (1.0, 0.5)
    )
    y = 1.5 / 100
    x = (0.04 - y) / (1 - y)
    factor = (1.5 * x + 1.5 * y - 1.5 * x * 1.5 * y) / 0.04
    made = measure(exact, got, torch.ones(4), groups, learnt, correction)
    assert made.loss.mse == pytest.approx((3 * 4 * factor + 4) / 4)
    assert made.loss.relative == pytest.approx((3 * 4 * factor + 4) / 400)
    unlearnt = measure(exact, got, torch.ones(4), groups, torch.zeros(4, dtype=torch.bool), correction)
    assert unlearnt.loss.mse == pytest.approx(4.0) and unlearnt.doubt == 0
    share = 12 / (12 * factor + 4)  # rows whose ratios are alike add no doubt: what is left is the model's
    assert made.doubt == pytest.approx((share * MODEL * (factor - 1)) ** 2)


def test_moments_without_a_fold_are_those_of_the_other_tokens():
    g = torch.Generator().manual_seed(0)
    x, fold = torch.randn(40, 5, generator=g), torch.arange(40) % 4
    layer = torch.randn(30, 5, generator=g)
    sums, around = FoldSums.empty(5, 4, torch.device("cpu")), FoldSums.empty(5, 4, torch.device("cpu"))
    for part in (slice(0, 17), slice(17, 40)):
        sums.add(x[part], fold[part])
    around.add(layer, torch.arange(30) % 4)
    moments = ExpertMoments(sums, around, 10.0)
    for f in (None, 0, 3):
        kept = torch.ones(40, dtype=torch.bool) if f is None else fold != f
        near = layer if f is None else layer[torch.arange(30) % 4 != f]
        want = shrink(second_moments(x[kept]), int(kept.sum()), second_moments(near), 10.0)
        assert torch.allclose(moments.mean(f), want, atol=1e-6)
    assert moments.fewer(1) == pytest.approx(50 / 40)


def test_tokens_of_a_group_are_of_one_fold_and_those_held_out_spread_over_groups():
    tokens = torch.arange(8 * 5000)
    cluster = crossfit.cluster_of(tokens, 5, 8)
    fold, group = cluster % crossfit.FOLDS, cluster % GROUPS
    learnt = tokens // 5 % 8 != 7
    for g in range(GROUPS):
        assert len(fold[learnt & (group == g)].unique()) == 1
    assert len(group[~learnt].unique()) == GROUPS
    assert [int((fold[learnt] == f).sum()) for f in range(crossfit.FOLDS)] == [8750] * 4
    for start in range(0, 40000, 5):
        assert len(fold[start : start + 5].unique()) == 1


# --- a layer's experts together


def pool_of(own, relative, groups, others):
    """`pool` with an own variance of relative**2 a group, and others measured without error."""
    a, n, b = (torch.tensor(x, dtype=torch.float64) for x in (own, groups, others))
    none = torch.zeros_like(a)
    return pool(a, (relative * a) ** 2 / n.clamp(min=1), n, none, b, none, torch.full_like(a, 64.0))


def test_scatter_is_learnt_from_the_experts_that_are_known():
    """Ratios of 1 and 4 in turn: what others' tokens say is then worth little, and the error says so."""
    value, error = pool_of([1.0, 4.0] * 6 + [0.0, 1.0], 0.1, [64] * 12 + [0, 1], [1.0] * 14)
    assert value[12] == pytest.approx(4 ** (6 / 13), rel=0.01)
    assert error[12] / value[12] == pytest.approx(math.log(2), rel=0.1)
    assert value[13] == pytest.approx(1, rel=0.05), "one group of its own is worth more than the layer"
    lone, lone_error = pool_of([2.0, 0.0], 0.1, [64, 0], [1.0, 1.0])
    assert lone_error[1] / lone[1] == pytest.approx(math.sqrt(UNKNOWN_SCATTER), rel=0.5)


def test_one_expert_without_output_in_a_group_does_not_spoil_the_others():
    """The ratio without that group has a variance without bound."""
    known = [1.0, 2.0] * 6
    value, error = pool_of([*known, 1.0], torch.tensor([0.1] * 12 + [1e150]), [8] * 12 + [3], known + [1.0])
    torch.testing.assert_close(value[:12], torch.tensor(known).double(), rtol=0.05, atol=0)
    assert float(value[12]) == pytest.approx(1, rel=0.2) and bool((error < value).all())


def test_nothing_at_all_and_what_is_stored_as_it_is():
    """Lossless columns cost nothing, without error; a layer that no token reached leans on others' tokens alone."""
    nothing = Measured(Loss(0, 0, 0), Loss(0, 0, 0), 0, 0)
    zero = Measured(Loss(0, 0, 0), Loss(0, 0, 0), 9, 0)
    around = Measured(Loss(3, 2, 1), Loss(0, 0, 0), 9, 0)
    rows = [measured_row([(zero, zero), (nothing, around)]), measured_row([(nothing, nothing), (nothing, nothing)])]
    raw = {k: torch.tensor([r[k] for r in rows], dtype=torch.float64) for k in MEASURED}
    out = pooled(raw)
    assert all(bool(torch.isfinite(t).all()) and t.dtype == torch.float32 for t in out.values())
    assert out["mse"][:, 0].tolist() == [0, 0] == out["mse_error"][:, 0].tolist()
    assert [float(out[k][0, 1]) for k in ("mse", "relative", "gated")] == [3, 2, 1]
    assert float(out["mse_error"][0, 1]) > 1
