"""Progress: what the pipeline says of itself, and the rich display of it on stderr.

The pipeline only calls `Reporter`; who shows nothing passes a plain `Reporter()`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .memory import peak_memory


class Reporter:
    """Takes reports and drops them. Subclasses show them."""

    def stage(self, name: str, total: int) -> None:
        """A stage of `total` steps begins (layers, files)."""

    def step(self, detail: str = "") -> None:
        """The next step of the stage begins."""

    def inner(self, name: str, total: int) -> None:
        """Inside the step, `total` small things will be done (tokens, experts)."""

    def advance(self, amount: int = 1) -> None:
        """Some of them are done."""

    def note(self, text: str) -> None:
        """One line worth keeping."""

    @contextlib.contextmanager
    def hub_bars(self) -> Iterator[None]:
        """Around a transfer for which huggingface_hub has bars of its own: here, without them."""
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        yield

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


class RichReporter(Reporter):
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
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._outer: Any = None
        self._inner: Any = None
        self._steps = 0
        self._name = ""
        self._began = 0.0

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int) -> None:
        """See `Reporter`."""
        for task in (self._outer, self._inner):
            if task is not None:
                self._progress.remove_task(task)
        self._outer = self._progress.add_task(name, total=total, rate="", memory="")
        self._inner, self._steps, self._name = None, 0, name

    def step(self, detail: str = "") -> None:
        """See `Reporter`."""
        memory = f"peak {peak_memory() / 2**30:.1f} GiB"
        text = f"{self._name}{': ' + detail if detail else ''}"
        self._progress.update(self._outer, completed=self._steps, description=text, memory=memory)
        self._steps += 1

    def inner(self, name: str, total: int) -> None:
        """See `Reporter`."""
        if self._inner is not None:
            self._progress.remove_task(self._inner)
        self._inner = self._progress.add_task(f"  {name}", total=total, rate="", memory="")
        self._name_inner, self._began = name, time.monotonic()

    def advance(self, amount: int = 1) -> None:
        """See `Reporter`."""
        if self._inner is not None:
            done = self._progress.tasks[self._progress.task_ids.index(self._inner)].completed + amount
            rate = done / max(time.monotonic() - self._began, 1e-6)
            self._progress.update(self._inner, advance=amount, rate=f"{rate:,.0f} {self._name_inner}/s")

    def note(self, text: str) -> None:
        """See `Reporter`."""
        self._console.print(text, highlight=False, markup=False)

    @contextlib.contextmanager
    def hub_bars(self) -> Iterator[None]:
        """See `Reporter`; here, with huggingface_hub's bars in place of these."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()
