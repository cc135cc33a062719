"""Expert paging: each layer's run has its pages bound, its bytes loaded, and lets them go (fluxmoe, Algorithm 1).

Of few active experts only those are loaded, when their layer is reached: on a CPU by the threads that then multiply by
them, on a GPU by the stream that does. A step that needs most of a layer's experts (a prompt) has the next layer's
loaded by two threads of their own while this one runs, gate and up projections before down projections. What is not in
device memory those two threads read. How bytes get to their places is cpu_filler.py's and gpu_filler.py's matter, which
pages are where window.py's, which placement an expert has the policy's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.devices.contract import Completion
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.planning.paging import LOADERS

from .address_space import Page
from .filler import PageFiller
from .run_pages import RunPages
from .window import Compute, Filled, LayerRun, Mapped, State, Window

if TYPE_CHECKING:
    pass

MOST = 0.5  # of a layer's experts: from that share on, a step is taken to need most of the next layer's too


@dataclass(slots=True)
class PagingCounts:
    """What has happened since loading.

    Attributes:
        waits: experts that a step needed and had to wait for.
        waited: seconds that steps did.
        demanded: bytes of weights brought for that: [packed, stored].
        ahead: bytes brought before they were needed, likewise.
        read: stored bytes that were read for either.
    """

    waits: int = 0
    waited: float = 0.0
    demanded: list[int] = field(default_factory=lambda: [0, 0])
    ahead: list[int] = field(default_factory=lambda: [0, 0])
    read: int = 0


@dataclass(slots=True)
class Load:
    """What the loaders are asked for: one page that is decoded, or all pages of an expert that is read.

    Attributes:
        pages: which.
        packed: what is decoded, as the step sees it; None of what is read.
        is_ahead: whether their layer has not been reached.
        step: that asks. Until it ends, what is packed stays where it is.
    """

    pages: list[Mapped]
    packed: Any
    is_ahead: bool
    step: Any


@dataclass(slots=True, eq=False)
class PrefetchedPages:
    """The next layer's pages, taken for a step before it gets there."""

    position: int
    run: LayerRun


