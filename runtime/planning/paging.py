"""The costs of expert paging: the window's bytes, and the bandwidths at which experts reach the window.

The window is memory for the decoded experts of two layers (fluxmoe, section 3.1). Bandwidths are measured briefly on
extents of the bundle (section 4.2). Of an encoding this module knows the extent in memory and `Version.restore`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from moepack.pack.reader import Bundle
from moepack.pack.spec import MEMORY_PAGE, ExpertLayer, Matrix, Version, align
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.policies.contract import Ladder
from moepack.runtime.policies.placements import PAGED, Where

LOADERS = 2  # threads that load experts beside the forward pass
# Bytes of torch's segments (c10/core/AllocatorConfig.h): blocks up to SMALL share 2 MiB, below LARGE 20 MiB; each
# larger one takes whole 2 MiB
SMALL = 1 << 20
LARGE = 10 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
BRIEFLY = 0.08  # seconds for which the bandwidth of one source is measured


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The size of the window into which paged experts are decoded or read."""

    blocks: int  # of each type: the most experts of two consecutive layers (the first follows the last)
    # Bytes of a block of each type, in whole system pages: the largest page of that type (`page_starts`); on a GPU
    # there is one type, whole experts
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole window."""
        return self.blocks * sum(self.sizes)


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


def by_matrix(version: Version) -> bool:
    """Whether each matrix of an expert is a page of its own, which a CPU can decode alone; else an expert is one."""
    return version.plain and version.entropy_coded


def page_starts(matrices: Sequence[Matrix], version: Version) -> tuple[int, ...]:
    """Return the offsets of an expert's pages in its extent in memory, on a CPU."""
    return tuple(f.low for f in make_forms(matrices, version)) if by_matrix(version) else (0,)


def page_sizes(matrices: Sequence[Matrix], version: Version) -> tuple[int, ...]:
    """Return the bytes of each page of an expert in whole system pages, on a CPU; a matrix counts with its bias."""
    whole = align(version.resident_size(matrices), MEMORY_PAGE)
    return tuple(b - a for a, b in pairwise([*page_starts(matrices, version), whole]))


def segment(size: int) -> int:
    """Return the bytes of the segment from which torch's allocator gives a GPU's block of `size` bytes."""
    if size >= LARGE:
        return align(size, SMALL_SEGMENT)
    return SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT


def block_on_gpu(size: int) -> int:
    """Return what a block of `size` bytes takes of a GPU where torch's allocator gives it: its share of a segment."""
    return segment(size) // (segment(size) // size) // MEMORY_PAGE * MEMORY_PAGE


def window_size(layers: Sequence[ExpertLayer], version: Version, on_gpu: bool = False) -> WindowSize:
    """Return the window's size for these layers; `on_gpu` its blocks are whole experts, in one range."""
    experts = [x.experts for x in layers]
    blocks = max(a + b for a, b in pairwise([experts[-1], *experts])) if len(experts) > 1 else experts[0]
    if on_gpu:
        return WindowSize(blocks, (align(max(version.resident_size(x.matrices) for x in layers), MEMORY_PAGE),))
    rows = [page_sizes(x.matrices, version) for x in layers]
    return WindowSize(blocks, tuple(max(row[d] for row in rows) for d in range(len(rows[0]))))


def paged_version(ladder: Ladder) -> Version | None:
    """Return the version at which experts are paged on a ladder; `None` if the ladder has no paged placement."""
    return next((p.version for p in ladder if p.where in PAGED), None)


def measure_rates(bundle: Bundle, ladder: Ladder) -> tuple[float, ...]:
    """Measure the bytes of weights a second that each placement of a ladder supplies; infinity for resident weights.

    Packed experts are decoded on torch's threads; stored experts are read, digested and decoded or copied by the
    loaders. Both share the cores, and are measured one after the other.

    Raises BundleError when a measured extent is damaged.
    """
    version = paged_version(ladder)
    assert version is not None
    layer = bundle.layers[0]
    threads = torch.get_num_threads()
    size = version.resident_size(layer.matrices)
    count = min(layer.experts, 4)
    outs = [np.empty(size, np.uint8) for _ in range(LOADERS)]
    stored = partial(bundle.extent, version.name, 0)  # reads and digests an expert's extent
    restore = partial(version.restore, layer.matrices)
    packed = float("inf")
    if version.entropy_coded:
        extents = [np.array(stored(e)) for e in range(count)]
        packed = size * rate(lambda i: restore(extents[i % count], outs[0], threads))
    with ThreadPoolExecutor(LOADERS) as pool:
        work = [partial(restore, out=out, threads=1) for out in outs]
        both = size * LOADERS * rate(lambda i: list(pool.map(lambda w: w(stored(i % count)), work)))
    return by_placement(ladder, packed, both)


def by_placement(ladder: Ladder, packed: float, stored: float) -> tuple[float, ...]:
    """Return the rate of each placement of a ladder, given the rates of packed and of stored experts."""
    return tuple({Where.PACKED: packed, Where.STORED: stored}.get(p.where, float("inf")) for p in ladder)


def rate(work: Callable[[int], object]) -> float:
    """Return the highest rate of calls of `work`, in calls a second: other programs may slow some calls down."""
    work(0)  # the first call compiles a GPU's kernels
    best = float("inf")
    began = time.perf_counter()
    i = 0
    while time.perf_counter() - began < BRIEFLY or i < 3:
        at = time.perf_counter()
        work(i)
        best = min(best, time.perf_counter() - at)
        i = i + 1
    return 1 / best
