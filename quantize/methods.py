"""Which method makes which version: the one entry to this folder for those who only have a name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moepack.pack.spec import Version

from . import gptq, gptqmodel_reference, hqq, rtn
from .grid import Quantised

METHODS = ("gptq", "hqq", "rtn", "gptqmodel")
NEEDS_MOMENTS = frozenset({"gptq", "sign", "gptqmodel"})


def method_for(method: str, version: Version) -> str:
    """What a recipe's method means at a version's width: with calibration, one bit is made by `sign`."""
    return "sign" if not version.stores_zeros and method in NEEDS_MOMENTS else method


def fallbacks(method: str, version: Version) -> tuple[str, ...]:
    """What may replace a method for an expert that too few tokens reached."""
    if method not in NEEDS_MOMENTS:
        return ()
    return ("rtn", "hqq") if version.stores_zeros else ("rtn",)


def quantise_all(
    method: str, weight: Tensor, moments: Tensor | None, versions: Sequence[Version]
) -> dict[Version, Quantised]:
    """Quantise a batch of matrices at several widths; one call for all of them is what makes `gptq` fast.

    Args:
        method: "gptq" (ours; "sign" is its one-bit form), "gptqmodel" (the library), "hqq" or "rtn".
        weight: float32 [experts, rows, cols].
        moments: mean second moments of the inputs, float32 [experts, cols, cols]; only for methods that need them.
        versions: affine versions.

    Returns:
        One batch a version, in their order.
    """
    if method not in METHODS and method not in NEEDS_MOMENTS:
        raise ValueError(f"unknown method {method}")
    if method not in NEEDS_MOMENTS:
        one = hqq.quantise if method == "hqq" else rtn.quantise
        return {v: one(weight, v) for v in versions}
    if moments is None:
        raise ValueError(f"{method} needs second moments")
    library = [v for v in versions if method_for(method, v) == "gptqmodel"]
    made = gptq.quantise_widths(weight, moments, [v for v in versions if v not in library])
    made |= {v: gptqmodel_reference.quantise(weight, moments, v) for v in library}
    return {v: made[v] for v in versions}


def quantise(method: str, weight: Tensor, moments: Tensor | None, version: Version) -> Quantised:
    """Quantise a batch of matrices at one width; see `quantise_all`."""
    return quantise_all(method, weight, moments, (version,))[version]
