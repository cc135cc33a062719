"""Report progress, and show it on stderr. A plain `Reporter()` shows nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .memory import peak_memory

if TYPE_CHECKING:
    from rich.progress import TaskID


class Reporter:
    """A receiver of reports, which drops them. Subclasses show them."""

    def stage(self, name: str, total: int) -> None:
        """Begin a stage of `total` steps (layers, files)."""

    def step(self, detail: str = "") -> None:
        """Begin the next step of the stage."""

    def inner(self, name: str, total: int) -> None:
        """Begin to count `total` small units (tokens, experts) inside the step."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` of these units as finished."""

    def note(self, text: str) -> None:
        """Report one line that stays on the screen."""

    @contextlib.contextmanager
    def hub_bars(self) -> Iterator[None]:
        """Wrap a transfer of huggingface_hub. This class hides the library's progress bars."""
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        yield


class _RichReporter(Reporter):
    """Two bars on stderr: the stage with its time left and peak memory, and tokens or experts within it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = [
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            TextColumn("{task.fields[memory]}"),
        ]
        self._console = Console(stderr=True)
        self.bars = Progress(*columns, console=self._console, refresh_per_second=4)
        self._outer: Any = None
        self._inner: TaskID | None = None
        self._steps = 0
        self._name = ""
        self._began = 0.0

    def stage(self, name: str, total: int) -> None:
        for task in (self._outer, self._inner):
            if task is not None:
                self.bars.remove_task(task)
        self._outer = self.bars.add_task(name, total=total, rate="", memory="")
        self._inner = None
        self._steps = 0
        self._name = name

    def step(self, detail: str = "") -> None:
        memory = f"peak {peak_memory() / 2**30:.1f} GiB"
        text = f"{self._name}{': ' + detail if detail else ''}"
        self.bars.update(self._outer, completed=self._steps, description=text, memory=memory)
        self._steps += 1

    def inner(self, name: str, total: int) -> None:
        if self._inner is not None:
            self.bars.remove_task(self._inner)
        self._inner = self.bars.add_task(f"  {name}", total=total, rate="", memory="")
        self._name_inner = name
        self._began = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        if self._inner is not None:
            done = self.bars.tasks[self.bars.task_ids.index(self._inner)].completed + amount
            rate = done / max(time.monotonic() - self._began, 1e-6)
            self.bars.update(self._inner, advance=amount, rate=f"{rate:,.0f} {self._name_inner}/s")

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    @contextlib.contextmanager
    def hub_bars(self) -> Iterator[None]:
        """Show huggingface_hub's bars in place of this reporter's."""
        self.bars.stop()
        try:
            yield
        finally:
            self.bars.start()


@contextlib.contextmanager
def progress(quiet: bool = False) -> Iterator[Reporter]:
    """Yield a `Reporter` that shows progress on stderr, or nothing if `quiet`."""
    if quiet:
        yield Reporter()
        return
    reporter = _RichReporter()
    with reporter.bars:
        yield reporter


@contextlib.contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the bytes read and the bytes in all, which shows them on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("loading {task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextlib.contextmanager
def loading_line(name: str) -> Iterator[Callable[[int, int], None]]:
    """Do as `loading_bar`, and where stderr is no terminal say what is loading in a line."""
    if not sys.stderr.isatty():
        print(f"moepack: loading {name}", file=sys.stderr, flush=True)
    with loading_bar(name) as report:
        yield report
