"""A matrix in trellis codes: rotation, error feedback in blocks of columns, Viterbi's algorithm in C."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moepack.pack.codec.rotation import rotate
from moepack.pack.spec import Rotation

TILE = 16  # rows and columns of a tile, whose 256 weights are one sequence
DAMP = 0.02
GAINS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1)  # of targets before they are coded; the best on the first tiles is kept


@cache
def library(folder: Path) -> ctypes.CDLL:
    """The C part, compiled into `folder` for AVX2."""
    made = folder / "trellis.so"
    source = Path(__file__).with_name("trellis.c")
    command = ["cc", "-O3", "-funroll-loops", "-mavx2", "-mfma", "-shared", "-fPIC", "-o", str(made), str(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def integers(states: Tensor, code: str) -> Tensor:
    """The value of each state as an integer, int64: nearly normal values, by one of two computed codes.

    `1MAD` is QTIP's: the sum of the bytes of a product of 32 bits. `halves` takes the two halves of a product of 16 by
    16 bits, and averages their bytes: AVX2 multiplies twice as many numbers of 16 bits at a time.
    """
    if code == "1MAD":
        hashed = (states.to(torch.int64) * 34038481 + 76625530) & 0xFFFFFFFF
        parts = [(hashed >> shift) & 0xFF for shift in (0, 8, 16, 24)]
        return torch.stack(parts).sum(0) - 510
    product = states.to(torch.int64) * 27107
    pairs = [((product >> shift & 0xFF) + (product >> shift + 16 & 0xFF) + 1) >> 1 for shift in (0, 8)]
    return pairs[0] + pairs[1] - 255


def values(state_bits: int, code: str) -> Tensor:
    """The value of each state, float32, of mean 0 and variance 1."""
    found = integers(torch.arange(1 << state_bits), code).float()
    return (found - found.mean()) / found.std()


def fit(lib: ctypes.CDLL, targets: Tensor, state_bits: int, bits: int, code: str = "1MAD") -> Tensor:
    """The nearest sequences, float32 like `targets` [sequences, length]. A first state costs nothing here."""
    targets = targets.contiguous()
    fitted = torch.empty_like(targets)
    table = np.empty((1 << state_bits) + 16, np.float32)
    start = -table.ctypes.data // 4 % 16  # to a multiple of 64 bytes
    table = table[start : start + (1 << state_bits)]
    table[:] = values(state_bits, code).numpy()
    pointers = (ctypes.c_void_p(targets.data_ptr()), ctypes.c_void_p(fitted.data_ptr()))
    shape = (ctypes.c_long(targets.shape[0]), ctypes.c_long(targets.shape[1]))
    if lib.trellis_fit(*pointers, *shape, state_bits, bits, ctypes.c_void_p(table.ctypes.data)):
        raise MemoryError("the trellis' states do not fit in memory")
    return fitted


def coded(lib: ctypes.CDLL, weight: Tensor, moments: Tensor, state_bits: int, bits: int) -> Tensor:
    """What comes back of a matrix, float32 [rows, cols], fitted to moments float32 [cols, cols] of its inputs.

    Both sides are rotated (QuIP#, Tseng et al., 2024, section 3), rows are scaled to variance 1, and columns are coded
    in blocks with error feedback (BlockLDLQ, section 4.1). A second pass visits each block once more, all others fixed,
    and keeps what lowers the error.
    """
    rows, cols = weight.shape
    left = Rotation(_block(rows), 1)
    right = Rotation(_block(cols), 2)
    turned = rotate(rotate(weight, right).T.contiguous(), left).T.contiguous()
    square = rotate(rotate(moments, right).T.contiguous(), right)
    square = (square + square.T) / 2
    square.diagonal().add_(DAMP * square.diagonal().mean())
    scale = turned.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)
    exact = turned / scale
    gain = _gain(lib, exact[:, :TILE], state_bits, bits)

    def nearest(block: Tensor) -> Tensor:
        tiles = block.reshape(-1, TILE * TILE) * gain
        return fit(lib, tiles, state_bits, bits).reshape(-1, TILE) / gain

    upper = torch.linalg.cholesky(square.flip(0, 1)).flip(0, 1)  # square = upper upper^T
    error = torch.zeros_like(exact)
    for start in range(0, cols, TILE):
        here = slice(start, start + TILE)
        feed = torch.linalg.solve_triangular(upper[here, here], upper[:start, here], upper=True, left=False)
        error[:, here] = exact[:, here] - nearest(exact[:, here] + error[:, :start] @ feed)
    for start in range(0, cols, TILE):
        here = slice(start, start + TILE)
        inside = square[here, here]
        old = error[:, here].clone()
        slope = error @ square[:, here] - old @ inside
        new = exact[:, here] - nearest(exact[:, here] + torch.linalg.solve(inside, slope, left=False))
        change = ((new @ inside) * new - (old @ inside) * old + 2 * (new - old) * slope).reshape(-1, TILE * TILE)
        better = (change.sum(1) < 0).repeat_interleave(TILE)[:, None]
        error[:, here] = torch.where(better, new, old)
    made = (exact - error) * scale
    back: Tensor = rotate(rotate(made.T.contiguous(), left, back=True).T.contiguous(), right, back=True)
    return back


def _block(size: int) -> int:
    """The largest power of two up to 512 that divides `size`."""
    return min(512, size & -size)


def _gain(lib: ctypes.CDLL, block: Tensor, state_bits: int, bits: int) -> float:
    tiles = block.reshape(-1, TILE * TILE)[:8]
    wrong = [float((fit(lib, tiles * gain, state_bits, bits) / gain - tiles).square().sum()) for gain in GAINS]
    return GAINS[wrong.index(min(wrong))]
