"""What an export wrote, or would write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle
    from moepack.pack.spec import Version


@dataclass(frozen=True, slots=True)
class Lost:
    """The error of a conversion that rounds, relative to the version that it was made from."""

    mix: str  # its name
    error: dict[str, float]  # by kind of matrix: the squared error of the weights over their squares
    types: dict[str, str]  # and the types that it has now
    bits: float  # an expert's weight


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export, or of its dry run."""

    target: str
    path: Path
    bytes: int  # of the files with weights
    bits: float  # an expert's weight, with scales and zero points
    files: tuple[str, ...]  # those with weights; none in a dry run
    exact: bool  # whether the format's own library reads every value bit for bit
    loss: float  # the mean relative loss of the experts, by the bundle's tables
    versions: dict[str, int]  # experts by the version they are exported from
    dense: tuple[str, ...] = ()  # versions of dense matrices, where these have some
    tensors: int = 0  # of a released checkpoint: those written
    left_out: tuple[str, ...] = ()  # of a released checkpoint: those that the bundle does not hold
    lost: Lost | None = None  # with --lossy


def released_bits(bundle: Bundle, version: Version) -> float:
    """Bits a weight of experts as a checkpoint has them: without an entropy code."""
    sizes = [sum(s.size for s in version.sections(x.matrices)) * x.experts for x in bundle.layers]
    return 8 * sum(sizes) / bundle.expert_weights
