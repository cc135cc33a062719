"""Pools of fixed blocks over one range of device memory each, with constant-time free lists.

The range is set aside when a model is loaded; a block of it is reserved with the budget tracker before its first use
and stays reserved while it may be used again, until `trim` gives it back. Decides nothing about who gets a block.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass

from torch import Tensor

from moepack.pack.spec import PAGE, align
from moepack.runtime.devices.contract import Memory
from moepack.runtime.planning.budget import BudgetTracker


class StaleBlockError(RuntimeError):
    """A block was used after it was freed: a bug in moepack, not in its use."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block while it is taken.

    Attributes:
        pool: where it goes back to.
        index: its place there.
        generation: how often that place had been taken before: a block kept too long is found out by it.
        tensor: its bytes, uint8 [block_bytes].
    """

    pool: Pool
    index: int
    generation: int
    tensor: Tensor

    def check(self) -> None:
        """Raise StaleBlockError when it was freed."""
        self.pool.check(self)


class Pool:
    """Blocks of one size. Every method may be called from any thread.

    Attributes:
        name: under which its bytes are reserved.
        block_bytes: a block's size, whole pages.
        blocks: how many there can be.
        budget_bytes: what a block takes of the device's budget: nothing on the host.
    """

    def __init__(
        self,
        name: str,
        block_bytes: int,
        blocks: int,
        tracker: BudgetTracker,
        memory: Memory,
        on_host: bool = False,
    ) -> None:
        """Cut `memory` into blocks; `tracker` is the device's, or the host's.

        Raises:
            ValueError: when it is too small, or cannot be given back in parts and does not fit the budget.
        """
        self.name, self.block_bytes, self.blocks = name, align(block_bytes, PAGE), blocks
        self.budget_bytes = 0 if on_host else self.block_bytes
        if len(memory.tensor) < self.block_bytes * blocks:
            raise ValueError(f"pool {name}: {blocks} blocks of {self.block_bytes} bytes need more memory")
        self._tracker, self._memory = tracker, memory
        self._lock = threading.Lock()
        self._generation = [0] * blocks
        self._taken = [False] * blocks
        self._reserved: list[int] = []  # free and reserved: taken first, their pages are there
        self._untouched = list(range(blocks - 1, -1, -1))  # free and not reserved
        if not memory.returnable:
            if not tracker.try_reserve(name, self.block_bytes * blocks):
                raise ValueError(f"pool {name}: {blocks} blocks of {self.block_bytes} bytes pass the budget")
            self._reserved, self._untouched = self._untouched, []

    def allocate(self) -> Block | None:
        """A block, or None where the pool is empty or the budget refuses. Never waits."""
        with self._lock:
            if self._reserved:
                index = self._reserved.pop()
            elif self._untouched and self._take(self._untouched[-1]):
                index = self._untouched.pop()
            else:
                return None
            self._taken[index] = True
            start = index * self.block_bytes
            tensor = self._memory.tensor[start : start + self.block_bytes]
            return Block(self, index, self._generation[index], tensor)

    def _take(self, index: int) -> bool:
        """Reserve what a block takes, and take it; whether both could be."""
        start = index * self.block_bytes
        cost = self._memory.cost(start, self.block_bytes)
        if not self._tracker.try_reserve(self.name, cost):
            return False
        try:
            self._memory.take(start, self.block_bytes)
        except MemoryError:
            self._tracker.release(self.name, cost)
            return False
        return True

    def free(self, block: Block) -> None:
        """Take a block back. It stays reserved for the next one who asks.

        Raises:
            StaleBlockError: when it was freed before.
        """
        with self._lock:
            self._check(block)
            self._generation[block.index] += 1
            self._taken[block.index] = False
            self._reserved.append(block.index)

    def free_others(self, kept: Container[int]) -> None:
        """Take back all blocks but those of these numbers: whoever had them was interrupted."""
        with self._lock:
            self._reserved = [i for i in self._reserved if not self._taken[i]]
            known = {*self._reserved, *self._untouched}
            for index in range(self.blocks):
                if index not in known and index not in kept:
                    self._generation[index] += 1
                    self._taken[index] = False
                    self._reserved.append(index)

    def check(self, block: Block) -> None:
        """Raise StaleBlockError when a block was freed."""
        with self._lock:
            self._check(block)

    def _check(self, block: Block) -> None:
        if not self._taken[block.index] or self._generation[block.index] != block.generation:
            raise StaleBlockError(f"pool {self.name}: block {block.index} was freed while it was held")

    def trim(self, size: int) -> int:
        """Give free blocks back to the device and to the budget until they make up `size` bytes; returns how many."""
        given = 0
        while given < size and self._memory.returnable:
            with self._lock:
                if not self._reserved:
                    break
                index = self._reserved.pop()
                back = self._memory.give_back(index * self.block_bytes, self.block_bytes)
                self._tracker.release(self.name, back)
                self._untouched.append(index)
            given += back
        return given

    @property
    def returnable(self) -> bool:
        """Whether free blocks can be given back."""
        return self._memory.returnable

    @property
    def can_grow(self) -> bool:
        """Whether there is a block that is neither taken nor reserved."""
        with self._lock:
            return bool(self._untouched)

    @property
    def taken(self) -> int:
        """Blocks that are taken."""
        with self._lock:
            return sum(self._taken)

    @property
    def spare_bytes(self) -> int:
        """Bytes of blocks that are free and reserved."""
        with self._lock:
            return len(self._reserved) * self.block_bytes
