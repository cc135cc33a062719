"""Second moments: half a symmetric product at every number of columns, and what is learnt from in BF16 or float32."""

import pytest
import torch

from moepack.quantize.expert_batch import ExpertBatch, ExpertForward
from moepack.quantize.moments import STRIP, STRIPS, second_moments


@pytest.mark.parametrize("cols", [1, STRIP - 1, STRIP, STRIP + 1, 700, STRIP * STRIPS + 4])
def test_moments_are_the_whole_product_and_symmetric(cols):
    x = torch.randn(60, cols, generator=torch.Generator().manual_seed(cols))
    found = second_moments(x)
    exact = x.double().T @ x.double() / 60
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    assert torch.equal(found, found.T)


@pytest.mark.parametrize("in_bf16", [False, True])
def test_activations_to_learn_from_are_in_the_dtype_that_is_asked_for(in_bf16):
    seen = []

    def act(x, weight, bias):
        seen.extend((x.dtype, weight.dtype, None if bias is None else bias.dtype))
        return torch.nn.functional.linear(x, weight, bias)

    g = torch.Generator().manual_seed(0)
    first, bias, x = torch.randn(1, 6, 40, generator=g), torch.randn(6, generator=g), torch.randn(9, 40, generator=g)
    none = torch.zeros(0, dtype=torch.int64)
    batch = ExpertBatch(
        range(1), (first, torch.zeros(1, 40, 6)), ((bias, None),), (), x, none, ExpertForward(act, act), in_bf16, 1, 2
    )
    found, exact = batch.learnt_act(0, x), batch.act(0, x)
    assert found.dtype == exact.dtype == torch.float32
    assert seen == [torch.bfloat16 if in_bf16 else torch.float32] * 3 + [torch.float32] * 3
    off = float((found - exact).abs().max())
    assert 1e-3 < off < 0.15 if in_bf16 else off == 0
