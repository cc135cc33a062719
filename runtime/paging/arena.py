"""A GPU's window: equal slots in one range of device memory, each of which holds one whole expert at a time.

Kernels find an expert by its handle, an address in a table on the device. So an expert has no address of its own: a
step writes its slot's address to the table that the step's kernels read, on the step's stream (gpu_filler.py).
window.py decides which experts have slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.devices.torch_cuda import TorchGpu
from moepack.runtime.kernels.forms import handle
from moepack.runtime.planning.paging import WindowSize

from .address_space import Page
from .window import Mapped


class Arena:
    """Slots of device memory, numbered like the window's blocks. A page is a whole expert."""

    def __init__(self, gpu: TorchGpu, layers: Sequence[ExpertLayer], version: Version, size: WindowSize) -> None:
        """Allocate all slots."""
        (self._slot,), self._gpu = size.sizes, gpu
        self._sizes = [version.resident_size(layer.matrices) for layer in layers]
        self._memory = gpu.block(self._slot * size.blocks)

    def size(self, page: Page) -> int:
        """Return the bytes of an expert's weights; its slot may have a few more."""
        return self._sizes[page[1]]

    def slot(self, mapped: Mapped) -> Tensor:
        """Return the memory of the expert that has this block, uint8."""
        start = mapped.block * self._slot
        return self._memory[start : start + self.size(mapped.page)]

    def words(self, table: npt.NDArray[np.uint64], pages: Sequence[Mapped], version: int) -> npt.NDArray[np.int64]:
        """Return a layer's handles, int64 [experts]: `table` with the slots of these pages, of the version's number."""
        out = table.view(np.int64).copy()
        first = self._memory.data_ptr()
        for mapped in pages:
            out[mapped.page[2]] = handle(first + mapped.block * self._slot, version)
        return out

    def close(self) -> None:
        """Give the memory back, once nothing reads or writes it. May be called twice."""
        self._gpu.free(self._memory)
