"""Pools: each cuts one range of memory into blocks of one size, with constant-time free lists.

The range is set aside when a model is loaded. A block is reserved with the budget tracker before its first use, and
stays reserved until `trim` gives it back.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass

from torch import Tensor

from moepack.pack.spec import MEMORY_PAGE, align
from moepack.runtime.devices.contract import Memory
from moepack.runtime.planning.budget import BudgetTracker


class StaleBlockError(RuntimeError):
    """A block was used after it was freed: a bug in moepack."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block of a pool, from `allocate` to `free`."""

    pool: Pool
    index: int  # the block's index in the pool
    generation: int  # how often this index was taken before: reveals a block that is used after it was freed

    @property
    def tensor(self) -> Tensor:
        """Its bytes, uint8 [block_bytes]. `filled` may move those of pinned memory."""
        pool = self.pool
        return pool._memory.at(self.index * pool.block_bytes, pool.block_bytes)

    def filled(self) -> None:
        """Note that its bytes have been written."""
        pool = self.pool
        pool._memory.filled(self.index * pool.block_bytes, pool.block_bytes)

    def check(self) -> None:
        """Raise StaleBlockError if the block was freed."""
        pool = self.pool
        index = self.index
        if not pool._taken[index] or pool._generation[index] != self.generation:
            raise StaleBlockError(f"pool {pool.name}: block {index} was freed while it was held")


class Pool:
    """Blocks of one size. Every method may be called from any thread."""

    def __init__(
        self, name: str, block_bytes: int, blocks: int, tracker: BudgetTracker, memory: Memory, on_host: bool = False
    ) -> None:
        """Cut `memory` into `blocks` blocks of whole pages, whose bytes `tracker` reserves under `name`.

        `tracker` keeps the device's budget, or the host's.

        Raises:
            ValueError: when the memory is too small, or cannot be given back in parts and does not fit the budget.
        """
        self.name = name
        self.block_bytes = align(block_bytes, MEMORY_PAGE)
        self.blocks = blocks
        self.on_host = on_host
        self.budget_bytes = 0 if on_host else self.block_bytes  # bytes of the device's budget that a block takes
        self.returnable = memory.returnable  # whether free blocks can be given back
        if len(memory.tensor) < self.block_bytes * blocks:
            raise ValueError(f"pool {name}: {blocks} blocks of {self.block_bytes} bytes need more memory")
        self._tracker = tracker
        self._memory = memory
        self._lock = threading.Lock()
        self._generation = [0] * blocks
        self._taken = [False] * blocks
        self._reserved: list[int] = []  # free and reserved blocks: allocated first, as they have memory
        self._untouched = list(range(blocks - 1, -1, -1))  # free blocks that are not reserved yet
        if not self.returnable:
            if not tracker.try_reserve(name, self.block_bytes * blocks):
                raise ValueError(f"pool {name}: {blocks} blocks of {self.block_bytes} bytes pass the budget")
            self._reserved = self._untouched
            self._untouched = []

    def allocate(self) -> Block | None:
        """Take a block; return None if the pool is empty or the budget refuses another. Never waits."""
        with self._lock:
            if self._reserved:
                index = self._reserved.pop()
            elif self._untouched and self._take(self._untouched[-1]):
                index = self._untouched.pop()
            else:
                return None
            self._taken[index] = True
            return Block(self, index, self._generation[index])

    def _take(self, index: int) -> bool:
        if not self._tracker.try_reserve(self.name, self.block_bytes):
            return False
        try:
            self._memory.take(index * self.block_bytes, self.block_bytes)
        except MemoryError:
            self._tracker.release(self.name, self.block_bytes)
            return False
        return True

    def free(self, block: Block) -> None:
        """Take a block back; its bytes stay reserved. Raises StaleBlockError if the block was freed before."""
        with self._lock:
            block.check()
            self._generation[block.index] += 1
            self._taken[block.index] = False
            self._reserved.append(block.index)

    def free_others(self, kept: Container[int]) -> None:
        """Take back all blocks, after an interruption, except those whose indices are in `kept`."""
        with self._lock:
            self._reserved = [i for i in self._reserved if not self._taken[i]]
            known = {*self._reserved, *self._untouched}
            for index in range(self.blocks):
                if index not in known and index not in kept:
                    self._generation[index] += 1
                    self._taken[index] = False
                    self._reserved.append(index)

    def trim(self, size: int) -> int:
        """Give free blocks back to device and budget, until `size` bytes are given or none is left; return the sum."""
        given = 0
        while given < size and self.returnable:
            with self._lock:
                if not self._reserved:
                    break
                index = self._reserved.pop()
                self._memory.give_back(index * self.block_bytes, self.block_bytes)
                self._tracker.release(self.name, self.block_bytes)
                self._untouched.append(index)
            given += self.block_bytes
        return given

    @property
    def can_grow(self) -> bool:
        """Whether the pool has a block that is not reserved yet."""
        with self._lock:
            return bool(self._untouched)

    @property
    def taken(self) -> int:
        """The number of taken blocks."""
        with self._lock:
            return sum(self._taken)

    @property
    def spare_bytes(self) -> int:
        """Bytes of blocks that are free but still reserved."""
        with self._lock:
            return len(self._reserved) * self.block_bytes