class Paging:
    """The window, its memory and its threads. Every method may be called from any thread."""

    def __init__(
        self, filler: PageFiller, window: Window, layers: int, mark: Callable[[], Completion], ahead: bool = True
    ) -> None:
        """Start no thread yet.

        Args:
            filler: the device's.
            window: which pages have memory.
            layers: that have experts.
            mark: an event that ends with the compute issued until now.
            ahead: whether the next layer's experts are loaded while one runs.
        """
        self.filler, self.window, self.counts = filler, window, PagingCounts()
        self.space = filler.space
        self._layers, self._mark, self._ahead = layers, mark, ahead
        self._lock = threading.RLock()  # taken by itself: an interruption inside Condition.__enter__ would keep it
        self._change = threading.Condition(self._lock)
        self._line: deque[object] = deque()  # who waits for blocks, in turn
        self._loads: dict[Mapped, Load] = {}  # not begun, by their first page, in order
        self._going: list[Load] = []  # begun
        self._threads: list[threading.Thread] = []
        self._closed = False

    # --- a layer's run

    @contextlib.contextmanager
    def run(self, position: int, snapshot: Snapshot, index: Tensor, step: Any) -> Iterator[RunPages]:
        """Around one layer's experts of one step: their pages are its own until the end, however it ends.

        Args:
            position: the layer's.
            snapshot: what the step sees of it.
            index: [tokens, top_k], the router's choice.
            step: has what was taken ahead for it, and is told what is; whether it reads a prompt.

        Raises:
            BundleError: where what is needed is damaged; on a GPU, for what the layer before read.
        """
        paged = snapshot.paged
        chosen = np.bincount(self.filler.chosen(index).ravel(), minlength=len(paged))[: len(paged)]
        active = np.flatnonzero((chosen > 0) & paged).tolist()
        self._settle(step)
        began = time.perf_counter()
        ahead, step.ahead = step.ahead, None
        if ahead is not None and ahead.position != position:
            self.let_go(ahead)
            ahead = None
        run = self._acquire(position, active) if ahead is None else ahead.run
        pages = self.filler.pages(self, run, snapshot, position, active, step)
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
                self._count(pages, step)
                step.issued += pages.issued
                self._change.notify_all()
        if position == self._layers - 1:
            self._settle(step)

    def _settle(self, step: Any) -> None:
        """See that what was issued to a device for a step's layers so far came out right; how long it took there.

        Raises:
            BundleError: where it did not. Whoever else has read it is told by its own step.
        """
        issued, step.issued = step.issued, []
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
        """Pages of these experts: in turn, and without holding any while it waits."""
        pages = self._pages(position, experts)
        ticket = object()
        with self._lock:
            try:
                self._line.append(ticket)
                while True:
                    if self._closed:
                        raise _closed()
                    if self._line[0] is ticket and (run := self.window.acquire(pages)) is not None:
                        return run
                    self._change.wait()
            finally:
                if ticket in self._line:  # else it was interrupted before
                    self._line.remove(ticket)
                self._change.notify_all()

    def _look_ahead(self, position: int, step: Any) -> None:
        """Take the next layer's pages for a step, if that needs no waiting, and have them loaded."""
        if position >= self._layers:
            return  # what the next step needs is not known, nor which snapshot it reads
        snapshot: Snapshot = step.snapshots[position]
        experts = np.flatnonzero(snapshot.paged).tolist()
        with self._lock:
            if self._closed or self._line or not experts:
                return
            run = self.window.acquire(self._pages(position, experts))
            if run is None:
                return
            step.ahead = PrefetchedPages(position, run)
            self._submit(run.loads, snapshot, step, True)
            run.loads = ()

    def _pages(self, position: int, experts: Sequence[int]) -> list[list[Page]]:
        return [[(d, position, e) for e in experts] for d in range(len(self.window.blocks))]

    def _submit(self, loads: Sequence[Sequence[Mapped]], snapshot: Snapshot, step: Any, is_ahead: bool = False) -> None:
        if self._closed:  # the loaders have gone
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
        """A step ends, however it does. What was asked for it and has not begun is given up; what has begun ends before
        the step, in whose snapshot it reads."""
        if step.ahead is not None:
            self.let_go(step.ahead)
        with self._lock:
            for first in [first for first, load in self._loads.items() if load.step is step]:
                self._withdraw(first)
            while any(load.step is step for load in (*self._going, *self._loads.values())):
                self._change.wait()
        self.filler.follow()

    def let_go(self, ahead: PrefetchedPages) -> None:
        """A step ends, or goes elsewhere, without what was taken ahead for it."""
        with self._lock:
            for mapped in [m for pages in ahead.run.pages for m in pages]:
                self._withdraw(mapped)
            self.window.release(ahead.run)
            self._change.notify_all()

    def _withdraw(self, mapped: Mapped) -> None:
        """Give up a load that has not begun and that nobody but its run wants."""
        load = self._loads.get(mapped)
        if load is not None and all(m.pins <= 2 for m in load.pages):
            del self._loads[mapped]
            for m in load.pages:
                self.window.gave_up(m)

    def _count(self, pages: RunPages, step: Any) -> None:
        counts = self.counts
        counts.waits += pages.waits
        counts.waited += pages.waited
        step.waited += pages.waited
        for kind in (0, 1):
            counts.demanded[kind] += pages.demanded[kind]
        if not step.prompt.several:
            step.demanded.append((pages.position, *pages.demanded))

    def submit(self, loads: Sequence[Sequence[Mapped]], snapshot: Snapshot, step: Any) -> None:
        """Let the loaders bring pages, those of the first matrices first."""
        with self._lock:
            self._submit(loads, snapshot, step)

    def loaded(self, pages: Sequence[tuple[Mapped, Filled | None]]) -> None:
        """Every byte of these is in its place, or will be behind what was issued for it."""
        with self._lock:
            for mapped, filled in pages:
                self.window.loaded(mapped, filled)
            self._change.notify_all()

    def finished_or_mine(self, mapped: Mapped, snapshot: Snapshot, step: Any) -> bool:
        """Wait until a page is complete; or whether it is the caller's to load now, as nobody has begun to.

        Raises:
            BaseException: why its bytes could not be had.
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
                    self._submit([[mapped]], snapshot, step)
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
        left, filler = list(load.pages), self.filler
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
                filled = filler.fill(loader, packed, mapped.page)
                self._brought(left.pop(0), load, filled)
        except BaseException as error:
            after = filler.issued()
            with self._lock:
                for mapped in left:
                    self.gave_up(mapped, error, after)
                self._change.notify_all()

    def _brought(self, mapped: Mapped, load: Load, filled: Filled | None) -> None:
        with self._lock:
            if load.is_ahead:
                self.counts.ahead[load.packed is None] += self.space.size(mapped.page)
            self.window.loaded(mapped, filled)
            self._change.notify_all()

    def place(self, mapped: Mapped) -> None:
        """Bind a page's block to it, once nothing reads the page before (WAR). The page is the caller's to load."""
        if mapped.at == mapped.page and not mapped.after:
            return
        for event in mapped.after:
            event.wait()
        if mapped.at != mapped.page:
            mapped.is_moving = True
            self.space.bind(mapped.at, mapped.page)
        with self._lock:
            self.window.moved(mapped)

    def place_all(self, pages: Sequence[dict[int, Mapped]]) -> None:
        """The same for pages of some experts, by matrix: both of an expert at once, where their blocks are one's."""
        pairs = []
        for expert, first in pages[0].items() if len(pages) == 2 else ():
            second = pages[1].get(expert)
            if first.at is None or second is None or second.at != (1, *first.at[1:]) or first.at == first.page:
                continue
            for event in (*first.after, *second.after):
                event.wait()
            first.is_moving = second.is_moving = True
            if not self.space.bind_both(first.at[1:], first.page[1:]):
                first.is_moving = second.is_moving = False
                break
            pairs += [first, second]
        with self._lock:
            for mapped in pairs:
                self.window.moved(mapped)
        for row in pages:
            for mapped in row.values():
                self.place(mapped)

    def gave_up(self, mapped: Mapped, error: BaseException | None = None, after: Sequence[Compute] = ()) -> None:
        """A load has ended without its bytes; `after` it, what was issued for it has. Where its block was being moved
        nobody knows where that is: it goes."""
        with self._lock:
            if mapped.state is State.RESIDENT:  # interrupted after it was complete
                return
            if mapped.is_moving:
                for page in {mapped.at, mapped.page} - {None}:
                    assert page is not None
                    self.space.drop(page)
                self.window.lost(mapped)
            self.window.gave_up(mapped, error, after)

    def forget(self) -> None:
        """No step runs, and none will: once all computation has ended, memory and addresses go back."""
        self._join()
        for event in self.window.running():
            event.wait()
        self.filler.close()

    def close(self, wait: bool = True) -> None:
        """End the loaders, and wait until they have; whoever waits for them is told. May be called twice."""
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
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


def _closed() -> InputError:
    return InputError("this model was closed: load the bundle again")
