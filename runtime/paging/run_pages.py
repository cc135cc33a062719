"""One layer run's pages, as the forward pass asks for them (`Pages` in experts/handles.py).

cpu_filler.py and gpu_filler.py derive a class for each device: how pages get ready is the device's matter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from moepack.runtime.experts.handles import Snapshot

from .window import Filled, LayerRun, Mapped, State

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts


class Issued(Protocol):
    """What a run had a device do, and its step hears of later: the load of a page that it read, or how long it waited.

    Attributes:
        seconds: that the run's computation waited for it there, once it has ended.
    """

    seconds: float

    @property
    def mapped(self) -> Mapped | None:
        """The page."""

    @property
    def filled(self) -> Filled | None:
        """Its load."""

    def ended(self) -> BaseException | None:
        """Wait until it has ended; what went wrong."""


class RunPages:
    """One run's pages, as the forward pass asks for them; a device's own kind says how they get ready.

    Attributes:
        position: the layer's.
        waits: experts that it had to wait for.
        waited: seconds it did.
        demanded: bytes brought for it alone: [packed, stored].
        issued: what goes on on a device, for `Paging` to settle.
    """

    def __init__(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> None:
        self.position, self.waits, self.waited, self.demanded = position, 0, 0.0, [0, 0]
        self.issued: list[Issued] = []
        self._paging, self._snapshot, self._wanted = paging, snapshot, set(active)
        self._needed = tuple([m for m in pages if m.page[2] in self._wanted] for pages in run.pages)
        self._own: tuple[dict[int, Mapped], ...] = tuple({} for _ in run.pages)
        self._step = step

    def begin(self, loads: Sequence[Sequence[Mapped]]) -> None:
        """See to the pages that are missing: what is stored the loaders read, what is packed this step decodes."""
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
        """Return once whatever is issued next may read one matrix."""
        raise NotImplementedError

    def decoding(self, matrix: int) -> contextlib.AbstractContextManager[CodedExperts | None]:
        """Around a product that decodes what it multiplies by: only where there are such kernels."""
        raise NotImplementedError

    def give_up(self) -> None:
        """The run ends: what it has not loaded by now it will not."""
        for own in self._own:
            while own:
                self._paging.gave_up(own.popitem()[1])

    def _packed(self, expert: int) -> Any:
        packed = self._snapshot.handles[expert].packed
        assert packed is not None
        return packed

    def _gather(self, kind: int) -> None:
        """Wait for what others load, take over what nobody has begun, and bind the blocks of what is left to do."""
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
