"""Pages on a CPU: loader threads decode them, or the product does, and multiplies by rows still in the CPU's cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.experts.packed import PackedExtent
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS
from moepack.runtime.store.files import Stored

from .address_space import CpuAddressSpace, Page
from .filler import PageFiller, RunPages

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts


class CpuRunPages(RunPages):
    """The pages of a run (one layer's experts in one step) on a CPU."""

    @contextlib.contextmanager
    def decoding(self, matrix: int) -> Iterator[CodedExperts | None]:
        """Enclose the product of one matrix; yield the experts that it decodes to pages before it reads them (RAW).

        Yields None if all are decoded. Raises BundleError when one is damaged.
        """
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
        """Decode one matrix of each needed expert, or wait for its load. Raises BundleError when one is damaged."""
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

    def __init__(
        self,
        space: CpuAddressSpace,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        stored: Callable[[int, int], Stored],
        staging: int,
    ) -> None:
        """Allocate a buffer of `staging` bytes for each loader; the largest extent has that size.

        `layers` are given with the forms of their decoded matrices. `stored` takes a layer's position and an expert.
        """
        self.space = space
        self._layers, self._stored = tuple(layers), stored
        self._staging = [CpuMemory(staging).tensor.numpy() for _ in range(LOADERS)]

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> PackedExtent:
        """See `PageFiller`."""
        layer, forms = self._layers[position]
        return PackedExtent(extent, layer, forms, self.space.extent(position, expert), where)

    def read(self, loader: int, position: int, expert: int) -> tuple[PackedExtent, int]:
        """Read the extent into the loader's buffer; its digest is checked every time."""
        stored, staging = self._stored(position, expert), self._staging[loader]
        stored.read_into(staging)
        return self.over(position, expert, torch.from_numpy(staging[: stored.size]), stored.where), stored.size

    def fill(self, loader: int, packed: PackedExtent, page: Page) -> None:
        """Decode the page on one core, the loader's own."""
        packed.decode(page[0], 1)
