"""The parts of paging that depend on the device: filling pages, and the pages of one layer's run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moepack.runtime.devices.contract import Completion
from moepack.runtime.experts.handles import Snapshot

from .address_space import CpuAddressSpace
from .window import LayerRun, Mapped, State

if TYPE_CHECKING:
    from .arena import Arena


class PageFiller:
    """Fills pages on one kind of device. The default methods suit a device whose calls return when their work is done.

    `over` and `read` return a packed extent, which the caller passes to `fill`.
    """

    space: CpuAddressSpace | Arena
    run_pages: type[RunPages]

    def extent(self, position: int, expert: int) -> Tensor:
        """Return the memory at an expert's own address, uint8; empty where experts have no addresses."""
        raise NotImplementedError

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> Any:
        """Return a packed extent over these coded bytes of an expert, which `fill` decodes."""
        raise NotImplementedError

    def read(self, loader: int, position: int, expert: int) -> tuple[Any, int]:
        """Read a stored extent into a loader's buffer; return it and its size. Raises BundleError when it is damaged.

        Each read reuses the buffer: a loader fills its pages from one extent before it reads the next. An extent that
        is not entropy-coded goes to its page, and needs no buffer.
        """
        raise NotImplementedError

    def fill(self, loader: int, packed: Any, mapped: Mapped) -> Any:
        """Decode a page's bytes from a packed extent; raises BundleError when they are damaged.

        On a GPU the page is complete once the returned load (`GpuFilled`) has ended, on a CPU when this returns.
        """
        raise NotImplementedError

    def issued(self) -> tuple[Completion, ...]:
        """Return events that end when all work issued by loaders so far has ended."""
        return ()

    def follow_all(self) -> None:
        """Make work that this thread issues from now on wait for all work that loaders have issued."""

    def rest(self, loader: int) -> None:
        """Wait for a loader's work, at the end of its thread."""

    def close(self) -> None:
        """Free all memory, once nothing reads or writes it. May be called twice."""


class RunPages:
    """The pages of one run (one layer's experts in one step). Each device has a subclass.

    The forward pass calls `ready(matrix)`, in the matrices' order: code that runs or is issued next may then read that
    matrix of every needed expert. On a CPU it may call `decoding(matrix)` instead.
    """

    def __init__(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> None:
        self.position = position
        # how many experts the run waited for, and the seconds of that
        self.waits = 0
        self.waited = 0.0
        self.demanded = [0, 0]  # bytes of weights that only this run asked for, from [packed, stored] extents
        self.issued: list[Any] = []  # `GpuWork` (gpu_filler.py), which `Paging` checks later
        self._paging = paging
        self._snapshot = snapshot
        self._step = step
        wanted = set(active)
        self._needed = tuple([m for m in pages if m.page[2] in wanted] for pages in run.pages)
        self._own: tuple[dict[int, Mapped], ...] = tuple({} for _ in run.pages)

    def begin(self, loads: Sequence[Sequence[Mapped]]) -> None:
        """Begin the loads: the loaders read stored experts, and this step decodes packed ones."""
        read: list[list[Mapped]] = [[] for _ in loads]
        for d, pages in enumerate(loads):
            for mapped in pages:
                kind = self._snapshot.handles[mapped.page[2]].packed is None
                self.demanded[kind] += self._paging.space.size(mapped.page)
                self.waits += d == 0
                if kind:
                    read[d].append(mapped)
                else:
                    self._own[d][mapped.page[2]] = mapped
        if any(read):
            self._paging.submit(read, self._snapshot, self._step)
        self._paging.place_all(self._own)

    def give_up(self) -> None:
        """Give up the loads that this run has not done, because it ends."""
        for own in self._own:
            while own:
                self._paging.gave_up(own.popitem()[1])

    def _packed(self, expert: int) -> Any:
        packed = self._snapshot.handles[expert].packed
        assert packed is not None
        return packed

    def _gather(self, kind: int) -> None:
        """Wait for others' loads, or take over those that have not begun; bind blocks to pages that this run loads."""
        own = self._own[kind]
        paging = self._paging
        began = time.perf_counter()
        for mapped in own.values():
            paging.place(mapped)
        for mapped in [m for m in self._needed[kind] if m.state is not State.RESIDENT and m.page[2] not in own]:
            if paging.finished_or_mine(mapped, self._snapshot, self._step):
                own[mapped.page[2]] = mapped
                paging.place(mapped)
        self.waited += time.perf_counter() - began
