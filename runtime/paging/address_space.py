"""Addresses for every expert's matrices, and the few blocks of memory that are bound to some of them.

The CPU's form of PagedTensor (fluxmoe, section 4.1). A page is one matrix of one expert, or a whole expert whose
matrices share system pages; it keeps its address in a reserved range while the model lives. A block of memory moves
from page to page by a change of page-table entries, since fresh memory would cost a fault and zeroing each time.
window.py decides which pages have memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import MEMORY_PAGE, Matrix, Version, align
from moepack.runtime.planning.paging import page_sizes, page_starts

HUGE = 2 << 20  # bytes that a second-level page-table entry maps: blocks aligned to it move 512 system pages at a time
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP: no other mapping can take the old range
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_RESERVED_HERE = _RESERVED | 0x10  # MAP_FIXED

# Matrix (0 gate and up, 1 down; always 0 where a page is a whole expert, as on a GPU), layer position, expert
Page = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Places:
    """Offsets and sizes of one layer's pages, in bytes."""

    first: int  # offset of the layer's first expert in the range
    stride: int  # distance from one expert to the next
    at: tuple[int, ...]  # offset of each page in its expert
    sizes: tuple[int, ...]  # size of each page, in whole system pages
    resident: int  # size of an expert


def lay_out(layers: Sequence[tuple[Sequence[Matrix], int]], version: Version) -> tuple[list[Places], int]:
    """Return the places of each layer's pages, and the bytes of the range. `layers`: (matrices, number of experts)."""
    places = []
    first = 0
    for matrices, experts in layers:
        size = version.resident_size(matrices)
        stride = align(size, HUGE if size >= HUGE else MEMORY_PAGE)
        at = page_starts(matrices, version)
        sizes = page_sizes(matrices, version)
        places.append(Places(first, stride, at, sizes, size))
        first += stride * experts
    return places, first


class CpuAddressSpace:
    """A reserved range of this process's addresses."""

    def __init__(self, layers: Sequence[tuple[Sequence[Matrix], int]], version: Version) -> None:
        """Reserve the range without taking memory. Raises InputError when the system has too few addresses."""
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
        self._reserve(whole.data_ptr(), len(whole))  # access to a page without memory is a fault
        self.moved = self.fresh = 0  # how many bindings moved memory from another page, or took new memory

    def address(self, page: Page) -> int:
        """Return the address of a page's first byte, a multiple of 64 that never changes (equation 4)."""
        matrix, layer, expert = page
        places = self._places[layer]
        return self._at + places.first + expert * places.stride + places.at[matrix]

    def size(self, page: Page) -> int:
        """Return the bytes of a page, a multiple of the system's page size."""
        return self._places[page[1]].sizes[page[0]]

    def extent(self, layer: int, expert: int) -> Tensor:
        """Return all pages of an expert as a uint8 tensor. Only pages with memory may be accessed."""
        places = self._places[layer]
        start = places.first + expert * places.stride
        return self._tensor[start : start + places.resident]

    def bind(self, source: Page | None, page: Page) -> None:
        """Move a block's memory from page `source` to `page`; with None, take new memory. `page` loses its contents.

        For 6 MiB, a move takes 5 us if aligned to 2 MiB and 21 us otherwise; new memory takes 7 ms with its faults.
        Raises MemoryError when the system refuses.
        """
        to = self.address(page)
        room = self.size(page)
        if source is None:
            self._open(to, room)
            self.fresh += 1
            return
        at = self.address(source)
        had = self.size(source)
        both = min(had, room)
        if self._can_move and self._libc.mremap(at, both, both, _MOVE, to) == to:
            self.moved += 1
        else:  # the system lacks such moves, or mappings: take new memory instead
            self._reserve(to, room)  # the failed move may have unmapped it
            self._can_move = False
            both = 0
            self.fresh += 1
        self._reserve(at, had)
        if room > both:
            self._open(to + both, room - both)

    def bind_both(self, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Move the memory of all pages of one expert to another expert by one call; return whether that was possible.

        `source` and `target` are (layer position, expert). One call takes half the time of two.
        """
        of = self._places[source[0]]
        to = self._places[target[0]]
        if not self._can_move or of.sizes != to.sizes:
            return False
        size = sum(of.sizes)
        at = self.address((0, *source))
        place = self.address((0, *target))
        if self._libc.mremap(at, size, size, _MOVE, place) != place:
            self._reserve(place, size)  # the failed move may have unmapped it
            return False
        self.moved += len(of.sizes)
        self._reserve(at, size)
        return True

    def drop(self, page: Page) -> None:
        """Return a page's memory, if it has any, to the system."""
        self._reserve(self.address(page), self.size(page))

    def _reserve(self, at: int, size: int) -> None:
        """Reserve addresses again, without memory. Unlike mprotect, this joins adjacent mappings (vm.max_map_count)."""
        if self._libc.mmap(at, size, 0, _RESERVED_HERE, -1, 0) != at:
            raise MemoryError(f"addresses of an expert are lost: {os.strerror(ctypes.get_errno())}")

    def _open(self, at: int, size: int) -> None:
        if self._libc.mprotect(at, size, mmap.PROT_READ | mmap.PROT_WRITE):
            why = os.strerror(ctypes.get_errno())
            raise MemoryError(f"memory for an expert cannot be bound: {why} (vm.max_map_count bounds mappings)")
