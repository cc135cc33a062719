"""Which method makes which version: the one entry to this folder for those who only have a name."""

from __future__ import annotations

from torch import Tensor

from moepack.pack.spec import Version

from . import gptq, hqq, rtn, sign
from .grid import Quantised

METHODS = ("gptq", "hqq", "rtn")
NEEDS_MOMENTS = frozenset({"gptq", "sign"})


def method_for(method: str, version: Version) -> str:
    """What a recipe's method means at a version's width: with calibration, one bit is made by `sign`."""
    return "sign" if version.bits == 1 and method in NEEDS_MOMENTS else method


def fallbacks(method: str, version: Version) -> tuple[str, ...]:
    """What may replace a method for an expert that too few tokens reached."""
    if method not in NEEDS_MOMENTS:
        return ()
    return ("rtn",) if version.bits == 1 else ("rtn", "hqq")


def quantise(method: str, weight: Tensor, moments: Tensor | None, version: Version) -> Quantised:
    """Quantise a batch of matrices.

    Args:
        method: "gptq", "sign", "hqq" or "rtn".
        weight: float32 [experts, rows, cols].
        moments: mean second moments of the inputs, float32 [experts, cols, cols]; only for methods that need them.
        version: an affine version.
    """
    if method in NEEDS_MOMENTS:
        if moments is None:
            raise ValueError(f"{method} needs second moments")
        return gptq.quantise(weight, moments, version) if method == "gptq" else sign.quantise(weight, moments, version)
    if method not in METHODS:
        raise ValueError(f"unknown method {method}")
    return hqq.quantise(weight, version) if method == "hqq" else rtn.quantise(weight, version)
