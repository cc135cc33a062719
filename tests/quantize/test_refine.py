"""`refine`: down fitted again on what the quantised first matrix makes, against the formula and on unseen tokens."""

from dataclasses import replace

import pytest
import torch
from true_losses import generated

from moepack.calibrate.experts import finish, hidden
from moepack.calibrate.gather import gather_batch
from moepack.pack.spec import Version
from moepack.quantize.expert_batch import RIDGE, SPARSE, Settings, quantise_batch, refit_down
from moepack.quantize.grid import Quantised, dequantise
from moepack.quantize.methods import quantise
from moepack.quantize.pooling import MEASURED, measured_row, pooled

VERSIONS = tuple(Version.of(name, 32) for name in ("w4", "w2", "w1"))
PLAIN = Settings("gptq", VERSIONS)


@pytest.fixture(scope="module")
def case():
    return generated(64, 64, 2, 900, 0)


def batch_of(case):
    return gather_batch(case.module, case.weights, range(2), case.learn, PLAIN, torch.device("cpu"))


def errors(case, first, down):
    """Relative squared error of each expert's output on unseen tokens, float64 [experts]."""
    out = []
    for e in range(2):
        x, own = case.truth.inputs.float(), [case.weights.matrix(e, m).float() for m in range(2)]
        exact, got = (
            finish(case.module, hidden(case.module, x, a, None), b, None) for a, b in (own, (first[e], down[e]))
        )
        out.append((got - exact).double().square().sum() / exact.double().square().sum())
    return torch.stack(out)


def test_down_is_fitted_to_what_the_formula_says(case):
    """Written out with whole matrices."""
    batch, version = batch_of(case), VERSIONS[1]
    first = quantise("rtn", batch.weights[0], None, version)
    wanted, moments = [], []
    for e in range(2):
        token = batch.tokens[e].learn
        x = case.learn.inputs[token].double()
        a, q = (hidden(case.module, x, w.double(), None) for w in (batch.weights[0][e], dequantise(first, version)[e]))
        product, error = (q.T @ y / len(token) for y in (q, a - q))
        damping = (RIDGE + SPARSE * 64 / len(token)) * product.diagonal().mean() * torch.eye(64)
        shift = torch.linalg.inv(product + damping) @ error
        down = batch.weights[1][e].double()
        wanted.append((down + down @ shift.T).float())
        moments.append(product.float())
    want = quantise("gptq", torch.stack(wanted), torch.stack(moments), version, matrix=1)
    got = refit_down(batch, PLAIN, {version: first})[version]
    same = (got.codes == want.codes).double().mean()
    assert same > 0.995 and torch.allclose(dequantise(got, version), dequantise(want, version), atol=0.02)


def test_less_is_lost_on_unseen_tokens_and_the_table_says_how_much(case):
    rows = {r: list(quantise_batch(batch_of(case), replace(PLAIN, refine=r))) for r in (False, True)}

    def values(refined, v):
        first, down = rows[refined][0][v].quantised
        return dequantise(first, VERSIONS[v]), dequantise(down, VERSIONS[v])

    tables = {}
    for refined, some in rows.items():
        raw = [measured_row([(item.own, item.others) for item in row]) for row in some]
        tables[refined] = pooled({k: torch.tensor([r[k] for r in raw], dtype=torch.float64) for k in MEASURED})
    for v in range(3):
        assert torch.equal(values(False, v)[0], values(True, v)[0])  # the first matrix stays as it was
        plain, refined = errors(case, *values(False, v)), errors(case, *values(True, v))
        assert bool((refined < 0.98 * plain).all())
        assert float(tables[True]["relative"][:, v].mean()) == pytest.approx(float(refined.mean()), rel=0.15)


def test_experts_without_tokens_are_fitted_to_the_layers(case):
    """And an expert whose down reads zeros alone stays finite."""
    nobody = replace(case, learn=replace(case.learn, experts=torch.zeros_like(case.learn.experts)))
    batch = batch_of(nobody)
    first = quantise("rtn", batch.weights[0], None, VERSIONS[1])
    for zero in (first, Quantised(first.codes * 0, first.scale, first.zero)):
        made = refit_down(batch, PLAIN, {VERSIONS[1]: zero})[VERSIONS[1]]
        assert bool(torch.isfinite(dequantise(made, VERSIONS[1])).all())
