"""What is compared: for each scheme, how an expert's first matrix and its `down` are stored. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.ggml_types import TYPES
from benchmarks.peers.worker import Worker
from moepack.pack.codec.rotation import rotate
from moepack.pack.spec import Matrix, Version
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import DEFAULT, quantise_all

from .trial import Trial, gaussian_levels, largest_rotation, rotated_moments

GROUP = 64  # of today's versions
WIDTHS = (4, 3, 2, 1)
TODAY = tuple(f"w{b}" for b in WIDTHS)
MIXED = ("w4d5", "w3d4", "w2d3", "w1d2")
TURNED = " rotated"  # behind a version's name
GGML = ("Q4_K", "IQ4_XS", "IQ4_NL", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S")


@dataclass(frozen=True)
class Side:
    """One matrix: bits a weight by columns, and values by weights and moments."""

    size: Callable[[int], float]
    values: Callable[[Tensor, Tensor], Tensor]
    block: int = 1  # columns come in multiples of it


@dataclass(frozen=True)
class Scheme:
    """Both matrices."""

    who: str
    name: str
    sides: tuple[Side, Side]

    def fits(self, matrix: int, cols: int) -> bool:
        """Whether a matrix can be stored so."""
        return cols % self.sides[matrix].block == 0


def of_version(
    who: str, name: str, group: int = 0, method: str = DEFAULT, rotated: bool = False, scale_bits: int = 16
) -> Scheme:
    """A version of moepack's, made by a method; `rotated`: its down for rotated inputs."""
    version = Version.of(name, group, scale_bits=scale_bits)

    def size(matrix: int, cols: int) -> float:
        m = Matrix("m", 16, cols)
        return 8 * sum(s.size for s in version.at(matrix).sections((m,))) / m.weights

    def values(matrix: int, weight: Tensor, moments: Tensor) -> Tensor:
        turn = largest_rotation(weight.shape[-1]) if rotated and matrix == 1 else None
        if turn is not None:
            weight, moments = rotate(weight, turn), rotated_moments(moments, turn)
        made = dequantise(quantise_all(method, weight, moments, [version], matrix=matrix)[version], version.at(matrix))
        return made if turn is None else rotate(made, turn, back=True)

    first, second = (Side(partial(size, m), partial(values, m)) for m in range(2))
    return Scheme(who, f"{name}{TURNED * rotated}", (first, second))


def of_trials(name: str, first: Trial, down: Trial) -> Scheme:
    """An idea."""
    return Scheme("idea", name, (Side(first.size, first.values), Side(down.size, down.values)))


def of_ggml(name: str, llama: Worker, scratch: Path) -> Scheme:
    """A type of ggml's, with the moments' diagonal as importance."""

    def values(weight: Tensor, moments: Tensor) -> Tensor:
        importance = moments.diagonal(dim1=-2, dim2=-1)
        np.savez(scratch / "weights.npz", weight=weight.numpy(), importance=importance.numpy())
        llama.call("quantised", path=str(scratch / "weights.npz"), out=str(scratch / "values.npy"), encoding=name)
        return torch.from_numpy(np.load(scratch / "values.npy"))

    side = Side(lambda cols: TYPES[name].bits, values, TYPES[name].block)
    return Scheme("llama.cpp", name, (side, side))


def today() -> Iterator[Scheme]:
    """Versions with as many bits in every matrix."""
    for name in TODAY:
        yield of_version("moepack", name, GROUP)


def built() -> Iterator[Scheme]:
    """Versions whose down has a bit more."""
    for name in MIXED:
        yield of_version("moepack", name)


def rotated() -> Iterator[Scheme]:
    """All of these with a rotated down, those with as many bits in every matrix with scales of a byte too."""
    for name in TODAY:
        yield of_version("moepack", name, GROUP, rotated=True)
        yield of_version("bytes", name, GROUP, rotated=True, scale_bits=8)
    for name in MIXED:
        yield of_version("moepack", name, rotated=True)


def small() -> Iterator[Scheme]:
    """Versions with as many bits in every matrix, and scales of a byte."""
    for name in TODAY:
        yield of_version("bytes", name, GROUP, scale_bits=8)


def others(method: str) -> Iterator[Scheme]:
    """Today's grids by a library."""
    for name in TODAY[:3]:
        yield of_version(method, f"{name}", GROUP, method)


def ideas(bits: int) -> Iterator[Scheme]:
    """What could be stored instead of today's version of so many bits."""
    zero = 8 if bits > 1 else 0
    plain, wide, bare = Trial(bits, GROUP, zero), Trial(bits, 128, zero), Trial(bits, 128)
    more = Trial(bits + 1, 128, 8)
    coded, coded_wide = replace(plain, trellis=True), replace(wide, trellis=True)

    def turned(trial: Trial) -> Trial:
        return replace(trial, rotated=True)

    if bits == 2:
        yield of_trials(f"w{bits}, both rotated", turned(plain), turned(plain))
    yield of_trials(f"w{bits}, groups of 128, no zero points", bare, bare)
    yield of_trials(f"w{bits}, the same, down rotated", bare, turned(bare))
    if bits in (3, 2):
        small = Trial(bits, 32, 4, 6)
        yield of_trials(f"w{bits}, groups of 32, scales of 6 bits, zero points of 4", small, small)
        small = replace(small, zero_bits=0)
        yield of_trials(f"w{bits}, groups of 32, scales of 6 bits, no zero points", small, small)
    if bits in (4, 3):
        uneven = Trial(bits, GROUP, levels=gaussian_levels(bits))
        yield of_trials(f"w{bits}, unequal levels, no zero points", uneven, uneven)
    if bits == 1:
        ternary = Trial(1.6, 128)
        yield of_trials("three levels", ternary, ternary)
        yield of_trials("1 bit, three levels in down", Trial(1, 128), ternary)
    yield of_trials(f"w{bits}, trellis", coded, coded)
    if bits == 2:
        # Beside the idea without zero points: what share of the divergence down makes.
        name = f"w{bits}, groups of 128, no zero points, gate and up of {bits + 1} bits"
        yield of_trials(name, replace(bare, bits=bits + 1), bare)
    yield of_trials(f"w{bits}d{bits + 1}, trellis, down rotated", coded_wide, turned(replace(more, trellis=True)))
