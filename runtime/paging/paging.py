"""Expert paging: a run (a layer's experts in one step) takes, loads and releases pages (fluxmoe, Algorithm 1).

When few of a layer's experts are active, the step loads them when it reaches the layer: on a CPU in the threads that
multiply, on a GPU in the compute stream. When a step needs most of a layer's experts (a prompt), two loader threads
load the next layer's experts while this layer runs, gate and up projections before down projections. These threads also
read experts that are not in device memory.
The fillers decode bytes to pages; window.py says which pages have memory; the policy places experts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.devices.contract import Completion
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.planning.paging import LOADERS

from .address_space import CpuAddressSpace
from .filler import PageFiller, RunPages
from .window import LayerRun, Mapped, State, Window

MOST = 0.5  # a step that needs this share of a layer's experts, or more, probably needs most of the next layer's too


@dataclass(slots=True)
class PagingCounts:
    """Counts since loading."""

    waits: int = 0  # how many experts steps waited for
    waited: float = 0.0  # seconds of that
    # Bytes of weights from [packed, stored] extents: loaded when a run asked for them, and loaded ahead of need
    demanded: list[int] = field(default_factory=lambda: [0, 0])
    ahead: list[int] = field(default_factory=lambda: [0, 0])
    read: int = 0  # stored bytes read for both


@dataclass(slots=True)
class Load:
    """A task of the loaders: one page to decode, or all pages of an expert to read."""

    pages: list[Mapped]  # to fill
    packed: Any  # the packed extent that holds their bytes; None if they must be read
    is_ahead: bool  # whether it is for a layer that the step has not reached
    step: Any  # the step that needs them; packed bytes stay in memory until it ends


class Paging:
    """The window, its memory and its threads. Every method may be called from any thread."""

    def __init__(
        self, filler: PageFiller, window: Window, layers: int, mark: Callable[[], Completion], ahead: bool = True
    ) -> None:
        """Set up without threads, which start when they are needed.

        `layers` is the number of layers with experts. `mark` returns an event that ends with the computation issued so
        far. With `ahead`, the next layer's experts may be loaded while a layer runs.
        """
        self.filler = filler
        self.window = window
        self.counts = PagingCounts()
        self.space = filler.space
        # Where experts have addresses, blocks are moved to them; else a block stays, and is filled where it is
        self._addresses = filler.space if isinstance(filler.space, CpuAddressSpace) else None
        self._layers = layers
        self._mark = mark
        self._ahead = ahead
        self._lock = threading.RLock()  # taken directly: an interruption in Condition.__enter__ would leave it locked
        self._change = threading.Condition(self._lock)
        self._line: deque[object] = deque()  # runs that wait for blocks, in turn
        self._loads: dict[Mapped, Load] = {}  # loads that have not begun, by their first page, in order
        self._going: list[Load] = []  # loads that have begun
        self._threads: list[threading.Thread] = []
        self._closed = False

    def serve(self) -> None:
        """Begin to serve, when all experts are loaded: nothing is to be done."""

    def begin(self) -> None:
        """Begin a step: nothing is to be done."""

    # --- a layer's run

    @contextlib.contextmanager
    def run(self, position: int, snapshot: Snapshot, index: Tensor, step: Any) -> Iterator[RunPages]:
        """Hold the pages of one layer's experts for one step, and release them however the run ends.

        `snapshot` is the layer's, `index` [tokens, top_k] the router's choice. `step.ahead` may hold this layer's run,
        taken ahead; `step` also gets the counts. Raises BundleError for damaged bytes; on a GPU also for those of the
        layer before.
        """
        paged = snapshot.paged
        chosen = np.bincount(index.cpu().numpy().ravel(), minlength=len(paged))[: len(paged)]
        active = np.flatnonzero((chosen > 0) & paged).tolist()
        self._settle(step)
        began = time.perf_counter()
        ahead = step.ahead
        step.ahead = None
        if ahead is not None and ahead.pages[0][0].page[1] != position:
            self.let_go(ahead)
            ahead = None
        run = ahead or self._acquire(position, active)
        pages = self.filler.run_pages(self, run, snapshot, position, active, step)
        try:
            pages.begin(run.loads)
            pages.waited += time.perf_counter() - began
            if self._ahead and active and len(active) >= MOST * len(snapshot.handles):
                self._look_ahead(position + 1, step)
            yield pages
        finally:
            with self._lock:
                pages.give_up()
                self.window.release(run, [self._mark()])
                self.counts.waits += pages.waits
                self.counts.waited += pages.waited
                step.waited += pages.waited
                for kind in (0, 1):
                    self.counts.demanded[kind] += pages.demanded[kind]
                if not step.prompt.several:
                    step.demanded.append((position, *pages.demanded))
                step.issued += pages.issued
                self._change.notify_all()
        if position == self._layers - 1:
            self._settle(step)

    def _settle(self, step: Any) -> None:
        """Check the loads that a step issued to a device, and add the seconds that it waited for them.

        Raises BundleError when a load found damaged bytes. Other steps that read the page check it themselves.
        """
        issued = step.issued
        step.issued = []
        wrong: BaseException | None = None
        for one in issued:
            error = one.ended()
            with self._lock:
                self.counts.waited += one.seconds
                if error is not None and one.mapped is not None:
                    self.window.spoiled(one.mapped, error)
                elif one.mapped is not None and one.mapped.filled is one.filled:
                    one.mapped.filled = None
                self._change.notify_all()
            step.waited += one.seconds
            wrong = wrong or error
        if wrong is not None:
            raise wrong

    def _acquire(self, position: int, experts: Sequence[int]) -> LayerRun:
        """Wait in line until all pages of these experts can be taken, without holding any meanwhile; take them."""
        ticket = object()
        with self._lock:
            try:
                self._line.append(ticket)
                while True:
                    if self._closed:
                        raise _closed()
                    if self._line[0] is ticket and (run := self._take(position, experts)):
                        return run
                    self._change.wait()
            finally:
                if ticket in self._line:  # else it was interrupted before
                    self._line.remove(ticket)
                self._change.notify_all()

    def _look_ahead(self, position: int, step: Any) -> None:
        """Take the next layer's pages for a step, if they are free now, and have them loaded."""
        if position >= self._layers:
            return  # this was the last layer: the next step's needs and snapshot are not known
        snapshot: Snapshot = step.snapshots[position]
        experts = np.flatnonzero(snapshot.paged).tolist()
        with self._lock:
            if self._closed or self._line or not experts:
                return
            if (run := self._take(position, experts)) is None:
                return
            step.ahead = run
            self.submit(run.loads, snapshot, step, True)
            run.loads = ()

    def _take(self, position: int, experts: Sequence[int]) -> LayerRun | None:
        return self.window.acquire([[(d, position, e) for e in experts] for d in range(len(self.window.blocks))])

    def submit(self, loads: Sequence[Sequence[Mapped]], snapshot: Snapshot, step: Any, is_ahead: bool = False) -> None:
        """Queue pages for the loader threads, those of the first matrices first; start missing threads."""
        with self._lock:
            if self._closed:  # the loader threads have ended
                raise _closed()
            read: dict[int, Load] = {}
            for pages in loads:
                for mapped in pages:
                    expert = mapped.page[2]
                    packed = snapshot.handles[expert].packed
                    if packed is not None:
                        self._loads[mapped] = Load([mapped], packed, is_ahead, step)
                    elif expert in read:
                        read[expert].pages.append(mapped)
                    else:
                        read[expert] = self._loads[mapped] = Load([mapped], None, is_ahead, step)
            while len(self._threads) < LOADERS and self._loads:
                work = partial(self._work, len(self._threads))
                thread = threading.Thread(target=work, name=f"moepack-load-{len(self._threads) + 1}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._change.notify_all()

    def end(self, step: Any) -> None:
        """End a step: give up its loads that have not begun, and wait for the others, which read its snapshot."""
        if step.ahead is not None:
            self.let_go(step.ahead)
        with self._lock:
            for first in [first for first, load in self._loads.items() if load.step is step]:
                self._withdraw(first)
            while any(load.step is step for load in (*self._going, *self._loads.values())):
                self._change.wait()
        self.filler.follow_all()

    def let_go(self, ahead: LayerRun) -> None:
        """Release a run that was taken ahead and is not used."""
        with self._lock:
            for mapped in [m for pages in ahead.pages for m in pages]:
                self._withdraw(mapped)
            self.window.release(ahead)
            self._change.notify_all()

    def _withdraw(self, mapped: Mapped) -> None:
        """Give up a load that has not begun and that no other run needs."""
        load = self._loads.get(mapped)
        if load is not None and all(m.pins <= 2 for m in load.pages):
            del self._loads[mapped]
            for m in load.pages:
                self.window.gave_up(m)

    def loaded(self, pages: Sequence[tuple[Mapped, Any]]) -> None:
        """Mark pages resident, given as (page, load): their bytes are in place, or will be once the load has ended."""
        with self._lock:
            for mapped, filled in pages:
                self._loaded(mapped, filled)
            self._change.notify_all()

    def _loaded(self, mapped: Mapped, filled: Any) -> None:
        if self._addresses is None:  # the load is on a stream that waits for the block's earlier work
            self.window.moved(mapped)
        self.window.loaded(mapped, filled)

    def finished_or_mine(self, mapped: Mapped, snapshot: Snapshot, step: Any) -> bool:
        """Wait until a page is complete; return True at once if the caller must load it, because no load has begun.

        Raises the load's error.
        """
        packed = snapshot.handles[mapped.page[2]].packed
        with self._lock:
            while mapped.state is not State.RESIDENT:
                if packed is not None and mapped in self._loads:
                    del self._loads[mapped]
                    return True
                if self.window.adopt(mapped):
                    if packed is not None:
                        return True
                    self.submit([[mapped]], snapshot, step)
                self._change.wait()
        return False

    # --- the loaders

    def _work(self, loader: int) -> None:
        while True:
            with self._lock:
                while not self._loads and not self._closed:
                    self._change.wait()
                if self._closed:
                    break
                load = self._loads.pop(next(iter(self._loads)))
                self._going.append(load)
            try:
                self._bring(load, loader)
            finally:
                with self._lock:
                    self._going.remove(load)
                    self._change.notify_all()
            del load
        self.filler.rest(loader)

    def _bring(self, load: Load, loader: int) -> None:
        left = list(load.pages)
        filler = self.filler
        try:
            for mapped in left:
                self.place(mapped)
            packed = load.packed
            if packed is None:
                _, position, expert = left[0].page
                packed, size = filler.read(loader, position, expert)
                with self._lock:
                    self.counts.read += size
            for mapped in load.pages:
                filled = filler.fill(loader, packed, mapped)
                done = left.pop(0)
                with self._lock:
                    if load.is_ahead:
                        self.counts.ahead[load.packed is None] += self.space.size(done.page)
                    self._loaded(done, filled)
                    self._change.notify_all()
        except BaseException as error:
            after = filler.issued()
            with self._lock:
                for mapped in left:
                    self.gave_up(mapped, error, after)
                self._change.notify_all()

    def place(self, mapped: Mapped) -> None:
        """Wait until nothing reads a block's old page (WAR); bind it to the new page, which the caller loads.

        Where blocks stay this does nothing: the stream that fills a block waits instead.
        """
        if self._addresses is None or (mapped.at == mapped.page and not mapped.after):
            return
        for event in mapped.after:
            event.wait()
        if mapped.at != mapped.page:
            mapped.is_moving = True
            self._addresses.bind(mapped.at, mapped.page)
        with self._lock:
            self.window.moved(mapped)

    def place_all(self, pages: Sequence[dict[int, Mapped]]) -> None:
        """Place pages, given by matrix and expert. One move places both of an expert if one expert had their blocks."""
        if self._addresses is None:
            return
        pairs = []
        for expert, first in pages[0].items() if len(pages) == 2 else ():
            second = pages[1].get(expert)
            if first.at is None or second is None or second.at != (1, *first.at[1:]) or first.at == first.page:
                continue
            for event in (*first.after, *second.after):
                event.wait()
            first.is_moving = second.is_moving = True
            if not self._addresses.bind_both(first.at[1:], first.page[1:]):
                first.is_moving = second.is_moving = False
                break
            pairs += [first, second]
        with self._lock:
            for mapped in pairs:
                self.window.moved(mapped)
        for row in pages:
            for mapped in row.values():
                self.place(mapped)

    def gave_up(self, mapped: Mapped, error: BaseException | None = None, after: Sequence[Completion] = ()) -> None:
        """Note a failed load; `after` holds events of its work. If its move was interrupted, drop the block."""
        with self._lock:
            if mapped.state is State.RESIDENT:  # interrupted after it was complete
                return
            if mapped.is_moving and self._addresses is not None:
                for page in {mapped.at or mapped.page, mapped.page}:
                    self._addresses.drop(page)
                self.window.lost(mapped)
            self.window.gave_up(mapped, error, after)

    def forget(self) -> None:
        """Wait for all computation to end, then free memory. Called when no step can run any more."""
        self._join()
        for event in self.window.running():
            event.wait()
        self.filler.close()

    def close(self, wait: bool = True) -> None:
        """End the loader threads; runs that wait for loads raise InputError. May be called twice."""
        with self._lock:
            self._closed = True
            for load in self._loads.values():
                for mapped in load.pages:
                    self.window.gave_up(mapped, _closed())
            self._loads.clear()
            self._change.notify_all()
        if wait:
            self._join()

    def _join(self) -> None:
        for thread in tuple(self._threads):
            if thread is not threading.current_thread():
                thread.join()


def _closed() -> InputError:
    return InputError("this model was closed: load the bundle again")
