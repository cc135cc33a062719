"""What the zero points of a version are, for formats that have whole ones or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moepack.pack.codec.affine import section_array
from moepack.pack.codec.bits import Buffer, from_blocks
from moepack.pack.reader import Bundle
from moepack.pack.spec import Matrix, Version


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """The zero points of all experts, or of all dense matrices, in one version."""

    total: int
    fractional: int  # those that are no whole code
    apart: int  # those that are not the middle code, 2**(bits-1)

    @property
    def symmetric(self) -> bool:
        """Whether all are the middle code."""
        return not self.apart


@lru_cache(maxsize=32)
def zero_points(bundle: Bundle, version: Version, dense: bool) -> ZeroPoints:
    """Read all stored zero points of an affine version; nothing else is read, and no digest checked."""
    total = fractional = apart = 0
    step = 1 << (8 - version.bits)
    middle = 128
    for matrices, extent in extents(bundle, version, dense):
        for section in version.sections(matrices):
            if section.kind == "zero":
                zero = from_blocks(section_array(extent, section), matrices[section.matrix].rows)
                total += zero.size
                fractional += int(np.count_nonzero(zero % step))
                apart += int(np.count_nonzero(zero != middle))
    return ZeroPoints(total, fractional, apart)


def extents(bundle: Bundle, version: Version, dense: bool) -> Iterator[tuple[Sequence[Matrix], Buffer]]:
    """Every extent of a version that is here, with its matrices: a download may have fetched the first layer alone."""
    if dense:
        for layer in bundle.dense_layers:
            if not (bundle.path / layer.file(version.name)).is_file():
                continue
            file = bundle.dense_file(version.name, layer)
            for i in range(layer.extents):
                yield layer.extent_matrices(i), file.extent(i, check_digest=False)
        return
    for position, described in enumerate(bundle.layers):
        if not (bundle.path / described.file(version.name)).is_file():
            continue
        for e in range(described.experts):
            yield described.matrices, bundle.extent(version.name, position, e, check_digest=False)


def not_whole(bundle: Bundle, version: Version, dense: bool) -> str | None:
    """Return why some zero points of an affine version are not integers; None if all are."""
    found = zero_points(bundle, version, dense)
    if not found.fractional:
        return None
    return (
        f"{found.fractional:,} of its {found.total:,} zero points are not whole codes: quantise with zeros: integer or "
        "zeros: symmetric in the recipe of a new build, or take --to checkpoint"
    )
