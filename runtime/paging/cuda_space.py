"""Addresses for every expert on a GPU, and the blocks of device memory that are bound to some of them.

The GPU's form of PagedTensor (fluxmoe, section 4.1), by the driver's virtual memory management. It has not run on a GPU
yet: tests replace the driver by one that keeps the same rules (devices/driver.py). Memory comes in pieces of 2 MiB.
A block holds a whole expert: a block for each matrix would waste up to a piece each, and need two bindings, not one.
window.py decides which experts have memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from torch import Tensor

from moepack.pack.spec import Matrix, Version, align
from moepack.runtime.devices.driver import Driver, DriverError
from moepack.runtime.devices.mapped import TensorAt, reserve

from .address_space import Page

log = logging.getLogger("moepack.runtime")


class CudaAddressSpace:
    """A reserved range of a GPU's addresses. A page is a whole expert; the first number of a `Page` is always 0.

    A kernel that touches a page without memory ends the process's CUDA context. So callers unbind a page only after all
    work that reads or writes it has ended.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Sequence[Matrix], int]],
        version: Version,
        calls: Driver,
        tensor_at: TensorAt,
        granule: int,
    ) -> None:
        """Reserve the range without taking memory. `layers` are (matrices, number of experts) of each layer.

        Raises the errors of `reserve`.
        """
        sizes = [version.resident_size(matrices) for matrices, _ in layers]
        self._calls, self._sizes, self._block = calls, sizes, align(max(sizes), granule)
        self._first, count = [], 0
        for _, experts in layers:
            self._first.append(count * self._block)
            count += experts
        self._whole = count * self._block
        self._at, self._tensor = reserve(calls, tensor_at, self._whole, granule)
        self._bound: dict[Page, int] = {}  # handles of blocks; one that is being moved is listed under both pages
        self.moved = self.fresh = 0  # how many bindings moved a block from another page, or took a new block
        log.info("window: blocks of %d bytes for experts of %s (%.1f%% of them wasted)", self._block,
                 " or ".join(str(n) for n in sorted(set(sizes))), 100 * (1 - max(sizes) / self._block))  # fmt: skip

    def address(self, page: Page) -> int:
        """Return the address of a page's first byte (fluxmoe, equation 4, with a whole expert as the page)."""
        _, layer, expert = page
        return self._at + self._first[layer] + expert * self._block

    def size(self, page: Page) -> int:
        """Return the bytes of an expert's weights; its block has a few more."""
        return self._sizes[page[1]]

    def extent(self, layer: int, expert: int) -> Tensor:
        """Return an expert's matrices, uint8, for kernels while memory is bound."""
        start = self._first[layer] + expert * self._block
        return self._tensor[start : start + self._sizes[layer]]

    def bind(self, source: Page | None, page: Page) -> None:
        """Move a block from page `source` to `page`; with None, bind a new one. MemoryError leaves both without memory.

        Each change is noted before it is made: after an interruption, `drop` of both pages frees the block.
        """
        calls, to = self._calls, self.address(page)
        try:
            if source is None:
                self._bound[page] = calls.create(self._block)
                self.fresh += 1
            else:
                self._bound[page] = self._bound[source]
                calls.unmap(self.address(source), self._block)
                del self._bound[source]
                self.moved += 1
            calls.map(to, self._block, self._bound[page])
            calls.allow(to, self._block)
        except DriverError:
            self.drop(page)
            if source is not None:
                self.drop(source)
            raise

    def bind_both(self, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Return False: on a GPU an expert is one page, which `bind` moves."""
        return False

    def drop(self, page: Page) -> None:
        """Return a page's block, if it has one, to the device."""
        handle = self._bound.pop(page, None)
        if handle is None:
            return
        with contextlib.suppress(DriverError):  # an interruption came before the block was mapped
            self._calls.unmap(self.address(page), self._block)
        if handle not in self._bound.values():
            with contextlib.suppress(DriverError):
                self._calls.release(handle)

    def close(self) -> None:
        """Free everything, once nothing on the device reads or writes it. May be called twice."""
        for page in list(self._bound):
            self.drop(page)
        if self._at:
            with contextlib.suppress(DriverError):  # the process may be ending, and the device gone
                self._calls.unreserve(self._at, self._whole)
        self._at = 0
