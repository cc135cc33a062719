"""The checks by themselves, on what is written; what a problem says only prints."""

from __future__ import annotations

import numpy as np
from small_bundle import VERSIONS

from moepack.pack.codec.checks import check_lossless
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.errors import Problem, printable
from moepack.pack.spec import Matrix


def test_full_tiles_of_a_large_matrix_have_no_loose_bits() -> None:
    rng = np.random.default_rng(0)
    matrices = (Matrix("up", 100, 333), Matrix("down", 333, 100))
    values = []
    for m in matrices:
        bits = (rng.standard_cauchy((m.rows, m.cols)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        bits[: m.rows // 2] = rng.integers(0, 1 << 16, (m.rows // 2, m.cols))  # raw tiles beside coded ones
        values.append(LosslessMatrix(bits))
    extent, _ = VERSIONS[0].encode(matrices, values)
    assert list(check_lossless(matrices, extent)) == []


def test_printable() -> None:
    assert printable("a\x1b[31m\n\u202e\ud800é") == "a\\x1b[31m\\n\\u202e\\ud800é"
    assert printable("a\nb", keep="\n") == "a\nb"
    problem = Problem("/b\x07/x", "size", "y" * 5000)
    assert problem.location == "/b\\x07/x" and len(problem.message) == 1000
