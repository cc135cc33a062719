"""What expert paging takes and gives: the window's bytes, and the bandwidths that experts are brought at here.

The window holds two layers' experts (fluxmoe, section 3.1). Bandwidths are measured (section 4.2), briefly, on extents
of the bundle itself. Decides nothing about where an expert is.
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

from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.exponent_fast import decode_into
from moepack.pack.codec.lossless import directory
from moepack.pack.reader import Bundle
from moepack.pack.spec import PAGE, ExpertLayer, Version, align
from moepack.runtime.kernels.forms import make_forms, resident_size
from moepack.runtime.policies.contract import Ladder
from moepack.runtime.policies.placements import PAGED, Where

LOADERS = 2  # threads that bring experts beside the forward pass
GRANULE = 2 << 20  # bytes of the pieces that a GPU's memory is mapped in
BRIEFLY = 0.08  # seconds of measuring one backend


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The window's blocks.

    Attributes:
        blocks: of each matrix type: as many as two consecutive layers have experts, at the most (the last layer is
            before the first).
        sizes: bytes of a block of each type: the largest matrix's, with its bias, in whole pages; on a GPU there is one
            type, the expert.
    """

    blocks: int
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.blocks * sum(self.sizes)


def page_sizes(layer: ExpertLayer, version: Version) -> tuple[int, ...]:
    """Bytes of each matrix of a lossless expert once decoded, its bias with it, in whole system pages."""
    at = [f.low for f in make_forms(layer.matrices, version)]
    whole = align(resident_size(layer.matrices, version), PAGE)
    return tuple(b - a for a, b in pairwise([*at, whole]))


def gpu_block(sizes: Sequence[int], granule: int) -> int:
    """Bytes of a block on a GPU, for experts of these sizes: all matrices of the largest, in whole pieces."""
    return align(max(sizes), granule)


def window_size(layers: Sequence[ExpertLayer], version: Version, granule: int = 0) -> WindowSize:
    """The window of these layers; with `granule` on a GPU, whose blocks are whole experts in such pieces."""
    experts = [x.experts for x in layers]
    blocks = max(a + b for a, b in pairwise([experts[-1], *experts])) if len(experts) > 1 else experts[0]
    if granule:
        return WindowSize(blocks, (gpu_block([resident_size(x.matrices, version) for x in layers], granule),))
    rows = [page_sizes(x, version) for x in layers]
    return WindowSize(blocks, tuple(max(row[d] for row in rows) for d in range(len(rows[0]))))


def is_paged(ladder: Ladder) -> bool:
    """Whether experts of a ladder are paged."""
    return any(placement.where in PAGED for placement in ladder)


def measure_rates(bundle: Bundle, ladder: Ladder) -> tuple[float, ...]:
    """Bytes of weights a second that experts are brought at from each placement of a ladder; infinity where they are.

    What is packed is decoded on torch's threads; what is stored is read, digested and decoded by the loaders. Both run
    on the same cores: while one does, the other does not.

    Raises:
        BundleError: when an extent that it is measured on is damaged.
    """
    version = next(p.version for p in ladder if p.where in PAGED)
    assert version is not None
    layer, threads = bundle.layers[0], torch.get_num_threads()
    size, count = resident_size(layer.matrices, version), min(layer.experts, 4)
    outs = [[np.empty(m.weights, np.uint16) for m in layer.matrices] for _ in range(LOADERS)]
    stored = partial(bundle.extent, version.name, 0)  # read and digested

    def decode(extent: Buffer, out: Sequence[np.ndarray[tuple[int], np.dtype[np.uint16]]], threads: int) -> None:
        for (coded, _), room in zip(directory(layer.matrices, extent), out, strict=True):
            decode_into(coded, room, threads)

    extents = [np.array(stored(e)) for e in range(count)]
    packed = size * _rate(lambda i: decode(extents[i % count], outs[0], threads))
    with ThreadPoolExecutor(LOADERS) as pool:
        work = [partial(decode, out=out, threads=1) for out in outs]
        both = size * LOADERS * _rate(lambda i: list(pool.map(lambda w: w(stored(i % count)), work)))
    return tuple({Where.PACKED: packed, Where.STORED: both}.get(p.where, float("inf")) for p in ladder)


def _rate(work: Callable[[int], object]) -> float:
    """How often a second something is done at its fastest: others are at work on the machine too."""
    work(0)
    best, began, i = float("inf"), time.perf_counter(), 0
    while time.perf_counter() - began < BRIEFLY or i < 3:
        at = time.perf_counter()
        work(i)
        best, i = min(best, time.perf_counter() - at), i + 1
    return 1 / best
