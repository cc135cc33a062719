"""Products in BF16 on a processor without instructions for them: what float32 gives, rounded once, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moepack.calibrate import widened as room

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def another_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on one without the instructions; a few hundred values are converted at once."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(room, "MOST", 40_000)
    torch.manual_seed(0)
    return iter([None])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def close(got: Tensor, exact: Tensor) -> None:
    """Of BF16, and within its rounding of the exact product, which sums in float64."""
    assert got.dtype == torch.bfloat16 and got.shape == exact.shape
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 96, 333])
@pytest.mark.parametrize("tokens", [(128,), (3, 257)])
def test_linear(tokens: tuple[int, ...], rows: int) -> None:
    layer = torch.nn.Linear(200, rows, dtype=torch.bfloat16).requires_grad_(False)
    x = drawn(*tokens, 200)
    with room.widened(CPU, torch.bfloat16):
        got = layer(x)
    close(got, x.double() @ layer.weight.double().T + layer.bias.double())


def test_grouped_product() -> None:
    x, weight = drawn(700, 72), drawn(5, 40, 72)
    ends = torch.tensor([0, 300, 310, 600, 700], dtype=torch.int32)  # none, many, few
    with room.widened(CPU, torch.bfloat16):
        got = torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    exact, start = torch.zeros(700, 40, dtype=torch.float64), 0
    for group, end in enumerate(ends.tolist()):
        exact[start:end], start = x[start:end].double() @ weight[group].double().T, end
    close(got, exact)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_products_of_eager_attention(lead: tuple[int, ...]) -> None:
    q, k = drawn(*lead, 150, 64), drawn(*lead, 190, 64)
    with room.widened(CPU, torch.bfloat16):
        for got in (torch.matmul(q, k.transpose(-1, -2)), q @ k.transpose(-1, -2)):
            close(got, q.double() @ k.double().transpose(-1, -2))


def test_axes_are_broadcast_as_by_torch() -> None:
    q, k = drawn(2, 1, 140, 16), drawn(1, 3, 16, 20)
    with room.widened(CPU, torch.bfloat16):
        close(torch.matmul(q, k), q.double() @ k.double())


@pytest.mark.parametrize(
    ("dtype", "supported", "taken"), [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)]
)  # fmt: skip
def test_taken_over_only_where_torch_would_emulate(
    dtype: torch.dtype, supported: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    calls: list[int] = []
    monkeypatch.setattr(room, "product", lambda *args: calls.append(1) or args[0])
    with room.widened(CPU, dtype):
        torch.nn.functional.linear(drawn(128, 8).to(dtype), drawn(8, 8).to(dtype))
    assert bool(calls) == taken
    assert room.widened_bytes(CPU, dtype, 100) == 1200 * taken and room.widened_bytes(CPU, dtype, 1 << 40) < 1 << 20


def test_few_tokens_and_other_dtypes_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "product", lambda *args: pytest.fail("taken over"))
    with room.widened(CPU, torch.bfloat16):
        torch.nn.functional.linear(drawn(room.FEWEST - 1, 8), drawn(8, 8))
        torch.nn.functional.linear(torch.randn(500, 8), torch.randn(8, 8))
        torch.matmul(torch.randn(500, 8), torch.randn(8, 8))


def test_no_more_is_converted_at_once_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = Tensor.float

    def seen(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(Tensor, "float", seen)
    for shape in ((1000, 30, 4000), (1000, 300, 20), (130, 310, 900)):
        tokens, columns, rows = shape
        room.product(drawn(tokens, columns), drawn(rows, columns))
    assert max(sizes) <= room.MOST and len(sizes) > 20
