"""Products in BF16 on a processor without instructions for them: the float32 result, rounded once, for every caller."""

import pytest
import torch
from support import spy
from torch import Tensor

from moepack.calibrate import products as room

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def another_processor(monkeypatch):
    """As on one without the instructions; a few hundred values are converted at once."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(room, "MOST", 40_000)
    torch.manual_seed(0)


@pytest.fixture
def taken(monkeypatch):
    """The tokens of every replaced product."""
    tokens = []
    spy(monkeypatch, room, "product", lambda x, *_: tokens.append(x.shape[:-1].numel()))
    return tokens


def drawn(*shape):
    return torch.randn(shape).bfloat16()


def close(got, exact):
    """Of BF16, and within its rounding of the exact product, which sums in float64."""
    assert got.dtype == torch.bfloat16 and got.shape == exact.shape
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 96, 333])
@pytest.mark.parametrize("tokens", [(128,), (3, 257)])
def test_linear(tokens, rows, taken):
    layer = torch.nn.Linear(200, rows, dtype=torch.bfloat16).requires_grad_(False)
    x = drawn(*tokens, 200)
    with room.widened(CPU, torch.bfloat16):
        got = layer(x)
    close(got, x.double() @ layer.weight.double().T + layer.bias.double())
    assert taken == [x.shape[:-1].numel()]


def test_grouped_product(taken):
    x, weight = drawn(700, 72), drawn(5, 40, 72)
    ends = torch.tensor([0, 300, 310, 600, 700], dtype=torch.int32)  # none, many, few
    with room.widened(CPU, torch.bfloat16):
        got = torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    exact, start = torch.zeros(700, 40, dtype=torch.float64), 0
    for group, end in enumerate(ends.tolist()):
        exact[start:end], start = x[start:end].double() @ weight[group].double().T, end
    close(got, exact)
    assert taken == [300, 290], "few tokens are multiplied as they are"


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_products_of_eager_attention(lead, taken):
    q, k = drawn(*lead, 150, 64), drawn(*lead, 190, 64)
    with room.widened(CPU, torch.bfloat16):
        for got in (torch.matmul(q, k.transpose(-1, -2)), q @ k.transpose(-1, -2)):
            close(got, q.double() @ k.double().transpose(-1, -2))
    assert taken == [150] * 2 * q.shape[:-2].numel()


@pytest.mark.parametrize(
    ("dtype", "supported", "taken_over"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_taken_over_only_where_torch_would_emulate(dtype, supported, taken_over, taken, monkeypatch):
    monkeypatch.setattr("moepack.pack.isa.ONEDNN_BOUND", "")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    with room.widened(CPU, dtype):
        torch.nn.functional.linear(drawn(128, 8).to(dtype), drawn(8, 8).to(dtype))
    assert bool(taken) == taken_over
    assert room.widened_bytes(CPU, dtype, 100) == 1200 * taken_over
    assert room.widened_bytes(CPU, dtype, 1 << 40) < 1 << 20


def test_no_more_is_converted_at_once_than_is_said(monkeypatch):
    sizes = []
    spy(monkeypatch, Tensor, "float", lambda tensor: sizes.append(tensor.numel()))
    for tokens, columns, rows in ((1000, 30, 4000), (1000, 300, 20), (130, 310, 900)):
        room.product(drawn(tokens, columns), drawn(rows, columns))
    assert max(sizes) <= room.MOST and len(sizes) > 20


def test_a_model_s_experts_and_linears_are_taken_over(taken):
    """As transformers runs them: none of its products of many tokens is left to torch."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=48, num_experts=2, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config).bfloat16().requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(0, 0.1)
    x = drawn(1, 200, 64)
    plain = block(x)
    with room.widened(CPU, torch.bfloat16):
        got = block(x)
    assert sorted(taken) == [200] * 5, "the router, and two matrices of two experts"
    torch.testing.assert_close(got, plain, rtol=2**-6, atol=2e-3)
