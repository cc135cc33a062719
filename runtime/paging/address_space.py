"""Addresses for every expert's matrices, and the few blocks of memory that are bound to some of them at a time.

The CPU's form of PagedTensor (fluxmoe, section 4.1): a reserved range in which each page, one matrix of one expert, has
its place for as long as the model lives; nothing stands there until a block of memory is bound to it. A block goes from
page to page by moving page-table entries: memory that the system hands out anew costs a fault and zeros each time.
Decides nothing about which pages have memory (window.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import PAGE, Matrix, Version, align
from moepack.runtime.kernels.forms import make_forms

HUGE = (
    2 << 20
)  # what one entry of a second-level page table covers: blocks on such bounds are moved 512 pages at a time
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP: nobody else's mapping may land in what was left
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_RESERVED_HERE = _RESERVED | 0x10  # MAP_FIXED

Page = tuple[int, int, int]  # matrix (0 gate and up, 1 down; on a GPU always 0: all of them), layer position, expert


class AddressSpace(Protocol):
    """Where pages are, and what binds memory to them. Every method may be called from any thread, for other pages."""

    def address(self, page: Page) -> int:
        """Of its first byte, a multiple of 64. It never changes (equation 4)."""

    def size(self, page: Page) -> int:
        """Its bytes."""

    def extent(self, layer: int, expert: int) -> Tensor:
        """All pages of an expert, uint8: to be read or written only where memory is bound."""

    def bind(self, source: Page | None, page: Page) -> None:
        """Give a page the memory that `source` has, which then has none; None: memory that no page has had.

        What stood there is lost. Raises MemoryError where the system refuses.
        """

    def bind_both(self, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Where an expert has two pages, give both the memory of another's at once; whether that can be done."""

    def drop(self, page: Page) -> None:
        """Give a page's memory, if it has any, back to the system."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the pages of one layer's experts begin.

    Attributes:
        first: of the layer's first expert, from the beginning of the range.
        stride: from one expert to the next.
        at: of each matrix, from the beginning of its expert.
        sizes: bytes of each matrix, its bias with it: whole system pages.
        resident: bytes of an expert.
    """

    first: int
    stride: int
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    resident: int


def lay_out(layers: Sequence[tuple[Sequence[Matrix], int]], version: Version) -> tuple[list[Places], int]:
    """The places of all layers' pages, and the bytes of the range. Arithmetic only.

    Args:
        layers: their matrices and how many experts they have.
        version: the lossless one.
    """
    places, first = [], 0
    for matrices, experts in layers:
        at = tuple(f.low for f in make_forms(matrices, version))
        size = version.resident_size(matrices)
        whole = align(size, PAGE)
        stride = align(size, HUGE) if size >= HUGE else whole
        sizes = tuple(b - a for a, b in zip(at, (*at[1:], whole), strict=True))
        places.append(Places(first, stride, at, sizes, size))
        first += stride * experts
    return places, first


class CpuAddressSpace:
    """A reserved range of this process's addresses.

    Attributes:
        moved: bindings that moved memory from another page.
        fresh: those that took memory anew.
    """

    def __init__(self, layers: Sequence[tuple[Sequence[Matrix], int]], version: Version) -> None:
        """Reserve the range; no memory is taken.

        Raises:
            InputError: where the system does not give so many addresses.
        """
        self._places, size = lay_out(layers, version)
        try:
            self._map = mmap.mmap(-1, size + HUGE, flags=_RESERVED)
        except (OSError, ValueError) as error:
            raise InputError(f"{size} bytes of addresses cannot be reserved for experts: {error}") from None
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tensor = whole[-whole.data_ptr() % HUGE :]
        self._at = self._tensor.data_ptr()
        self._libc = ctypes.CDLL(None, use_errno=True)
        for name, count in (("mremap", 5), ("mprotect", 3), ("mmap", 6)):
            if (function := getattr(self._libc, name, None)) is not None:
                function.restype = ctypes.c_int if name == "mprotect" else ctypes.c_void_p
                function.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * (count - 1)]
        self._can_move = hasattr(self._libc, "mremap")
        self._reserve(whole.data_ptr(), len(whole))  # whoever touches what has no memory is stopped
        self.moved = self.fresh = 0

    def address(self, page: Page) -> int:
        """Of a page's first byte."""
        matrix, layer, expert = page
        places = self._places[layer]
        return self._at + places.first + expert * places.stride + places.at[matrix]

    def size(self, page: Page) -> int:
        """Bytes of a page, whole system pages."""
        return self._places[page[1]].sizes[page[0]]

    def extent(self, layer: int, expert: int) -> Tensor:
        """All pages of an expert, uint8: to be read or written only where memory is bound."""
        places = self._places[layer]
        start = places.first + expert * places.stride
        return self._tensor[start : start + places.resident]

    def bind(self, source: Page | None, page: Page) -> None:
        """Move a block's memory from one page to another, or take it anew.

        On bounds of 2 MiB a move takes 5 us for 6 MiB, off them 21 us; taking as much anew takes 7 ms with its faults.

        Raises:
            MemoryError: when the system refuses.
        """
        to, room = self.address(page), self.size(page)
        if source is None:
            self._protect(to, room, _READ_WRITE)
            self.fresh += 1
            return
        at, had = self.address(source), self.size(source)
        both = min(had, room)
        if self._can_move and self._libc.mremap(at, both, both, _MOVE, to) == to:
            self.moved += 1
        else:  # a system without such moves, or out of mappings: as much is taken anew
            self._reserve(to, room)  # what stood there may be gone
            self._can_move, both = False, 0
            self.fresh += 1
        self._reserve(at, had)
        if room > both:
            self._protect(to + both, room - both, _READ_WRITE)

    def bind_both(self, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Move the memory of all of an expert's pages to another's at once; whether that can be done.

        They stand side by side: one move takes half the time of two.

        Args:
            source, target: layer position and expert.
        """
        of, to = self._places[source[0]], self._places[target[0]]
        if not self._can_move or of.sizes != to.sizes:
            return False
        size, at = sum(of.sizes), self.address((0, *source))
        place = self.address((0, *target))
        if self._libc.mremap(at, size, size, _MOVE, place) != place:
            self._reserve(place, size)  # what stood there may be gone
            return False
        self.moved += len(of.sizes)
        self._reserve(at, size)
        return True

    def drop(self, page: Page) -> None:
        """Give a page's memory, if it has any, back to the system."""
        self._reserve(self.address(page), self.size(page))

    def _reserve(self, at: int, size: int) -> None:
        """Put back what was there before memory was: neighbours then are one mapping again, which protecting them would
        not make of them (vm.max_map_count bounds mappings)."""
        if self._libc.mmap(at, size, _NONE, _RESERVED_HERE, -1, 0) != at:
            raise MemoryError(f"addresses of an expert are lost: {os.strerror(ctypes.get_errno())}")

    def _protect(self, at: int, size: int, access: int) -> None:
        if self._libc.mprotect(at, size, access):
            why = os.strerror(ctypes.get_errno())
            raise MemoryError(f"memory for an expert cannot be bound: {why} (vm.max_map_count bounds mappings)")
