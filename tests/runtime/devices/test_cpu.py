"""A CPU's memory: huge pages where all of one is taken, and never a page that is not."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.pack.spec import PAGE
from moepack.runtime.devices.cpu import HUGE, CpuMemory

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_THEM = MODE.exists() and "[never]" not in MODE.read_text()


def resident(memory):
    """Its bytes that are in memory."""
    with Path("/proc/self/pagemap").open("rb") as f:
        f.seek(memory.tensor.data_ptr() // PAGE * 8)
        there = np.frombuffer(f.read(len(memory.tensor) // PAGE * 8), np.uint64) >> np.uint64(63)
    return int(there.sum()) * PAGE


def in_huge_pages(memory):
    """Bytes in huge pages, of the mappings that it is a part of."""
    first = memory.tensor.data_ptr()
    total = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(x, 16) for x in found.groups())
            inside = begin < first + len(memory.tensor) and first < end
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not HAS_THEM, reason="no transparent huge pages here")
def test_what_is_taken_at_once_is_in_huge_pages():
    memory = CpuMemory(9 * HUGE)
    memory.take(0, 8 * HUGE)
    memory.tensor[: 8 * HUGE].fill_(1)
    memory.settle(0, 8 * HUGE)
    assert resident(memory) == 8 * HUGE and in_huge_pages(memory) >= 6 * HUGE


@pytest.mark.skipif(not HAS_THEM, reason="no transparent huge pages here")
@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=4, max_size=30))
def test_only_what_is_taken_is_there(changes):
    """Blocks of 3/4 of a huge page, written when they are taken, come and go: their neighbours' pages do not."""
    block, kept = 3 * HUGE // 4 // PAGE * PAGE, set()
    memory = CpuMemory(8 * block)
    for i, wanted in changes:
        if wanted and i not in kept:
            memory.take(i * block, block)
            memory.tensor[i * block : (i + 1) * block].fill_(i + 1)
            memory.settle(i * block, block)
            kept.add(i)
        elif not wanted and i in kept:
            memory.give_back(i * block, block)
            kept.remove(i)
        assert resident(memory) == len(kept) * block
        assert all(int(memory.tensor[k * block]) == int(memory.tensor[(k + 1) * block - 1]) == k + 1 for k in kept)
    if len(kept) == 8:
        assert in_huge_pages(memory) > 0
