"""Pages on a CPU: loader threads decode them, or the product does, and multiplies by rows still in the CPU's cache.

A product decodes BF16 matrices. Experts of other encodings are restored whole, or read to their page as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.experts.packed import PackedExtent, RestoredExtent
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS, by_matrix
from moepack.runtime.store.files import Stored

from .address_space import CpuAddressSpace
from .filler import PageFiller, RunPages
from .window import Mapped

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts


class CpuRunPages(RunPages):
    """The pages of a run (one layer's experts in one step) on a CPU."""

    @contextlib.contextmanager
    def decoding(self, matrix: int) -> Iterator[CodedExperts | None]:
        """Enclose the product of one matrix; yield the experts that it decodes to pages before it reads them (RAW).

        Yields None if all are decoded. Raises BundleError when one is damaged.
        """
        if matrix >= len(self._own):  # a page is a whole expert, ready since the first matrix
            yield None
            return
        self._gather(matrix)
        own = self._own[matrix]
        if not own:
            yield None
            return
        from moepack.runtime.kernels.affine_native import BadCodes, CodedExperts

        began = time.perf_counter()
        coded = CodedExperts(len(self._snapshot.handles))
        for expert in list(own):
            packed = self._packed(expert)
            coded.opened[expert] = address = packed.opened(matrix)
            if address:
                packed.bias(matrix)
            else:
                self._decode(matrix, expert)
        self.waited += time.perf_counter() - began
        if not own:
            yield None
            return
        try:
            yield coded
        except BadCodes as error:
            raise self._packed(error.expert).damaged(str(error)) from None
        self.waited += coded.seconds / torch.get_num_threads()
        self._paging.loaded([(mapped, None) for mapped in own.values()])
        own.clear()

    def ready(self, matrix: int) -> None:
        """Decode one page of each needed expert, or wait for its load. Raises BundleError when one is damaged."""
        if matrix >= len(self._own):
            return
        self._gather(matrix)
        began = time.perf_counter()
        for expert in list(self._own[matrix]):
            self._decode(matrix, expert)
        self.waited += time.perf_counter() - began

    def _decode(self, matrix: int, expert: int) -> None:
        self._packed(expert).decode(matrix, torch.get_num_threads())
        self._paging.loaded([(self._own[matrix].pop(expert), None)])


class CpuFiller(PageFiller):
    """The `PageFiller` of a CPU."""

    run_pages = CpuRunPages
    space: CpuAddressSpace

    def __init__(
        self,
        space: CpuAddressSpace,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        version: Version,
        stored: Callable[[int, int], Stored],
        staging: int,
    ) -> None:
        """Allocate a buffer of `staging` bytes for each loader; the largest entropy-coded extent has that size.

        `layers` are given with the forms of their matrices in memory. `stored` takes a layer's position and an expert.
        """
        self.space = space
        self._version = version
        self._layers = tuple(layers)
        self._stored = stored
        self._staging = [CpuMemory(staging).tensor.numpy() for _ in range(LOADERS)]

    def extent(self, position: int, expert: int) -> Tensor:
        """See `PageFiller`."""
        return self.space.extent(position, expert)

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> PackedExtent | RestoredExtent:
        """See `PageFiller`."""
        layer, forms = self._layers[position]
        target = self.space.extent(position, expert)
        if by_matrix(self._version):
            return PackedExtent(extent, layer, forms, where, target)
        return RestoredExtent(extent, layer, forms, where, target, self._version)

    def read(self, loader: int, position: int, expert: int) -> tuple[PackedExtent | RestoredExtent | None, int]:
        """Read the extent into the loader's buffer, or to its page if it is not entropy-coded, and then return None.

        Its digest is checked the first time, and again once its file has changed.
        """
        stored = self._stored(position, expert)
        if not self._version.entropy_coded:
            stored.read_into(self.space.extent(position, expert).numpy())
            return None, stored.size
        staging = self._staging[loader]
        stored.read_into(staging)
        return self.over(position, expert, torch.from_numpy(staging[: stored.size]), stored.where), stored.size

    def fill(self, loader: int, packed: PackedExtent | RestoredExtent | None, mapped: Mapped) -> None:
        """Decode the page on one core, the loader's own, unless `read` has filled it."""
        if packed is not None:
            packed.decode(mapped.page[0], 1)
