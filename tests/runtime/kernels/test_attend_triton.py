"""Attention of one new token over a static cache, against torch's in float64."""

import itertools

import pytest
import torch

from moepack.runtime.kernels import attend_triton
from moepack.runtime.kernels.attend_triton import FIELDS, SEQUENCES, append, attend, attend_rows, takes, takes_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device
LEAST = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensors(sequences, heads, of, size, room, dtype):
    generator = torch.Generator().manual_seed(room)
    shapes = [(sequences, heads * of, 1, size), *[(sequences, heads, room, size)] * 2]
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


@pytest.mark.parametrize("dtype", LEAST)
@pytest.mark.parametrize(("sequences", "heads", "of", "size"), [(1, 4, 8, 128), (3, 2, 1, 32), (2, 1, 16, 64)])
def test_it_is_attention(sequences, heads, of, size, dtype):
    """Lengths about the borders of steps and programs; beyond them, where NaN is, nothing is read."""
    cases = itertools.product((70, 200), (0.01, 0.5, 0.92, 1, 1.05))
    for (room, share), masked in zip(cases, itertools.cycle((False, True)), strict=False):  # each share with both
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


@pytest.mark.parametrize(
    ("window", "sinks", "dtype"),
    [(None, False, torch.float32), (50, True, torch.bfloat16), (50, True, torch.float16)],
)
def test_rows_have_memory_of_their_own(window, sinks, dtype, monkeypatch):
    """Lengths about the borders of steps and windows; what is past a length is NaN, and stays so."""
    monkeypatch.setattr(attend_triton, "PROGRAMS", 32)  # the interpreter runs one after another
    heads, of, size, lengths = 2, 3, 32, (1, 50, 51, 64, 130)
    generator, n = torch.Generator().manual_seed(1), len(lengths)
    query = torch.randn(1, heads * of, n, size, generator=generator).to(DEVICE, dtype)
    new = [torch.randn(1, n, heads, size, generator=generator).to(DEVICE, dtype).transpose(1, 2) for _ in range(2)]
    logits = torch.randn(heads * of, generator=generator).to(DEVICE) if sinks else None
    rows, held = torch.zeros(FIELDS, SEQUENCES.value, dtype=torch.int64), []
    for at, length in enumerate(lengths):
        held.append([torch.randn(1, heads, length + 7, size, generator=generator).to(DEVICE, dtype) for _ in range(2)])
        for part in held[-1]:
            part[:, :, length - 1 :] = float("nan")
        rows[:, at] = torch.tensor([held[-1][0].data_ptr(), held[-1][1].data_ptr(), length, length + 7])
    assert takes_rows(query, *new)
    append(*new, rows.to(DEVICE))
    got = attend_rows(query, heads, rows.to(DEVICE), 0.3, window, logits)
    assert got.shape == (1, n, heads * of, size) and got.dtype == dtype
    for at, length in enumerate(lengths):
        for part, added in zip(held[at], new, strict=True):
            assert torch.equal(part[:, :, length - 1], added[:, :, at]) and part[:, :, length:].isnan().all()
        low = 0 if window is None else max(0, length - window)
        keys, values = (t[0, :, low:length].double().repeat_interleave(of, 0) for t in held[at])
        score = (keys @ query[0, :, at, :, None].double())[..., 0] * 0.3
        if logits is not None:
            score = torch.cat([score, logits.double()[:, None]], 1)
        weight = score.softmax(-1)[:, : length - low]
        want = (weight[:, None] @ values)[:, 0]
        assert (got[0, at] - want).norm() <= LEAST[dtype] * want.norm(), length


def test_what_rows_do_not_take():
    query, key, value = (torch.randn(1, h, 3, 64) for h in (8, 2, 2))
    assert takes_rows(query, key, value)
    for case in (
        (query.half(), key, value), (query, key, value[..., :32]), (query[:, :7], key, value),
        (query.repeat(1, 1, 6, 1), key, value), (query.repeat(1, 5, 1, 1), key, value),
    ):  # fmt: skip
        assert not takes_rows(*case)


def test_what_it_does_not_take():
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
