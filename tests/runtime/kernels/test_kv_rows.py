"""Coded rows of a cache: the bytes of a reference in torch, at every level, and attention that reads them in place."""

import itertools

import pytest
import torch

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from moepack.runtime.kernels.by_torch import attend_by_groups
from moepack.runtime.kernels.dense_native import attend
from moepack.runtime.kernels.kv_rows import GROUPS, CodedRows, coded, opened, plain, row_bytes

COLS = (16, 36, 64, 80, 128, 576)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def groups_of(cols, bits):
    return [(at, min(GROUPS[bits], cols - at)) for at in range(0, cols, GROUPS[bits])]


def turned(x):
    """Sylvester's matrix in blocks of 16 and more, by butterflies."""
    size = min(x.shape[-1] & -x.shape[-1], 256)
    if size < 16:
        return x.float()
    half = 1
    while half < size:
        one, two = x.float().unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([one + two, one - two], -2).flatten(-3)
        half *= 2
    return x.float() * torch.tensor(size**-0.5, dtype=torch.float32)


def coded_by_torch(x, bits):
    x = turned(x) if bits == 4 else x
    codes, scales = [], []
    for at, n in groups_of(x.shape[-1], bits):
        part = x[..., at : at + n].float()
        far = torch.where(part.amax(-1) > -part.amin(-1), part.amax(-1), part.amin(-1))
        scale = (far.abs() / 127 if bits == 8 else far / -8).bfloat16()
        numbers = (part / scale.float()[..., None]).round().clamp(*((-127, 127) if bits == 8 else (-8, 7)))
        numbers = torch.where(part.isfinite().all(-1, True) & (scale != 0)[..., None], numbers, 0).to(torch.int8)
        if bits == 4:
            shifted = (numbers + 8).view(torch.uint8)
            numbers = shifted[..., : n // 2] | shifted[..., n // 2 :] << 4
        codes.append(numbers.view(torch.uint8))
        scales.append(torch.where(part.isfinite().all(-1), scale, torch.nan))
    return torch.cat([*codes, torch.stack(scales, -1).view(torch.uint8)], -1)


def opened_by_torch(rows, cols, bits, dtype):
    out = []
    scales = rows[..., cols * bits // 8 :].contiguous().view(torch.bfloat16).float()
    for number, (at, n) in enumerate(groups_of(cols, bits)):
        part = rows[..., at * bits // 8 : (at + n) * bits // 8].contiguous()
        codes = part.view(torch.int8).float() if bits == 8 else torch.cat([part & 15, part >> 4], -1).float() - 8
        out.append(codes * scales[..., number : number + 1])
    whole = torch.cat(out, -1)
    return (turned(whole) if bits == 4 else whole).to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("cols", COLS)
def test_bytes_and_numbers_are_the_references(cols, bits):
    """Every dtype, zeros, small numbers, and numbers that are not finite, of which the group is lost, not the row."""
    for dtype in DTYPES:
        x = (3 * torch.randn(2, 3, 50, cols, generator=torch.Generator().manual_seed(cols))).to(dtype)
        x[0, 0, 3] = 0
        x[0, 1, 2] *= 1e-3
        x[1, 0, 0, 0] = torch.inf
        x[1, 0, 1, -1] = torch.nan
        rows = coded(x.transpose(1, 2).contiguous().transpose(1, 2), bits)
        assert rows.shape == (2, 3, 50, row_bytes(cols, bits))
        assert torch.equal(rows, coded_by_torch(x, bits))
        for wanted in DTYPES:
            got, want = opened(rows, cols, bits, wanted), opened_by_torch(rows, cols, bits, wanted)
            assert torch.equal(got.nan_to_num(777), want.nan_to_num(777))
        numbers = opened(rows, cols, bits, torch.float32)
        sizes = [n for _, n in groups_of(cols, bits)]
        lost = numbers[1, 0, :2].isnan().sum(-1).tolist()
        assert lost == [sizes[0], sizes[-1]] if bits == 8 else min(lost) >= min(sizes)  # rotation spreads them
        error = (numbers - x.float())[0].square().mean().sqrt() / x[0].float().square().mean().sqrt()
        assert error <= (0.0065 if bits == 8 else 0.09)


SHAPES = (
    # batch, heads, groups, tokens, length, numbers of keys, of their second part, of values
    (1, 8, 2, 1, 700, 128, 0, 128),
    (2, 4, 4, 3, 300, 64, 0, 64),
    (1, 16, 1, 1, 2300, 512, 64, 512),
    (1, 4, 2, 5, 1300, 80, 0, 96),
    (2, 4, 1, 2, 90, 36, 0, 20),
)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 8), (4, 4), (8, 4), (16, 8)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_reads_them_as_their_numbers(shape, key_bits, value_bits):
    batch, heads, groups, tokens, length, cols, second, out = shape
    random = torch.Generator().manual_seed(length)

    def made(*sizes):
        return torch.randn(batch, *sizes, generator=random).bfloat16()

    def cached(x, bits):
        return x if bits == 16 else CodedRows(coded(x, bits), x.shape[-1], bits, x.dtype)

    query, key = made(heads, tokens, cols), cached(made(groups, length, cols), key_bits)
    value = cached(made(groups, length, out), value_bits)
    if second:  # a latent's two parts; the first is also the values
        query, turned = (query, made(heads, tokens, second)), cached(made(groups, length, second), 8)
        got, want = attend(query, (key, turned), key, 0.1), attend(query, (plain(key), plain(turned)), plain(key), 0.1)
    else:
        got, want = attend(query, key, value, 0.1), attend(query, plain(key), plain(value), 0.1)
    if 4 in (key_bits, value_bits):  # queries and results are rotated in place of the rows, and rounded
        assert (got - want).abs().max() <= 0.02 * want.abs().max()
    else:
        assert torch.equal(got, want)
    assert torch.equal(attend(query, key if not second else (key, turned), key if second else value, 0.1, 2), got)


def test_anything_else_sees_numbers():
    """Whatever a family's code does with what its cache returns."""
    x = torch.randn(1, 2, 9, 32).bfloat16()
    rows = CodedRows(coded(x, 8), 32, 8, x.dtype)
    numbers = plain(rows)
    assert type(numbers) is torch.Tensor and rows.shape == x.shape and rows.dtype == x.dtype
    for run in (
        lambda t: t.repeat_interleave(2, dim=1),
        lambda t: t[:, :, 2:5].transpose(2, 3),
        lambda t: torch.cat([t, t], dim=-1),
        lambda t: torch.nn.functional.scaled_dot_product_attention(x, t, t),
    ):
        assert torch.equal(run(rows), run(numbers))
    for a, b in itertools.pairwise((rows, numbers, rows)):
        assert torch.equal(a, b)


def test_keys_of_several_groups_are_opened_once(monkeypatch):
    """The fault: all keys were opened again for each group of heads."""
    x = torch.randn(1, 4, 9, 32).bfloat16()
    query = torch.randn(1, 8, 3, 32).bfloat16()
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool).tril_(6)
    rows = CodedRows(coded(x, 8), 32, 8, x.dtype)
    numbers = plain(rows)
    count = []
    monkeypatch.setattr(CodedRows, "numbers", lambda of: count.append(of) or opened(of.rows, 32, of.bits, of.dtype))
    assert torch.equal(attend_by_groups(query, rows, rows, mask), attend_by_groups(query, numbers, numbers, mask))
    assert len(count) == 2
