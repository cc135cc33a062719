"""Attention of one new token over a static cache, against torch's in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from moepack.runtime.kernels.attend_triton import attend, takes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device
LEAST = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensors(sequences: int, heads: int, of: int, size: int, room: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(room)
    shapes = [(sequences, heads * of, 1, size), *[(sequences, heads, room, size)] * 2]
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


@pytest.mark.parametrize("dtype", LEAST)
@pytest.mark.parametrize(("sequences", "heads", "of", "size"), [(1, 4, 8, 128), (3, 2, 1, 32), (2, 1, 16, 64)])
def test_it_is_attention(sequences: int, heads: int, of: int, size: int, dtype: torch.dtype) -> None:
    """Lengths about the borders of steps and programs; beyond them, where NaN is, nothing is read."""
    for room, share, masked in itertools.product((70, 200), (0.01, 0.5, 0.92, 1, 1.05), (False, True)):
        length = max(1, round(room * share))
        query, keys, values = tensors(sequences, heads, of, size, room, dtype)
        keys[:, :, length:], values[:, :, length:] = float("nan"), float("nan")
        mask = None
        if masked:
            mask = torch.zeros(sequences, 1, 1, room + 6, device=DEVICE, dtype=dtype)
            mask[0, ..., : length // 3] = float("-inf")  # padding on the left
        assert takes(query, keys, values, mask)
        got = attend(query, keys, values, torch.tensor([length], device=DEVICE), mask, 0.3)
        length = min(length, room)
        wide = [t[:, :, :length].double().repeat_interleave(of, 1) for t in (keys, values)]
        score = query.double() @ wide[0].transpose(2, 3) * 0.3
        score = score if mask is None else score + mask[..., :length].double()
        want = (score.softmax(-1) @ wide[1]).transpose(1, 2)
        assert got.shape == want.shape and got.dtype == dtype
        assert (got - want).norm() <= LEAST[dtype] * want.norm(), (room, length, masked)


def test_what_it_does_not_take() -> None:
    query, keys, values = tensors(2, 2, 4, 64, 70, torch.float32)
    mask = torch.zeros(2, 1, 1, 70, device=DEVICE)
    assert takes(query, keys, values, mask) and takes(query, keys, values, mask[:1])
    for case in (
        (query.expand(2, 8, 2, 64), keys, values, None), (query[:1], keys, values, None),
        (query.half(), keys, values, None), (query, keys, values[..., :32], None), (query[:, :7], keys, values, None),
        (query, keys.transpose(1, 2).contiguous().transpose(1, 2), values, None), (query, keys, values, mask.bool()),
        (query, keys, values, mask[..., :69]), (query, keys, values, mask.expand(2, 1, 2, 70)),
        (query[..., :48].contiguous(), keys[..., :48].contiguous(), values[..., :48].contiguous(), None),
        (*(t.repeat(1, 1, 1, 4) for t in (query, keys, values)), None),  # 256 float32 numbers a head
    ):  # fmt: skip
        assert not takes(*case)
