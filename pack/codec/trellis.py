"""The levels of trellis codes (FORMAT.md, "Trellis extents"): the reference for kernels and the search."""

from __future__ import annotations

from typing import Any

Rows = Any  # a NumPy array or a torch tensor of integers, [..., cols]

MEMORY = 8  # codes of a state
FACTOR = 26059  # of 44 tried, the odd number below 2^15 whose levels of all states leave the least error
ZERO = 217  # the mean of all states' levels: the zero point of every group
DEVIATION = 65.59  # the levels' standard deviation


def level_of(state: Rows) -> Rows:
    """The level of each state, 16 bits in integers of at least 32: nearly normal numbers from 0 to 423.

    A product of 16 by 16 bits has four bytes. A level is the mean of bytes 0 and 2 and that of bytes 1 and 3, each
    rounded up, added: what instructions on numbers of 16 and 8 bits make of 16 weights at a time.
    """
    product = state * FACTOR
    even = ((product & 0xFF) + (product >> 16 & 0xFF) + 1) >> 1
    odd = ((product >> 8 & 0xFF) + (product >> 24 & 0xFF) + 1) >> 1
    return even + odd


def states(codes: Rows, bits: int) -> Rows:
    """The state of each weight, from codes of 2 or 3 bits, integers of at least 32 bits [..., cols].

    A state has the low two bits of the last eight codes, the newest on top; the third bits of these codes, the newest
    as bit 7, are added to it without carries. Before the first column all codes are 0.
    """
    state = _window(codes & 3, 2)
    return state if bits == 2 else state ^ _window(codes >> 2, 1)


def _window(codes: Rows, bits: int) -> Rows:
    """The last eight codes of `bits` bits before and at each column, the newest on top."""
    window = codes << 7 * bits
    for columns in (1, 2, 4):
        before = window[..., :-columns] >> columns * bits
        window[..., columns:] = window[..., columns:] | before
    return window


def levels(codes: Rows, bits: int) -> Rows:
    """The level of each weight, shaped as `codes`, integers [..., cols] of at least 32 bits."""
    return level_of(states(codes, bits))
