"""One layer run's pages, as the forward pass asks for them (`Pages` in experts/handles.py)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moepack.runtime.experts.handles import Snapshot

from .window import LayerRun, Mapped, State

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts


class RunPages:
    """One run's pages. A subclass for each device fills them.

    Attributes:
        position: of the layer.
        waits: experts that the run waited for.
        waited: seconds of that.
        demanded: bytes brought for this run alone: [packed, stored].
        issued: device work that `Paging` checks later.
    """

    def __init__(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> None:
        self.position, self.waits, self.waited, self.demanded = position, 0, 0.0, [0, 0]
        self.issued: list[Any] = []  # `GpuWork` (gpu_filler.py)
        self._paging, self._snapshot, self._wanted = paging, snapshot, set(active)
        self._needed = tuple([m for m in pages if m.page[2] in self._wanted] for pages in run.pages)
        self._own: tuple[dict[int, Mapped], ...] = tuple({} for _ in run.pages)
        self._step = step

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
