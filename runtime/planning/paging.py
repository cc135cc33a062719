"""The costs of coded experts: a GPU's slots for those that are decoded in place, and the bandwidths of their sources.

Bandwidths are measured briefly on extents of the bundle (fluxmoe, section 4.2). Of an encoding this module knows the
extent in memory and `Version.restore`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moepack.pack.reader import Bundle
from moepack.pack.spec import MEMORY_PAGE, ExpertLayer, Version, align
from moepack.runtime.policies.contract import Ladder
from moepack.runtime.policies.placements import CODED, Where

from .measured import threads

# Bytes of torch's segments (c10/core/AllocatorConfig.h): blocks up to SMALL share 2 MiB, below LARGE 20 MiB; each
# larger one takes whole 2 MiB
SMALL = 1 << 20
LARGE = 10 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
BRIEFLY = 0.08  # seconds for which the bandwidth of one source is measured
EXTENTS = 4  # experts on which it is measured
INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class InPlaceSize:
    """The size of a GPU's pages that stay where they are (runtime/paging/in_place.py), in bytes."""

    experts: int  # slots: the most experts of a layer
    slot: int  # of an expert's weights
    stage: int  # of an expert's coded bytes, beside its slot
    places: int  # of the tables that say where matrices are in extents

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        return self.experts * (self.slot + self.stage) + self.places


def in_place_size(layers: Sequence[ExpertLayer], version: Version, largest: int) -> InPlaceSize:
    """Return the size for these layers, of which no extent has more than `largest` bytes."""
    slot = align(max(version.resident_size(x.matrices) for x in layers), MEMORY_PAGE)
    a_matrix = 8 * 8 + 2 * 256  # numbers of 8 bytes and a table of 256 of 2
    places = sum(x.experts * (len(x.matrices) * a_matrix + 8) for x in layers)
    return InPlaceSize(max(x.experts for x in layers), slot, align(largest, MEMORY_PAGE), align(places, MEMORY_PAGE))


def segment(size: int) -> int:
    """Return the bytes of the segment from which torch's allocator gives a GPU's block of `size` bytes."""
    if size >= LARGE:
        return align(size, SMALL_SEGMENT)
    return SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT


def block_on_gpu(size: int) -> int:
    """Return what a block of `size` bytes takes of a GPU where torch's allocator gives it: its share of a segment."""
    return segment(size) // (segment(size) // size) // MEMORY_PAGE * MEMORY_PAGE


def coded_version(ladder: Ladder) -> Version | None:
    """Return the version whose coded bytes a ladder keeps in memory; `None` if it keeps none."""
    return next((p.version for p in ladder if p.where in CODED), None)


def decoded_in_place(ladder: Ladder) -> bool:
    """Whether a GPU decodes the experts of a ladder in place, from coded bytes of which all are in host memory."""
    return ladder[-1].where is Where.PACKED_PINNED


def source_of(ladder: Ladder) -> int | None:
    """Return the placement from whose coded bytes better ones are decoded to blocks; `None` without such bytes."""
    if decoded_in_place(ladder):
        return None
    return next((v for v, p in enumerate(ladder) if p.where is Where.PACKED), None)


def measure_rates(bundle: Bundle, ladder: Ladder) -> tuple[float, ...]:
    """Measure the bytes of weights a second that come from each placement of a ladder; infinity for resident weights.

    Experts that are packed in memory are decoded, those in the backing store are read, digested and decoded or copied;
    one at a time, on torch's threads, as passes that wait for them do it.

    Raises BundleError when a measured extent is damaged.
    """
    version = ladder[0].version
    assert version is not None
    layer = bundle.layers[0]
    size = version.resident_size(layer.matrices)
    count = min(layer.experts, EXTENTS)
    out = np.empty(size, np.uint8)
    stored = partial(bundle.extent, version.name, 0)  # reads and digests an expert's extent
    restore = partial(version.restore, layer.matrices, threads=threads())
    packed = INFINITE
    if version.entropy_coded:
        extents = [np.array(stored(e)) for e in range(count)]
        packed = size * rate(lambda i: restore(extents[i % count], out))
    read = size * rate(lambda i: restore(stored(i % count), out))
    sources = {Where.PACKED: packed, Where.ON_DISK: read}
    return tuple(sources.get(p.where, INFINITE) for p in ladder)


def rate(work: Callable[[int], object]) -> float:
    """Return the highest rate of calls of `work`, in calls a second: other programs may slow some calls down."""
    work(0)
    best = INFINITE
    began = time.perf_counter()
    i = 0
    while time.perf_counter() - began < BRIEFLY or i < 3:
        at = time.perf_counter()
        work(i)
        best = min(best, time.perf_counter() - at)
        i += 1
    return 1 / best
