"""The window: blocks of memory that pages take in turn, and the rules for it (fluxmoe, section 4.1 and Algorithm 1).

A page is one matrix of one expert. It is unmapped, loading (it has a block, its bytes are on their way), resident, or
evicting (its block was promised to another page and has not been moved yet). Two orders are kept:

- WAR (write after read): a block moves to another page, or on a GPU is filled with its bytes, only after every
  computation that reads the old page has ended;
- RAW (read after write): a computation reads a page only once the page's bytes are complete.

A run is one layer's experts in one step. It takes all its pages or none, so that two runs never wait for each other,
and holds them until its computation was issued. The caller holds a lock. Nothing here waits or copies.

When blocks run out, pages that the last few passes did not use give theirs up first, the longest unused before others.
Next comes the page used last: layers run in turn, so it is the last to be needed again, and its memory may still be in
a CPU cache. To evict the least recently used page would never hit in a model with more layers than the window holds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moepack.runtime.devices.contract import Completion

from .address_space import Page

STALE = 4  # passes without use after which a page gives its block up before others


class State(enum.Enum):
    """The state of a page."""

    UNMAPPED = "unmapped"
    LOADING = "loading"
    RESIDENT = "resident"
    EVICTING = "evicting"


@dataclass(slots=True, eq=False)
class Mapped:
    """A page that has a block."""

    page: Page
    block: int  # the block's number
    at: Page | None  # the page that the block's memory is bound to; None for a block that was never bound
    after: tuple[Completion, ...]  # what must end before the block is moved, or filled where it is (WAR)
    state: State = State.LOADING  # loading or resident; evicting once the block is promised to another page
    pins: int = 0  # how many runs hold the page, and how many loads write it
    reads: tuple[Completion, ...] = ()  # events of computations that may still read the page
    used: int = 0  # number of the last run that took the page
    is_moving: bool = False  # whether the block is being moved: its memory may be at either page
    # Whether a load of the page is under way. If not, a run that needs the page while it is LOADING may begin one
    is_loading: bool = False
    error: BaseException | None = None  # the error of the page's load
    filled: Any = None  # the load of a resident page, if it may still run: `GpuFilled` (gpu_filler.py)


@dataclass(slots=True, eq=False)
class LayerRun:
    """The pages that one layer's computation in one step needs, by matrix.

    Its owner must load the pages in `loads`: bind each block and call `moved`, fill it, call `loaded` or `gave_up`.
    """

    pages: tuple[list[Mapped], ...]
    loads: tuple[list[Mapped], ...]


@dataclass(slots=True)
class _Blocks:
    """The blocks of one type, for gate and up matrices or for down matrices (on a GPU for whole experts)."""

    pages: dict[Page, Mapped] = field(default_factory=dict)
    idle: dict[Page, Mapped] = field(default_factory=dict)  # resident pages that no run holds, the longest unused first
    evicting: dict[Page, Mapped] = field(default_factory=dict)  # by old page: the page that gets its block
    free: dict[Page | int, Mapped] = field(default_factory=dict)  # by bound page, or block number; last in, first out


class Window:
    """Keep account of which page has which block."""

    def __init__(self, blocks: Sequence[int], layers: int, keeps: bool = True) -> None:
        """Set up `blocks`, the number of each type, for passes through `layers` layers.

        With `keeps`, pages stay until their blocks are needed. Otherwise a block is free when its run has ended.
        """
        self.blocks = tuple(blocks)  # of each type: two layers' L experts each, 4L in all
        self._of = tuple(_Blocks() for _ in blocks)
        for d, of in enumerate(self._of):
            of.free |= {b: Mapped((d, 0, 0), b, None, ()) for b in reversed(range(blocks[d]))}
        self._stale = STALE * layers
        self._keeps = keeps
        self.taken = 0  # how many runs took pages so far
        self.hits = self.misses = 0  # pages that had, or lacked, a block when a run took them

    def acquire(self, pages: Sequence[Sequence[Page]]) -> LayerRun | None:
        """Take all of a run's pages, given by type without repeats; return None, without any, if blocks are too few."""
        if not all(self._obtainable(d, wanted) for d, wanted in enumerate(pages)):
            return None
        self.taken += 1
        run = LayerRun(tuple([] for _ in pages), tuple([] for _ in pages))
        for d, wanted in enumerate(pages):
            of = self._of[d]
            for page in wanted:
                if page in of.pages:
                    of.idle.pop(page, None)
                    of.pages[page].pins += 1
                    self.hits += 1
            missing = [page for page in wanted if page not in of.pages]
            own = {page: self._bind(d, page) for page in missing if page in of.free}  # before another gets that block
            for page in missing:
                mapped = own.get(page) or self._bind(d, page)
                mapped.pins = 2  # one for this run, one for its load
                run.loads[d].append(mapped)
            self.misses += len(missing)
            run.pages[d].extend(of.pages[page] for page in wanted)
            for mapped in run.pages[d]:
                mapped.used = self.taken
        return run

    def _obtainable(self, d: int, wanted: Sequence[Page]) -> bool:
        of = self._of[d]
        if any(page in of.evicting for page in wanted):
            return False  # its old block is being moved away: it gets another after that
        missing = sum(page not in of.pages for page in wanted)
        return missing <= len(of.free) + len(of.idle) - sum(page in of.idle for page in wanted)

    def _bind(self, d: int, page: Page) -> Mapped:
        of = self._of[d]
        if of.free:
            left = (
                of.free.pop(page, None) or of.free.popitem()[1]
            )  # the block bound to the page first: another must not be bound over it
            at = left.at
            after = left.after
        else:
            oldest = next(iter(of.idle.values()))
            left = oldest if self.taken - oldest.used > self._stale else next(reversed(of.idle.values()))
            del of.idle[left.page], of.pages[left.page]
            left.state = State.EVICTING
            at = left.page
            after = left.reads
        made = of.pages[page] = Mapped(page, left.block, at, _running(after), is_loading=True)
        if at is not None and at != page:
            of.evicting[at] = made
        return made

    def moved(self, mapped: Mapped) -> None:
        """Note that the block is bound to this page, and its old page unmapped.

        The block's earlier work has ended, or the stream that fills the block waits for it.
        """
        if mapped.at is not None:
            self._of[mapped.page[0]].evicting.pop(mapped.at, None)
        mapped.at = mapped.page
        mapped.after = ()
        mapped.is_moving = False

    def loaded(self, mapped: Mapped, filled: Any = None) -> None:
        """Mark a page resident: its bytes are in place, or will be once the load `filled` has ended.

        Streams that read the page wait for `filled`, and its block is not moved before that.
        """
        mapped.state = State.RESIDENT
        mapped.is_loading = False
        mapped.filled = filled
        self._unpin(mapped, () if filled is None else filled.events)

    def spoiled(self, mapped: Mapped, error: BaseException) -> None:
        """Mark a resident page as damaged with `error`: no later run reads it."""
        of = self._of[mapped.page[0]]
        if mapped.state is not State.RESIDENT or of.pages.get(mapped.page) is not mapped:
            return
        of.idle.pop(mapped.page, None)
        mapped.state = State.LOADING
        mapped.error = error
        mapped.pins += 1
        self._unpin(mapped, ())

    def lost(self, mapped: Mapped) -> None:
        """Note that a page's block has lost its memory: its move was interrupted, and both pages were dropped."""
        assert mapped.is_moving
        if mapped.at is not None:
            self._of[mapped.page[0]].evicting.pop(mapped.at, None)
        mapped.at = None
        mapped.is_moving = False

    def gave_up(self, mapped: Mapped, error: BaseException | None = None, after: Iterable[Completion] = ()) -> None:
        """Note a load that failed or was not done. A run that holds the page may load it, else its block is free.

        `after` holds events of work that may still write to the page.
        """
        mapped.is_loading = False
        mapped.error = error
        mapped.after = (*mapped.after, *after)
        self._unpin(mapped, ())

    def adopt(self, mapped: Mapped) -> bool:
        """Let the caller load a page that its run holds; return False if the page is loaded, or is being loaded.

        Raises the error of the page's last load.
        """
        if mapped.state is not State.LOADING or mapped.is_loading:
            return False
        if mapped.error is not None:
            raise mapped.error
        mapped.is_loading = True
        mapped.pins += 1
        return True

    def release(self, run: LayerRun, compute: Iterable[Completion] = ()) -> None:
        """Release a run's pages once its computation was issued; `compute` holds events that end with it."""
        for pages in run.pages:
            for mapped in pages:
                self._unpin(mapped, tuple(compute))

    def _unpin(self, mapped: Mapped, reads: tuple[Completion, ...]) -> None:
        mapped.pins -= 1
        mapped.reads = (*_running(mapped.reads), *reads)
        if mapped.pins:
            return
        of = self._of[mapped.page[0]]
        if mapped.state is State.RESIDENT and self._keeps:
            of.idle[mapped.page] = mapped
            return
        del of.pages[mapped.page]
        if mapped.at is not None:
            of.evicting.pop(mapped.at, None)
        of.free[mapped.block if mapped.at is None else mapped.at] = mapped
        mapped.after = (*_running(mapped.after), *mapped.reads)

    # --- seeing

    def running(self) -> list[Completion]:
        """Return the events of all unfinished work on blocks."""
        found = [mapped for of in self._of for mapped in (*of.pages.values(), *of.free.values())]
        return list(_running(event for mapped in found for event in (*mapped.after, *mapped.reads)))

    def mapped(self) -> list[Mapped]:
        """Return all pages that have blocks."""
        return [mapped for of in self._of for mapped in of.pages.values()]


def _running(events: Iterable[Completion]) -> tuple[Completion, ...]:
    return tuple(event for event in events if not event.done())
