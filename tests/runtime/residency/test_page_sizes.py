"""A machine whose pages have 16 or 64 KiB: memory is taken and given back in its pages, never in parts of them.

The faults: blocks of 4 KiB pages that the system refuses to take back, so that nothing is promoted; and a length that
the system rounds up to whole pages, which clears a neighbour's bytes.
"""

import ctypes
import errno
import mmap
import sys
from typing import NamedTuple

import pytest
import torch
from live_models import ROOM, load, wait_for

from moepack.pack.encodings.bf16 import LosslessBf16
from moepack.pack.reader import open_bundle
from moepack.pack.sections import MEMORY_PAGE
from moepack.runtime.devices import cpu
from moepack.runtime.store import page_file


class Pages(NamedTuple):
    """A machine's pages: their bytes, and the lengths that it took back."""

    size: int
    returned: list[int]


@pytest.fixture(params=[16 << 10, 64 << 10])
def pages(request, monkeypatch):
    """Another size of the machine's pages, in every module that has read it, and a system that keeps to it."""
    size = request.param
    for name, module in list(sys.modules.items()):
        if name.startswith("moepack.") and getattr(module, "MEMORY_PAGE", None) == MEMORY_PAGE:
            monkeypatch.setattr(module, "MEMORY_PAGE", size)
    monkeypatch.setattr(LosslessBf16, "matrix_boundary", size)
    bases = []
    returned = []
    made = cpu.CpuMemory.__init__

    def remembered(self, wanted):
        made(self, wanted)
        bases.append(self.tensor.data_ptr())

    def advise(address, length, advice):
        """As Linux: the address must be a page's, and a length is rounded up to whole pages."""
        if advice != mmap.MADV_DONTNEED:
            return 0
        base = max(base for base in bases if base <= address)
        if (address - base) % size:
            return errno.EINVAL
        returned.append(length)
        ctypes.memset(address, 0, -(-length // size) * size)
        return 0

    monkeypatch.setattr(cpu.CpuMemory, "__init__", remembered)
    monkeypatch.setattr(cpu, "madvise", advise)
    return Pages(size, returned)


def test_versions_change_and_neighbours_keep_their_bytes(pages, bundle):
    """Promotions fill the room; the KV cache then pushes experts out, whose memory goes back; what stays is exact."""
    model = load(bundle, room=ROOM)
    live = model.moepack.manager
    wait_for(lambda: model.moepack.counters()["promotions"] > 8, model)
    live.grow_kv(ROOM // 2)
    wait_for(lambda: live.transitions.kv_bytes == ROOM // 2)
    live.transitions.shrink_kv(ROOM // 2)
    wait_for(lambda: bool(pages.returned), model)
    opened = open_bundle(bundle)
    exact = 0
    with live.step() as step:  # what it reads stays, whatever changes meanwhile
        for position, snapshot in enumerate(step.snapshots):
            for expert, handle in enumerate(snapshot.handles):
                if handle.version is not None and not handle.version.plain:
                    extent = opened.extent(handle.version.name, position, expert)
                    assert torch.equal(handle.extent, torch.from_numpy(extent.copy())), (position, expert)
                    exact += 1
    assert exact > 0
    assert model.moepack.health()["ok"] and model.moepack.resident_bytes_peak <= model.moepack.budget_bytes
    model.moepack.close()


def test_parts_of_pages_are_not_given_back(pages):
    page = pages.size
    memory = cpu.CpuMemory(4 * page)
    memory.take(0, 4 * page)
    memory.tensor.fill_(7)
    memory.give_back(page, page)
    assert memory.tensor.view(4, page).any(dim=1).tolist() == [True, False, True, True]
    for start, size in ((page, 4096), (4096, page)):
        with pytest.raises(ValueError, match="not whole pages"):
            memory.give_back(start, size)


@pytest.mark.parametrize(
    ("at", "size", "found", "is_cached"),
    [(0, 2, 1, True), (-1, 2, 1, False), (-1, 2, 2, True), (0, 1, 0, False)],  # 4 KiB from a page's begin; its pages
)
def test_pages_that_a_range_touches_are_counted(pages, at, size, found, is_cached, monkeypatch):
    """The fault: a range on two large pages, of which the page cache has one, taken for cached."""

    def cachestat(number, file, asked, answer, flags):
        answer[0] = found
        return 0

    monkeypatch.setattr(page_file._libc, "syscall", cachestat, raising=False)
    assert page_file.is_cached(0, pages.size + 4096 * at, 4096 * size) is is_cached
