"""Expert paging on a CPU: each layer's run has its pages bound, its bytes loaded, and lets them go (Algorithm 1).

Of few active experts only those are loaded, when their layer is reached, and by the threads that then multiply by them:
a thread decodes rows of a matrix and uses them while they are in its cache. A step that needs most of a layer's experts
(a prompt) has the next layer's loaded by two threads of their own while this one runs, gate and up projections before
down projections. What is not in device memory those two threads read. Which pages are where is window.py's matter,
which placement an expert has the policy's.
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
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer
from moepack.runtime.devices.contract import Event
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.experts.packed import Packed
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS
from moepack.runtime.store.files import Stored

from .address_space import CpuAddressSpace, Page
from .window import Mapped, Run, State, Window

MOST = 0.5  # of a layer's experts: from that share on, a step is taken to need most of the next layer's too

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import Coded

ReadInto = Callable[[int, int], Stored]  # layer position, expert


@dataclass(slots=True)
class Counts:
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
    """What the loaders are asked for: one page that is decoded, or all pages of an expert that is read."""

    pages: list[Mapped]
    packed: Packed | None
    is_ahead: bool


@dataclass(slots=True, eq=False)
class Ahead:
    """The next layer's pages, taken for a step before it gets there."""

    position: int
    run: Run


class Paging:
    """The window, its memory and its threads. Every method may be called from any thread."""

    def __init__(
        self,
        space: CpuAddressSpace,
        window: Window,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        stored: ReadInto,
        staging: int,
        mark: Callable[[], Event],
        ahead: bool = True,
    ) -> None:
        """Start no thread yet.

        Args:
            space: where pages are.
            window: which have memory.
            layers: and where the matrices of their experts stand once decoded.
            stored: where an expert's extent stands.
            staging: bytes of the largest extent: each loader has a buffer of it.
            mark: an event that ends with the compute issued until now.
            ahead: whether the next layer's experts are loaded while one runs.
        """
        self.space, self.window, self.counts = space, window, Counts()
        self._layers, self._stored, self._mark, self._ahead = tuple(layers), stored, mark, ahead
        self._staging = [CpuMemory(staging).tensor.numpy() for _ in range(LOADERS)]
        self._lock = threading.RLock()  # taken by itself: an interruption inside Condition.__enter__ would keep it
        self._change = threading.Condition(self._lock)
        self._line: deque[object] = deque()  # who waits for blocks, in turn
        self._loads: dict[Mapped, Load] = {}  # not begun, by their first page, in order
        self._threads: list[threading.Thread] = []
        self._closed = False

    # --- a layer's run

    @contextlib.contextmanager
    def run(self, position: int, snapshot: Snapshot, index: Tensor, step: Any) -> Iterator[Pages]:
        """Around one layer's experts of one step: their pages are its own until the end, however it ends.

        Args:
            position: the layer's.
            snapshot: what the step sees of it.
            index: [tokens, top_k], the router's choice.
            step: has what was taken ahead for it, and is told what is; whether it reads a prompt.
        """
        paged = snapshot.paged()
        chosen = np.bincount(index.numpy().ravel(), minlength=len(paged))[: len(paged)]
        active = np.flatnonzero((chosen > 0) & paged).tolist()
        began = time.perf_counter()
        ahead, step.ahead = step.ahead, None
        if ahead is not None and ahead.position != position:
            self.let_go(ahead)
            ahead = None
        run = self._acquire(position, active) if ahead is None else ahead.run
        pages = Pages(self, run, snapshot, position, active)
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
                self._change.notify_all()

    def _acquire(self, position: int, experts: Sequence[int]) -> Run:
        """Pages of these experts: in turn, and without holding any while it waits."""
        pages = _pages(position, experts)
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
        if position >= len(self._layers):
            return  # what the next step needs is not known, nor which snapshot it reads
        snapshot: Snapshot = step.snapshots[position]
        experts = np.flatnonzero(snapshot.paged()).tolist()
        with self._lock:
            if self._closed or self._line or not experts:
                return
            run = self.window.acquire(_pages(position, experts))
            if run is None:
                return
            step.ahead = Ahead(position, run)
            self._submit(run.loads, snapshot, True)
            run.loads = ()

    def _submit(self, loads: Sequence[Sequence[Mapped]], snapshot: Snapshot, is_ahead: bool = False) -> None:
        if self._closed:  # the loaders have gone
            raise _closed()
        read: dict[int, Load] = {}
        for pages in loads:
            for mapped in pages:
                expert = mapped.page[2]
                packed = snapshot.handles[expert].packed
                if packed is not None:
                    self._loads[mapped] = Load([mapped], packed, is_ahead)
                elif expert in read:
                    read[expert].pages.append(mapped)
                else:
                    read[expert] = self._loads[mapped] = Load([mapped], None, is_ahead)
        while len(self._threads) < LOADERS and self._loads:
            work = partial(self._work, self._staging[len(self._threads)])
            thread = threading.Thread(target=work, name=f"moepack-load-{len(self._threads) + 1}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._change.notify_all()

    def let_go(self, ahead: Ahead) -> None:
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

    def _count(self, pages: Pages, step: Any) -> None:
        counts = self.counts
        counts.waits += pages.waits
        counts.waited += pages.waited
        step.waited += pages.waited
        for kind in (0, 1):
            counts.demanded[kind] += pages.demanded[kind]
        if not step.prompt.several:
            step.demanded.append((pages.position, *pages.demanded))

    def submit(self, loads: Sequence[Sequence[Mapped]], snapshot: Snapshot, is_ahead: bool = False) -> None:
        """Let the loaders bring pages, those of the first matrices first."""
        with self._lock:
            self._submit(loads, snapshot, is_ahead)

    def loaded(self, pages: Sequence[Mapped]) -> None:
        """Every byte of these is in its place."""
        with self._lock:
            for mapped in pages:
                self.window.loaded(mapped)
            self._change.notify_all()

    def finished_or_mine(self, mapped: Mapped, snapshot: Snapshot) -> bool:
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
                    self._submit([[mapped]], snapshot)
                self._change.wait()
        return False

    # --- the loaders

    def _work(self, staging: npt.NDArray[np.uint8]) -> None:
        while True:
            with self._lock:
                while not self._loads and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                load = self._loads.pop(next(iter(self._loads)))
            self._bring(load, staging)
            del load

    def _bring(self, load: Load, staging: npt.NDArray[np.uint8]) -> None:
        left = list(load.pages)
        try:
            for mapped in left:
                self.place(mapped)
            if load.packed is not None:
                load.packed.decode(left[0].page[0], 1)
                self._brought(left.pop(), load)
                return
            _, position, expert = left[0].page
            stored = self._stored(position, expert)
            stored.read_into(staging)
            with self._lock:
                self.counts.read += stored.size
            packed = self.over(position, expert, torch.from_numpy(staging[: stored.size]), stored.where)
            for mapped in load.pages:
                packed.decode(mapped.page[0], 1)
                self._brought(left.pop(0), load)
        except BaseException as error:
            with self._lock:
                for mapped in left:
                    self.gave_up(mapped, error)
                self._change.notify_all()

    def _brought(self, mapped: Mapped, load: Load) -> None:
        with self._lock:
            if load.is_ahead:
                self.counts.ahead[load.packed is None] += self.space.size(mapped.page)
            self.window.loaded(mapped)
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
        for expert, first in pages[0].items():
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

    def gave_up(self, mapped: Mapped, error: BaseException | None = None) -> None:
        """A load has ended without its bytes. Where its block was being moved nobody knows where that is: it goes."""
        with self._lock:
            if mapped.state is State.RESIDENT:  # interrupted after it was complete
                return
            if mapped.is_moving:
                for page in {mapped.at, mapped.page} - {None}:
                    assert page is not None
                    self.space.drop(page)
                self.window.lost(mapped)
            self.window.gave_up(mapped, error)

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> Packed:
        """What decodes an expert's extent to its pages."""
        layer, forms = self._layers[position]
        return Packed(extent, layer, forms, self.space.extent(position, expert), where)

    def close(self) -> None:
        """End the loaders; whoever waits is told. May be called twice."""
        with self._lock:
            self._closed = True
            for load in self._loads.values():
                for mapped in load.pages:
                    self.window.gave_up(mapped, _closed())
            self._loads.clear()
            self._change.notify_all()


class Pages:
    """One run's pages, as the forward pass asks for them.

    Attributes:
        position: the layer's.
        waits: experts that it had to wait for.
        waited: seconds it did.
        demanded: bytes brought for it alone: [packed, stored].
    """

    def __init__(self, paging: Paging, run: Run, snapshot: Snapshot, position: int, active: Sequence[int]) -> None:
        self.position, self.waits, self.waited, self.demanded = position, 0, 0.0, [0, 0]
        self._paging, self._snapshot, self._wanted = paging, snapshot, set(active)
        self._needed = tuple([m for m in pages if m.page[2] in self._wanted] for pages in run.pages)
        self._own: tuple[dict[int, Mapped], ...] = tuple({} for _ in run.pages)

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
            self._paging.submit(read, self._snapshot)
        self._paging.place_all(self._own)

    @contextlib.contextmanager
    def decoding(self, matrix: int) -> Iterator[Coded | None]:
        """Around the product of one matrix, which is to decode those that are yielded to where they belong (RAW).

        Raises:
            BundleError: where one is damaged.
        """
        self._gather(matrix)
        own = self._own[matrix]
        if not own:
            yield None
            return
        from moepack.runtime.kernels.affine_native import BadCodes, Coded

        began = time.perf_counter()
        coded = Coded(len(self._snapshot.handles))
        for expert in list(own):
            packed = self._packed(expert)
            coded.opened[expert] = address = packed.opened(matrix)
            if address:
                packed.bias(matrix)
            else:
                self._decode(matrix, expert)
        self.waited += time.perf_counter() - began
        if not own:
            yield None
            return
        try:
            yield coded
        except BadCodes as error:
            raise self._packed(error.expert).damaged(str(error)) from None
        self.waited += coded.seconds / torch.get_num_threads()
        self._paging.loaded(list(own.values()))
        own.clear()

    def ready(self, matrix: int) -> None:
        """Return once all that is needed of one matrix is in its place.

        Raises:
            BundleError: where one is damaged.
        """
        self._gather(matrix)
        began = time.perf_counter()
        for expert in list(self._own[matrix]):
            self._decode(matrix, expert)
        self.waited += time.perf_counter() - began

    def give_up(self) -> None:
        """The run ends: what it has not loaded by now it will not."""
        for own in self._own:
            while own:
                self._paging.gave_up(own.popitem()[1])

    def _packed(self, expert: int) -> Packed:
        packed = self._snapshot.handles[expert].packed
        assert packed is not None
        return packed

    def _decode(self, matrix: int, expert: int) -> None:
        self._packed(expert).decode(matrix, torch.get_num_threads())
        self._paging.loaded([self._own[matrix].pop(expert)])

    def _gather(self, matrix: int) -> None:
        """Wait for what others load, take over what nobody has begun, and bind the blocks of what is left to do."""
        own, paging = self._own[matrix], self._paging
        began = time.perf_counter()
        for mapped in own.values():
            paging.place(mapped)
        late = [m for m in self._needed[matrix] if m.state is not State.RESIDENT and m.page[2] not in own]
        for mapped in late:
            if paging.finished_or_mine(mapped, self._snapshot):
                own[mapped.page[2]] = mapped
                paging.place(mapped)
        self.waited += time.perf_counter() - began


def _closed() -> InputError:
    return InputError("this model was closed: load the bundle again")


def _pages(position: int, experts: Sequence[int]) -> tuple[list[Page], list[Page]]:
    return [(0, position, e) for e in experts], [(1, position, e) for e in experts]
