"""Normalisations by one call: the same numbers as the module's, or the module itself."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from moepack.runtime.dense.norms import serve_norms

F = nn.functional


class OddRMSNorm(nn.Module):
    """No form of the kernel's: it takes the greatest for the mean square."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        return self.weight * x / x.abs().amax(-1, keepdim=True)


def apart(made, wanted):
    """Units in the last place between BF16 numbers."""
    return (made.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()


@pytest.mark.parametrize("kind", [Qwen3MoeRMSNorm, GptOssRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("cols", [33, 64, 2048])
def test_a_normalisation_is_what_its_module_makes(kind, cols):
    torch.manual_seed(cols)
    model = nn.ModuleList([kind(cols)]).bfloat16().requires_grad_(False)
    model[0].weight.data = torch.randn(cols).bfloat16()
    x = [(torch.randn(n, cols) * n).bfloat16() for n in (1, 7, 300)]
    wanted = [model[0](v) for v in x]
    assert serve_norms(model) == {kind.__name__: 1} and type(model[0]) is not kind and isinstance(model[0], kind)
    for v, y in zip(x, wanted, strict=True):
        units = apart(model[0](v), y)
        assert units.max() <= 2 and (units == 0).float().mean() > 0.99
    turned = x[2].t().contiguous().t()
    assert not turned.is_contiguous() and torch.equal(model[0](turned), model[0](x[2]))
    assert torch.equal(model[0](x[2].float()), kind.forward(model[0], x[2].float())), "the module's own"


def test_a_module_that_does_something_else_stays():
    model = nn.ModuleList([OddRMSNorm(), Qwen3MoeRMSNorm(64)])
    assert serve_norms(model) == {}, "float32 weights"
    model.bfloat16()
    assert serve_norms(model) == {"Qwen3MoeRMSNorm": 1} and type(model[0]) is OddRMSNorm


class OffsetRMSNorm(OddRMSNorm):
    """Adds to its weight what an attribute says, and a bias."""

    def __init__(self, offset, bias=False):
        super().__init__()
        self.offset, self.bias = offset, nn.Parameter(torch.zeros(64)) if bias else None

    def forward(self, x):
        wide = F.rms_norm(x.float(), (64,), self.offset + self.weight.float(), self.eps)
        return (wide if self.bias is None else wide + self.bias.float()).to(x.dtype)


def test_modules_of_one_class_that_differ():
    """An offset of 1 is a form of the kernel, half is none; a bias counts, though it is still zero."""
    model = nn.ModuleList([OffsetRMSNorm(1.0), OffsetRMSNorm(0.5), OffsetRMSNorm(1.0, bias=True), OffsetRMSNorm(1.0)])
    assert serve_norms(model.bfloat16()) == {"OffsetRMSNorm": 2}
    assert [type(m) is OffsetRMSNorm for m in model] == [False, True, True, False]


class FlatRMSNorm(OddRMSNorm):
    """Normalises all heads of a token together, where rows are given as heads."""

    def forward(self, x):
        dims = (-2, -1) if x.dim() == 4 else (-1,)
        wide = x.float() * torch.rsqrt(x.float().square().mean(dims, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


def test_rows_of_another_shape_than_they_are_served_in():
    """[rows, cols] alone does not show what a module does with [batch, tokens, heads, cols]."""
    assert serve_norms(nn.ModuleList([FlatRMSNorm()]).bfloat16()) == {}


class GatedRMSNorm(OddRMSNorm):
    """Without a gate a normalisation like others."""

    def forward(self, x, gate=None):
        made = F.rms_norm(x.float(), (64,), self.weight.float(), self.eps).to(x.dtype)
        return made if gate is None else made * F.silu(gate)


class BrokenRMSNorm(OddRMSNorm):
    def forward(self, x):
        return None.to(x)


def test_what_takes_more_than_rows_or_fails_stays():
    model = nn.ModuleList([GatedRMSNorm(), BrokenRMSNorm()]).bfloat16()
    assert serve_norms(model) == {}
    assert model[0](torch.ones(1, 64).bfloat16(), torch.ones(1, 64).bfloat16()).isfinite().all()


def test_weights_of_ones_do_not_decide_the_form():
    model = nn.ModuleList([GptOssRMSNorm(64), GptOssRMSNorm(64)]).bfloat16().requires_grad_(False)
    model[1].weight.data = torch.randn(64).bfloat16()
    x = torch.randn(50, 64).bfloat16()
    wanted = model[1](x)
    assert serve_norms(model) == {"GptOssRMSNorm": 2}
    units = apart(model[1](x), wanted)
    assert units.max() <= 1 and (units == 0).float().mean() > 0.99


def test_a_normalisation_that_learns_is_torchs():
    model = nn.ModuleList([Qwen3MoeRMSNorm(64)]).bfloat16()
    serve_norms(model)
    model[0](torch.ones(2, 64).bfloat16()).sum().backward()
    assert model[0].weight.grad is not None
