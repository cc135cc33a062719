"""Normalisations by one call: the same numbers as the module's, or the module itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from moepack.runtime.experts import backends

if backends.backend(torch.device("cpu")) != "native":
    pytest.skip("no compiled kernels", allow_module_level=True)

from moepack.runtime.dense.norms import serve_norms


class OddRMSNorm(nn.Module):
    """No form of the kernel's: it takes the greatest for the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.abs().amax(-1, keepdim=True)


@pytest.mark.parametrize("kind", [Qwen3MoeRMSNorm, GptOssRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("cols", [33, 64, 2048])
def test_a_normalisation_is_what_its_module_makes(kind: type, cols: int) -> None:
    torch.manual_seed(cols)
    model = nn.ModuleList([kind(cols)]).bfloat16().requires_grad_(False)
    model[0].weight.data = torch.randn(cols).bfloat16()
    x = [(torch.randn(n, cols) * n).bfloat16() for n in (1, 7, 300)]
    wanted = [model[0](v) for v in x]
    assert serve_norms(model) == {kind.__name__: 1} and "forward" in model[0].__dict__
    for v, y in zip(x, wanted, strict=True):
        got = model[0](v)
        apart = (got.view(torch.int16).int() - y.view(torch.int16).int()).abs()
        assert apart.max() <= 2 and (apart == 0).float().mean() > 0.99
    for other in (x[2][:, ::2].repeat(1, 2)[:, :cols].t().contiguous().t(), x[2].float()):
        assert torch.equal(model[0](other), type(model[0]).forward(model[0], other)), "the module's own"


def test_a_module_that_does_something_else_stays() -> None:
    model = nn.ModuleList([OddRMSNorm(), Qwen3MoeRMSNorm(64)])
    assert serve_norms(model) == {}, "float32 weights"
    model.bfloat16()
    assert serve_norms(model) == {"Qwen3MoeRMSNorm": 1} and "forward" not in model[0].__dict__
