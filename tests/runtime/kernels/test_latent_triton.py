"""Attention of one new token over latents, against torch's in float64."""

import pytest
import torch

from moepack.runtime.kernels import attend_triton
from moepack.runtime.kernels.attend_triton import FIELDS, SEQUENCES
from moepack.runtime.kernels.latent_triton import attend, attend_rows, fits, takes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device
LEAST = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensors(sequences, heads, rank, rotated, room, dtype):
    """Lifted queries and their rotated parts, whose heads lie apart, latents and rotated keys; NaN is in no key."""
    draw = torch.Generator().manual_seed(room)
    shapes = (heads, sequences, rank), (sequences, heads, rotated + 8), (sequences, 1, room, rank)
    made = [torch.randn(s, generator=draw).to(DEVICE, dtype) for s in (*shapes, (sequences, 1, room, rotated))]
    return made[0].transpose(0, 1), made[1][..., 8:], *made[2:]


def wanted(query, asked, latents, rotated, seen=None):
    keys = torch.cat((latents, rotated), -1).double()
    score = torch.cat((query, asked), -1).double() @ keys[:, 0].transpose(1, 2) * 0.3
    score = score if seen is None else score.masked_fill(~seen, float("-inf"))
    return score.softmax(-1) @ latents[:, 0].double()


@pytest.mark.parametrize("dtype", LEAST)
def test_it_is_attention(dtype, monkeypatch):
    """Lengths about the borders of steps and programs; beyond them, where NaN is, nothing is read."""
    monkeypatch.setattr(attend_triton, "PROGRAMS", 16)  # the interpreter runs one after another
    for sequences, heads, rank, rotated, room in ((1, 20, 64, 16, 200), (3, 4, 32, 32, 70)):
        given = tensors(sequences, heads, rank, rotated, room, dtype)
        mask = torch.rand(sequences, 1, 1, room, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
        mask[..., 0] = True
        assert fits(rank, rotated) and takes(*given[2:], mask)
        for length in (1, 32, 33, room - 1, room, room + 5):
            held = [t.clone() for t in given[2:]]
            for part in held:
                part[:, :, length:] = float("nan")
            kept = [t[:, :, :length] for t in given[2:]]
            for seen in (None, mask):
                of = None if seen is None else seen[:, 0, :, :length]
                got = attend(*given[:2], *held, torch.tensor([length], device=DEVICE), seen, 0.3)
                want = wanted(*given[:2], *kept, of)
                assert got.dtype == dtype and (got - want).norm() <= LEAST[dtype] * want.norm(), length
        want = wanted(*given)
        assert (attend(*given, None, None, 0.3) - want).norm() <= LEAST[dtype] * want.norm(), "all of the room"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_memory_of_their_own(dtype, monkeypatch):
    monkeypatch.setattr(attend_triton, "PROGRAMS", 16)
    lengths, held = (1, 32, 130), []
    rows = torch.zeros(FIELDS, SEQUENCES.value, dtype=torch.int64)
    query, asked, _, _ = tensors(3, 4, 32, 16, 10, dtype)
    for at, length in enumerate(lengths):
        _, _, *made = tensors(1, 4, 32, 16, length + 7, dtype)
        held.append(made)
        for part in made:
            part[:, :, length:] = float("nan")
        rows[:, at] = torch.tensor([made[0].data_ptr(), made[1].data_ptr(), length, length + 7])
    got = attend_rows(query, asked, rows.to(DEVICE), 0.3)
    for at, length in enumerate(lengths):
        want = wanted(query[at : at + 1], asked[at : at + 1], *(t[:, :, :length] for t in held[at]))
        assert (got[at] - want[0]).norm() <= LEAST[dtype] * want.norm(), length


def test_what_it_does_not_take():
    _, _, latents, rotated = tensors(2, 4, 32, 16, 10, torch.float32)
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool, device=DEVICE)
    assert takes(latents, rotated, mask) and takes(latents, rotated, None)
    assert not takes(latents[:, :, :9], rotated[:, :, :9], None) and not takes(latents, rotated, mask.float())
    assert not fits(96, 16) and not fits(1024, 64) and not fits(512, 256)
