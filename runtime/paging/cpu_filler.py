"""Pages on a CPU: loaders read and decode them, or whoever multiplies decodes rows of a matrix and uses them while they
are in its cache. Decides nothing about which pages have memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.experts.packed import PackedExtent
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS
from moepack.runtime.store.files import Stored

from .address_space import CpuAddressSpace, Page
from .paging import Paging
from .run_pages import RunPages
from .window import Compute, Filled, LayerRun

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts

ReadInto = Callable[[int, int], Stored]  # layer position, expert


class CpuFiller:
    """`PageFiller` of a CPU: loaders' work is done when their calls return."""

    def __init__(
        self,
        space: CpuAddressSpace,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        stored: ReadInto,
        staging: int,
    ) -> None:
        """Set the loaders' buffers aside.

        Args:
            space: where pages are.
            layers: and where the matrices of their experts stand once decoded.
            stored: where an expert's extent stands.
            staging: bytes of the largest extent: each loader has a buffer of it.
        """
        self.space = space
        self._layers, self._stored = tuple(layers), stored
        self._staging = [CpuMemory(staging).tensor.numpy() for _ in range(LOADERS)]

    def chosen(self, index: Tensor) -> npt.NDArray[np.int64]:
        """It is there."""
        out: npt.NDArray[np.int64] = index.numpy()
        return out

    def pages(
        self, paging: Paging, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> RunPages:
        """Of a run."""
        return CpuRunPages(paging, run, snapshot, position, active, step)

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> PackedExtent:
        """What decodes an extent."""
        layer, forms = self._layers[position]
        return PackedExtent(extent, layer, forms, self.space.extent(position, expert), where)

    def read(self, loader: int, position: int, expert: int) -> tuple[PackedExtent, int]:
        """Into the loader's buffer; it is digested every time."""
        stored, staging = self._stored(position, expert), self._staging[loader]
        stored.read_into(staging)
        return self.over(position, expert, torch.from_numpy(staging[: stored.size]), stored.where), stored.size

    def fill(self, loader: int, packed: PackedExtent, page: Page) -> Filled | None:
        """On the loader's own core."""
        packed.decode(page[0], 1)
        return None

    def issued(self) -> tuple[Compute, ...]:
        """Nothing goes on behind a call's return."""
        return ()

    def follow(self) -> None:
        """Nothing goes on."""

    def rest(self, loader: int) -> None:
        """It has nothing under way."""

    def close(self) -> None:
        """Memory goes with what refers to it."""


class CpuRunPages(RunPages):
    """A run's pages on a CPU."""

    @contextlib.contextmanager
    def decoding(self, matrix: int) -> Iterator[CodedExperts | None]:
        """Around the product of one matrix, which is to decode those that are yielded to where they belong (RAW).

        Raises:
            BundleError: where one is damaged.
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
        """Return once all that is needed of one matrix is in its place.

        Raises:
            BundleError: where one is damaged.
        """
        self._gather(matrix)
        began = time.perf_counter()
        for expert in list(self._own[matrix]):
            self._decode(matrix, expert)
        self.waited += time.perf_counter() - began

    def _decode(self, matrix: int, expert: int) -> None:
        self._packed(expert).decode(matrix, torch.get_num_threads())
        self._paging.loaded([(self._own[matrix].pop(expert), None)])
