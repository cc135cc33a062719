"""What paging needs of a kind of device: how bytes get to their pages, and the pages of one layer's run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moepack.runtime.devices.contract import Completion
from moepack.runtime.experts.handles import Snapshot

from .address_space import CpuAddressSpace, Page
from .window import Filled, LayerRun, Mapped, State

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts

    from .cuda_space import CudaAddressSpace


class PageFiller(Protocol):
    """Fills pages on one kind of device. Other code hands on what `over` and `read` return.

    As it stands here, all work of a call is done when the call returns.
    """

    space: CpuAddressSpace | CudaAddressSpace

    def chosen(self, index: Tensor) -> npt.NDArray[np.int64]:
        """Return the router's choice on the host; from a device, once all earlier work of this thread has ended."""

    def pages(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> RunPages:
        """Return one run's pages."""

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> Any:
        """Return what decodes an expert's extent to its pages."""

    def read(self, loader: int, position: int, expert: int) -> tuple[Any, int]:
        """Read a stored extent; return what decodes it, and its bytes.

        A loader fills pages from what it has read before it reads again.

        Raises:
            BundleError: when the extent is damaged.
        """

    def fill(self, loader: int, packed: Any, page: Page) -> Filled | None:
        """Decode a page's bytes to their place. They are there on return, or once the result has ended.

        Raises:
            BundleError: when they are damaged.
        """

    def issued(self) -> tuple[Completion, ...]:
        """Return events behind everything that loaders have issued."""
        return ()

    def follow(self) -> None:
        """Order what this thread issues from now on behind everything that loaders have issued."""
        return None

    def rest(self, loader: int) -> None:
        """Wait for a loader's work, at the end of its thread."""
        return None

    def close(self) -> None:
        """Free everything, once nothing reads or writes it. May be called twice."""
        return None


class RunPages:
    """One run's pages, as the forward pass asks for them (`Pages` in experts/handles.py). Devices have subclasses."""

    def __init__(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> None:
        self.position = position
        self.waits, self.waited = 0, 0.0  # experts that the run waited for, and the seconds of that
        self.demanded = [0, 0]  # bytes brought for this run alone: [packed, stored]
        self.issued: list[Any] = []  # `GpuWork` (gpu_filler.py), which `Paging` checks later
        self._paging, self._snapshot, self._step = paging, snapshot, step
        wanted = set(active)
        self._needed = tuple([m for m in pages if m.page[2] in wanted] for pages in run.pages)
        self._own: tuple[dict[int, Mapped], ...] = tuple({} for _ in run.pages)

    def begin(self, loads: Sequence[Sequence[Mapped]]) -> None:
        """Begin the loads: the loaders read what is stored, this step decodes what is packed."""
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

    def ready(self, matrix: int) -> None:
        """Wait until code that runs or is issued next may read one matrix."""
        raise NotImplementedError

    def decoding(self, matrix: int) -> contextlib.AbstractContextManager[CodedExperts | None]:
        """Around a product whose kernel decodes the experts it multiplies by."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Give up the loads that have not been done: the run ends."""
        for own in self._own:
            while own:
                self._paging.gave_up(own.popitem()[1])

    def _packed(self, expert: int) -> Any:
        packed = self._snapshot.handles[expert].packed
        assert packed is not None
        return packed

    def _gather(self, kind: int) -> None:
        """Wait for others' loads, take over those that have not begun, and bind the blocks of what is left to do."""
        own, paging = self._own[kind], self._paging
        began = time.perf_counter()
        for mapped in own.values():
            paging.place(mapped)
        late = [m for m in self._needed[kind] if m.state is not State.RESIDENT and m.page[2] not in own]
        for mapped in late:
            if paging.finished_or_mine(mapped, self._snapshot, self._step):
                own[mapped.page[2]] = mapped
                paging.place(mapped)
        self.waited += time.perf_counter() - began
