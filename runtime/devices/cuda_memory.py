"""Memory beside and on a CUDA device: blocks in torch's allocator, and host memory that is pinned."""

from __future__ import annotations

import contextlib
import logging
import threading

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.store.cudart import MAPPED, PORTABLE, CudaError, Cudart
from moepack.runtime.store.pinned import PIECE

from .contract import Memory
from .cpu import CpuMemory
from .torch_cuda import TorchGpu

log = logging.getLogger("moepack.runtime")


class RegisteredMemory(CpuMemory):
    """Anonymous pages of the host tier; each range is pinned when it is taken. The lock of their pool guards them.

    Pinned pages are not swapped out, and the device can copy from them. Once the system refuses to pin more, further
    ranges are ordinary memory. `pinned` counts the registered bytes.
    """

    def __init__(self, size: int, calls: Cudart, refused: threading.Event) -> None:
        """Reserve `size` bytes. `refused`, which all memories of a device share, is set at the first refusal to pin."""
        super().__init__(size)
        self.pinned = 0
        self._calls, self._refused = calls, refused
        self._registered: dict[int, int] = {}

    def take(self, start: int, size: int) -> None:
        """Take these bytes, and pin them unless the system has refused."""
        super().take(start, size)
        if self._refused.is_set():
            return
        try:
            self._calls.register(self.tensor.data_ptr() + start, size, PORTABLE)
        except CudaError as error:
            self._refused.set()
            log.info("host memory: experts that the host runs are in ordinary memory from here on: %s", error)
            return
        self._registered[start] = size
        self.pinned += size

    def give_back(self, start: int, size: int) -> None:
        """Unpin these bytes, and give whole pages back to the system."""
        self._let_go(start)
        super().give_back(start, size)

    def _let_go(self, start: int) -> None:
        if (size := self._registered.pop(start, None)) is not None:
            self.pinned -= size
            with contextlib.suppress(CudaError):  # the device may be gone
                self._calls.unregister(self.tensor.data_ptr() + start)

    def close(self) -> None:
        """Unpin everything; the memory stays. May be called twice."""
        for start in list(self._registered):
            self._let_go(start)


class ReadMemory(CpuMemory):
    """Anonymous pages that the device's kernels read, pinned from the start in pieces of whole blocks."""

    returnable = False

    def __init__(self, block: int, blocks: int, calls: Cudart) -> None:
        """Pin them. Raises InputError where the system refuses, or the device has other addresses for them."""
        super().__init__(block * blocks)
        self.pinned, self._calls = 0, calls
        self._registered: list[int] = []
        self.take(0, len(self.tensor))  # huge pages
        try:
            piece = max(1, PIECE // block) * block
            for start in range(0, block * blocks, piece):
                size = min(piece, block * blocks - start)
                self._registered.append(start)  # before: an interruption may come after the call
                calls.register(self.tensor.data_ptr() + start, size, PORTABLE | MAPPED)
                self.pinned += size
                if calls.device_address(self.tensor.data_ptr() + start) != self.tensor.data_ptr() + start:
                    raise InputError("experts in pinned memory are read at the host's addresses: this GPU has others")
        except BaseException as error:
            self.close()
            if isinstance(error, CudaError):
                raise InputError(f"experts in pinned memory need {block * blocks} bytes of it: {error}") from None
            raise

    def close(self) -> None:
        """Unpin everything, once no kernel reads it; the memory stays. May be called twice."""
        while self._registered:
            with contextlib.suppress(CudaError):  # the device may be gone
                self._calls.unregister(self.tensor.data_ptr() + self._registered.pop())
        self.pinned = 0


class BlockMemory(Memory):
    """Blocks that torch's allocator gives and takes back one by one. The lock of their pool guards them."""

    returnable = True

    def __init__(self, size: int, gpu: TorchGpu) -> None:
        """Take nothing yet."""
        super().__init__(torch.empty(size, dtype=torch.uint8, device="meta"))
        self._gpu, self._blocks = gpu, dict[int, Tensor]()

    def at(self, start: int, size: int) -> Tensor:
        """Return the block that was taken at `start`."""
        return self._blocks[start]

    def take(self, start: int, size: int) -> None:
        """Take a block of `size` bytes."""
        try:
            self._blocks[start] = self._gpu.block(size)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def give_back(self, start: int, size: int) -> None:
        """Give a block back, whoever still has a view of it."""
        self._gpu.free(self._blocks.pop(start))

    def close(self) -> None:
        """Give everything back. The device must have stopped using it. May be called twice."""
        for start in list(self._blocks):
            self.give_back(start, 0)
