"""Memory beside and on a CUDA device: blocks in torch's allocator, and host memory that is pinned."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import MEMORY_PAGE
from moepack.runtime.store.cudart import HOST_REGISTER_SUPPORTED, MAPPED, PORTABLE, CudaError, Cudart
from moepack.runtime.store.pinned import PIECE
from moepack.runtime.store.pinning import Mode, Pinned, allocate, pin_filled

from .contract import Memory
from .cpu import CpuMemory
from .torch_cuda import TorchGpu

log = logging.getLogger("moepack.runtime")


class RegisteredMemory(CpuMemory):
    """Anonymous pages of the host tier; each range is pinned once it is filled. The lock of their pool guards them.

    Pinned pages are not swapped out, and the device can copy from them. Once the system refuses to pin more, further
    ranges are ordinary memory.
    """

    def __init__(self, size: int, calls: Cudart, refused: threading.Event) -> None:
        """Reserve `size` bytes. `refused`, which all memories of a device share, is set at the first refusal to pin."""
        super().__init__(size)
        self._calls = calls
        self._refused = refused
        self._registered: dict[int, int] = {}

    @property
    def pinned(self) -> int:
        """The registered bytes."""
        return sum(self._registered.values())

    def filled(self, start: int, size: int) -> None:
        """Pin these bytes, unless they are pinned or the system has refused."""
        if self._refused.is_set() or start in self._registered:
            return
        try:
            self._calls.register(self.tensor.data_ptr() + start, size, PORTABLE)
        except CudaError as error:
            self._refused.set()
            log.info("host memory: experts that the host runs are in ordinary memory from here on: %s", error)
            return
        self._registered[start] = size

    def give_back(self, start: int, size: int) -> None:
        """Unpin these bytes, and give whole pages back to the system."""
        self._let_go(start)
        super().give_back(start, size)

    def _let_go(self, start: int) -> None:
        if self._registered.pop(start, None) is not None:
            with contextlib.suppress(CudaError):  # the device may be gone
                self._calls.unregister(self.tensor.data_ptr() + start)

    def close(self) -> None:
        """Unpin everything; the memory stays. May be called twice."""
        for start in list(self._registered):
            self._let_go(start)


class ReadMemory(Memory):
    """Host memory that the device's kernels read, in pieces of whole blocks, each pinned once its blocks are filled.

    A piece is anonymous pages, which are registered once they have contents: registering would first zero them. Where
    registering fails, or the device finds registered pages at another address than the host (as under WSL), a piece is
    memory that CUDA allocates, which has one address for both.
    """

    returnable = False

    def __init__(self, block: int, blocks: int, calls: Cudart) -> None:
        """Reserve address space, and try whether its pages can be registered; else allocate all pieces.

        Raises InputError where the system pins neither way.
        """
        super().__init__(torch.empty(block * blocks, dtype=torch.uint8, device="meta"))
        self._mode = Mode.REGISTERED
        self._calls = calls
        self._pages = CpuMemory(block * blocks)
        self._pages.take(0, block * blocks)  # huge pages
        self._piece = max(1, PIECE // block) * block
        self._left = {at: min(self._piece, block * blocks - at) for at in range(0, block * blocks, self._piece)}
        self._held: dict[int, Pinned] = {}
        try:
            self._try_to_register()
            while self._mode is Mode.ALLOCATED and len(self._held) < len(self._left):
                self._pin(len(self._held) * self._piece)
        except BaseException:
            self.close()
            raise

    def _try_to_register(self) -> None:
        try:
            if self._calls.attribute(HOST_REGISTER_SUPPORTED):
                self._register(0, MEMORY_PAGE).close()
            else:
                self._fall("the device registers no host memory")
        except CudaError as error:
            self._fall(str(error))

    def _register(self, start: int, size: int) -> Pinned:
        """Register pages; raise CudaError if the device would find them at another address."""
        pages = self._pages.tensor[start : start + size]
        calls = self._calls
        address = pages.data_ptr()
        done = True
        try:
            try:
                made = pin_filled(calls, pages.numpy(), PORTABLE | MAPPED)
            except CudaError:
                done = False
                raise
            if calls.device_address(address) != address:
                raise CudaError("cudaHostGetDevicePointer", 0, "the device has another address for registered memory")
        except BaseException:
            if done:  # even if the call was interrupted after its work
                with contextlib.suppress(CudaError):
                    calls.unregister(address)
            raise
        return made

    def _fall(self, reason: str) -> None:
        self._mode = Mode.ALLOCATED
        log.info("experts in pinned memory: it is allocated by CUDA, not registered: %s", reason)

    def at(self, start: int, size: int) -> Tensor:
        """Return these bytes, where they are now."""
        piece = start - start % self._piece
        held = self._held.get(piece)
        if held is None or held.mode is Mode.REGISTERED:
            return self._pages.tensor[start : start + size]
        return torch.from_numpy(held.bytes)[start - piece :][:size]

    def filled(self, start: int, size: int) -> None:
        """Pin a piece after the last of its blocks. Raises InputError where the system refuses."""
        piece = start - start % self._piece
        self._left[piece] -= size
        if not self._left[piece] and piece not in self._held:
            self._pin(piece)

    def _pin(self, start: int) -> None:
        size = min(self._piece, len(self.tensor) - start)
        if self._mode is Mode.REGISTERED:
            try:
                self._held[start] = self._register(start, size)
            except CudaError as error:
                self._fall(str(error))
        if self._mode is Mode.ALLOCATED:
            try:
                self._held[start] = made = allocate(self._calls, size)
            except CudaError as error:
                raise InputError(f"experts in pinned memory need {len(self.tensor)} bytes of it: {error}") from None
            if not self._left[start]:
                made.bytes[:] = self._pages.tensor[start : start + size].numpy()
                self._pages.give_back(start, size)

    @property
    def pinned(self) -> int:
        """The pinned bytes."""
        return self.ways().total()

    def ways(self) -> Counter[str]:
        """Return the pinned bytes by the mode in which they are pinned."""
        out: Counter[str] = Counter()
        for held in list(self._held.values()):
            out[held.mode.value] += len(held.bytes)
        return out

    def close(self) -> None:
        """Unpin everything, once no kernel reads it. May be called twice."""
        while self._held:
            with contextlib.suppress(CudaError):  # the device may be gone
                self._held.popitem()[1].close()


class BlockMemory(Memory):
    """Blocks that torch's allocator gives and takes back one by one. The lock of their pool guards them."""

    returnable = True

    def __init__(self, size: int, gpu: TorchGpu) -> None:
        """Take nothing yet."""
        super().__init__(torch.empty(size, dtype=torch.uint8, device="meta"))
        self._gpu = gpu
        self._blocks = dict[int, Tensor]()

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
