"""Ideas for encodings: bits by formula, values on the grids that they name, and the quantiser's errors on its own."""

from __future__ import annotations

import sys

import pytest
import torch
from support import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.formats.grids import grids
from benchmarks.formats.measure import generated
from benchmarks.formats.schemes import of_version
from benchmarks.formats.trial import Trial
from benchmarks.peers.quality import errors

ROWS, COLS = 64, 256
NEAR = 1e-5  # values come back as weights less their errors


def trial(name: str) -> Trial:
    """The idea of that name, for gate and up."""
    bits = int(name[1])
    return next(first for found, first, _ in grids(bits) if found == name)


def values(own: Trial) -> torch.Tensor:
    """A generated matrix in an idea's form: [rows, groups, group]."""
    case = generated("normal", ROWS, COLS)
    return own.values(case.weight, case.learn)[0].unflatten(-1, (-1, own.group))


def test_ideas_take_the_bits_of_their_parts() -> None:
    """Codes, scales, zero points, and the scales that others share."""
    formulas = {
        "w4, scales of 8 bits, floats": 4 + (8 + 8) / 64,
        "w3, scales of 6 bits in blocks": 3 + (6 + 16 / 16 + 8) / 64,
        "w3, zero points as wide as codes": 3 + (16 + 3) / 64,
        "w2, zero points shared by two rows": 2 + (16 + 8 / 2) / 64,
        "w2, groups of 32, zero points of 6 bits, scales of 6 bits in blocks": 2 + (6 + 1 + 6) / 32,
        "w2, three levels, scales of 6 bits in blocks": 1.6 + (6 + 1) / 64,
        "w1, groups of 128": 1 + 16 / 128,
    }
    for name, bits in formulas.items():
        assert trial(name).size(COLS) == pytest.approx(bits), name


def test_values_lie_on_the_grid_that_an_idea_names() -> None:
    """Small floats as scales, one zero point for two rows, three levels."""
    every = 2 * values(trial("w1, scales of 8 bits, floats")).abs()
    scale = every.mean(-1)
    assert (every / scale[..., None] - 1).abs().max() < NEAR
    part = torch.frexp(scale).mantissa * 2**5  # an implied bit and four
    assert (part - part.round()).abs().max() < 2**5 * NEAR
    assert len(part.round().unique()) > 8

    made = values(trial("w2, zero points shared by two rows"))
    ordered = made.sort(-1).values
    gaps = ordered[..., 1:] - ordered[..., :-1]
    step = gaps.masked_fill(gaps < 0.1 * gaps.amax(-1, keepdim=True), torch.inf).amin(-1)
    place = made.amin(-1) / step  # a code less the zero point
    apart = place[0::2] - place[1::2]
    assert (apart - apart.round()).abs().max() < 100 * NEAR  # a place is made of a gap

    three = values(trial("w2, three levels")).abs()
    three /= three.amax(-1, keepdim=True)
    assert torch.minimum(three, 1 - three).max() < NEAR


def test_ideas_lose_what_they_should() -> None:
    """On a version's own grid its errors; with narrower scales little more; on unequal levels less."""
    case = generated("heavy", ROWS, COLS)

    def lost(own: Trial) -> float:
        return errors(case, own.values(case.weight, case.learn))[0]

    plain = of_version("moepack", "w3", 64).sides[0]
    assert lost(Trial(3, 64, 8)) == pytest.approx(errors(case, plain.values(case.weight, case.learn))[0], rel=1e-4)
    assert 0.98 < lost(trial("w3, scales of 6 bits in blocks")) / lost(Trial(3, 64, 8)) < 1.03
    for levels in ("fixed", "learned"):
        assert lost(trial(f"w3, {levels} levels")) < 0.97 * lost(Trial(3, 64, 8)), levels
