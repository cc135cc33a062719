"""The budget's tracker and the pools of blocks, alone."""

import pytest

from moepack.pack.spec import PAGE
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.residency.pools import Pool, StaleBlockError


def test_tracker_arithmetic():
    tracker = BudgetTracker(100, 30)
    assert tracker.try_reserve("a", 70) and not tracker.try_reserve("b", 1) and tracker.try_reserve("b", 0)
    assert (tracker.reserved, tracker.peak, tracker.free) == (100, 100, 0)
    tracker.release("a", 20)
    assert tracker.try_reserve("b", 20) and tracker.named() == {"fixed": 30, "a": 50, "b": 20}
    for name, size in (("a", 51), ("c", 1), ("a", -1)):
        with pytest.raises(ValueError, match="released"):
            tracker.release(name, size)
    with pytest.raises(ValueError, match="do not fit"):
        BudgetTracker(10, 11)


def test_blocks_are_aligned_reused_and_given_back():
    tracker = BudgetTracker(3 * PAGE)
    pool = Pool("p", PAGE - 5, 5, tracker, CpuMemory(5 * PAGE))
    blocks = [pool.allocate() for _ in range(4)]
    assert blocks[3] is None and tracker.reserved == 3 * PAGE
    first = blocks[0]
    assert first is not None and first.tensor.data_ptr() % 64 == 0 and len(first.tensor) == PAGE
    first.tensor.fill_(7)
    pool.free(first)
    with pytest.raises(StaleBlockError):
        pool.free(first)
    again = pool.allocate()
    assert again is not None and again.index == first.index and again.generation == first.generation + 1
    with pytest.raises(StaleBlockError):
        first.check()
    pool.free(again)
    assert pool.trim(1) == PAGE and tracker.reserved == 2 * PAGE and pool.trim(PAGE) == 0
    assert not first.tensor.any(), "its pages were returned"


def test_memory_that_cannot_be_given_back_is_reserved_whole():
    memory = CpuMemory(2 * PAGE)
    memory.returnable = False
    tracker = BudgetTracker(2 * PAGE)
    pool = Pool("p", PAGE, 2, tracker, memory)
    block = pool.allocate()
    assert block is not None and tracker.reserved == 2 * PAGE
    pool.free(block)
    assert pool.trim(PAGE) == 0 and tracker.reserved == 2 * PAGE
    with pytest.raises(ValueError, match="pass the budget"):
        Pool("q", PAGE, 1, tracker, memory)
