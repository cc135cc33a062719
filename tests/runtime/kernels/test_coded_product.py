"""Products that decode their matrices as they come to them: the bits of decoding first, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moepack.pack.codec.exponent import TILE
from moepack.pack.codec.exponent_fast import encode
from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.forms import handle, make_forms

native = pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
codec = pytest.importorskip("moepack.pack.codec.exponent_native", exc_type=OSError)
BF16 = Version.of("bf16")
SHAPES = [(1536, 256), (100, 96), (64, 48), (257, 64), (64, 8192), (3, 300)]


class Experts:
    """Some experts of one matrix, coded, and room for them."""

    def __init__(self, rows: int, cols: int, experts: int) -> None:
        self.matrices = (Matrix("m", rows, cols),)
        self.size = BF16.resident_size(self.matrices)
        generator = torch.Generator().manual_seed(rows)
        self.weights = [torch.randn(rows, cols, generator=generator).bfloat16() for _ in range(experts)]
        self.coded = [encode(w.view(torch.uint16).numpy()) for w in self.weights]
        self.room = torch.full((experts, -(-self.size // 64) * 64 + 64), 0xAB, dtype=torch.uint8)
        shift = -self.room.data_ptr() % 64
        self.at = [self.room.data_ptr() + shift + e * self.room.shape[1] for e in range(experts)]
        self.shift = shift
        self.forms = native.LayerForms(self.matrices, [BF16])
        self.table = np.array([handle(at, 0) for at in self.at], np.uint64)

    def opened(self, coded: list[Any] | None = None) -> tuple[Any, list[Any]]:
        m = self.matrices[0]
        low = make_forms(self.matrices, BF16)[0].low
        found = [codec.open_coded(c, m.weights, at + low) for c, at in zip(coded or self.coded, self.at, strict=True)]
        made = native.CodedExperts(len(found))
        made.opened[:] = [o.address for o in found]
        return made, found

    def decoded(self, expert: int) -> torch.Tensor:
        start = self.shift + expert * self.room.shape[1]
        count = self.matrices[0].weights
        return self.room.view(-1)[start : start + 2 * count].view(torch.bfloat16).view(self.weights[0].shape)

    def fill(self) -> None:
        for e, w in enumerate(self.weights):
            self.decoded(e).copy_(w)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_of_decoding_first(shape: tuple[int, int], tokens: int, threads: int) -> None:
    """One slot an expert, some, so many that tiles run or threads prepare for themselves; whole and partial tiles."""
    made = Experts(*shape, 5)
    m = made.matrices[0]
    generator = torch.Generator().manual_seed(tokens)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(tokens, m.cols, generator=generator).to(dtype)
        index = torch.randint(0, 4, (tokens, 2), generator=generator)  # nobody asks for the last
        outs = []
        for coded in (True, False):
            made.room.fill_(0xAB)
            found, keep = made.opened() if coded else (None, [])
            if not coded:
                made.fill()
            out = torch.zeros(2 * tokens, m.rows, dtype=dtype)
            native.product(made.forms, 0, made.table, x, index, out, threads=threads, coded=found)
            outs.append(out)
            del keep
            if found is not None:
                assert found.seconds > 0
                for e in range(5):
                    same = torch.equal(made.decoded(e), made.weights[e])
                    assert same == (e in index), f"expert {e}"
        assert torch.equal(*outs)


def test_levels_agree() -> None:
    made, outs = Experts(1536, 256, 3), []
    x, index = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor([[0, 1, 2]])
    for level in range(codec.BEST + 1):
        codec.use_level(level)
        try:
            made.room.fill_(0)
            found, keep = made.opened()
            outs.append(torch.zeros(3, 1536, dtype=torch.bfloat16))
            native.product(made.forms, 0, made.table, x, index, outs[-1], coded=found)
            del keep
        finally:
            codec.use_level()
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("tokens", [1, 100])
def test_bad_codes_are_told_apart(tokens: int) -> None:
    """Which expert it was, whether tiles are decoded one by one or all before."""
    made = Experts(1536, 256, 3)
    bad = [c.copy() for c in made.coded]
    tiles = -(-1536 * 256 // TILE)
    bad[1][48 + 8 * (tiles + 1) + 400 :][:4000] ^= 0x5A  # in the stream
    found, keep = made.opened(bad)
    x, index = torch.randn(tokens, 256).bfloat16(), torch.tensor([[0, 1, 2]] * tokens)
    out = torch.zeros(3 * tokens, 1536, dtype=torch.bfloat16)
    with pytest.raises(native.BadCodes, match=r"tile \d+") as caught:
        native.product(made.forms, 0, made.table, x, index, out, threads=2, coded=found)
    assert caught.value.expert == 1 and len(keep) == 3


def test_what_is_not_well_formed_is_not_opened() -> None:
    """As exponent.parse: sizes, offsets, code lengths; and what is too small to be read past its end."""
    good = Experts(64, 48, 1).coded[0]
    at = np.zeros(64 * 48, np.uint16).ctypes.data
    assert codec.open_coded(good, 64 * 48, at) is not None
    assert codec.open_coded(good, 64 * 48 + 1, at) is None and codec.open_coded(good[:-1], 64 * 48, at) is None
    for where in (0, 4, 8, 12, 32, 48, 52, 56, 60):
        bad = good.copy()
        bad[where] ^= 0x11
        assert codec.open_coded(bad, 64 * 48, at) is None, where
    tiny = encode(np.arange(64, dtype=np.uint16))
    assert codec.open_coded(tiny, 64, at) is None, "its stream is not followed by enough"
    assert codec.open_coded(np.zeros(10, np.uint8), 64, at) is None
