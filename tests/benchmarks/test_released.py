"""Rounding to a released format gives what the library reads, near the weights, and exactly those that fit it."""

from __future__ import annotations

import sys

import pytest
import torch
from released import decoded
from released_kinds import weight
from support import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.released.checkpoint import FORMATS


@pytest.mark.parametrize(("name", "error"), [("mxfp4", 0.12), ("nvfp4", 0.1), ("fp8", 0.03)])
def test_rounded_weights_are_near(name: str, error: float) -> None:
    """Relative errors of Gaussian weights: a code of E2M1 is off by a tenth, one of E4M3 by a fortieth."""
    make, quantization = FORMATS[name]
    values = torch.randn(192, 256, generator=torch.Generator().manual_seed(0)) / 16
    (got,) = decoded(quantization, {f"m.{n}": t for n, t in make(values).items()}).values()
    assert error / 2 < float((got.float() - values).norm() / values.norm()) < error


def test_weights_that_fit_are_kept() -> None:
    """Values that MXFP4 holds come back; zeros do, too."""
    make, quantization = FORMATS["mxfp4"]
    _, values = weight("ct mxfp4", 64, 128)
    values[3] = 0
    (got,) = decoded(quantization, {f"m.{n}": t for n, t in make(values.float()).items()}).values()
    assert torch.equal(got.float(), values.float())
