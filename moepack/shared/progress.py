"""Report progress, and show it on stderr: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .memory import peak_memory

if TYPE_CHECKING:
    from rich.console import Group

LINES = 100  # the most lines of a stage for its steps, where no terminal shows bars
SECONDS = 30.0  # a step that takes longer has a line each so many seconds
BAR = 24  # cells
NAME = 28  # cells of a name, which is padded or cut to them
LEAST = 12  # cells of a name on a narrow terminal


class Reporter:
    """A receiver of reports, which drops them. Subclasses show them. Any thread may count units."""

    def stage(self, name: str, total: int) -> None:
        """Begin a stage of `total` steps (layers, files)."""

    def step(self, detail: str = "") -> None:
        """Begin the next step of the stage."""

    def inner(self, name: str, total: int) -> None:
        """Begin to count `total` small units (tokens, experts, bytes) inside the step."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` of these units as finished."""

    def bytes(self, done: int, total: int) -> None:
        """Show that `done` bytes of `total` are finished, in the step that they take."""

    def note(self, text: str) -> None:
        """Report one line that stays on the screen."""

    @contextlib.contextmanager
    def hub_bars(self) -> Iterator[None]:
        """Wrap a transfer of huggingface_hub. This class hides the library's progress bars."""
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        yield


SILENT = Reporter()


@dataclass(slots=True)
class Count:
    """Units, how many of them are finished, when the first began and when the last ended."""

    name: str
    total: int
    began: float
    ended: float
    done: int = 0

    def add(self, amount: int, now: float) -> None:
        """Count units as finished."""
        self.done += amount
        self.ended = now

    @property
    def each(self) -> float:
        """The mean seconds of a finished unit."""
        return (self.ended - self.began) / self.done

    @property
    def share(self) -> float:
        """The share that is finished, from 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 1.0

    def left(self, now: float) -> float | None:
        """Return the seconds that are left at the mean rate so far; None where nothing is finished yet."""
        if self.done <= 0:
            return None
        return max(0.0, self.each * (self.total - self.done) - (now - self.ended))

    def rate(self) -> str:
        """Describe the mean rate: the units of a second, or the seconds of a unit that takes longer."""
        if self.done <= 0 or self.each <= 0:
            return ""
        if self.name == "bytes":
            return f"{size(1 / self.each)}/s"
        return f"{duration(self.each)} each" if self.each > 1 else f"{1 / self.each:,.0f} {self.name}/s"

    def counted(self) -> str:
        """Describe how many are finished, with their name."""
        if self.name == "bytes":
            return f"{size(min(self.done, self.total))} of {size(self.total)}"  # a file is read again if it changed
        return f"{self.done:,} of {self.total:,} {self.name}"


def duration(seconds: float) -> str:
    """Describe a time in its two largest units: `4.5 s`, `45 s`, `3 min 20 s`, `2 h 05 min`, `4 d 03 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, many, smaller, few in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= many:
            return f"{whole // many} {unit} {whole % many // few:02d} {smaller}"
    return f"{whole} s"


def size(count: float, places: int = 1) -> str:
    """Describe bytes in the decimal unit that leaves one to three digits before the point: `3.2 GB`.

    `places` are the digits behind the point.
    """
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.{places}f} {unit}"
    return f"{count / 1000:.{places}f} TB"


class _Shown(Reporter):
    """Counts the steps of a stage and the units of a step. Subclasses show them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._stage: Count | None = None
        self._inner: Count | None = None
        self._detail = ""  # the step under way

    def stage(self, name: str, total: int) -> None:
        with self._lock:
            self.close()
            now = self._clock()
            self._stage = Count(name, total, now, now, done=-1)  # the first step begins with none finished
            self._inner = None

    def step(self, detail: str = "") -> None:
        with self._lock:
            if self._stage is None:
                return
            self._stage.add(1, self._clock())
            self._detail = detail
            self._inner = None
            self._stepped(self._stage)

    def inner(self, name: str, total: int) -> None:
        with self._lock:
            now = self._clock()
            self._inner = Count(name, total, now, now)

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            if self._inner is not None:
                self._inner.add(amount, self._clock())
                self._advanced(self._inner)

    def bytes(self, done: int, total: int) -> None:
        with self._lock:
            if self._stage is None:
                return
            if self._inner is None:
                # with the step, unless it tells of its first byte: what came before is not reading
                began = self._stage.ended if done else self._clock()
                self._inner = Count("bytes", total, began, began)
            self._inner.total = total
            self.advance(done - self._inner.done)

    def close(self) -> None:
        """End the stage."""

    def _stepped(self, stage: Count) -> None:
        """Show the step that begins."""

    def _advanced(self, inner: Count) -> None:
        """Show that units were finished."""

    def _left(self, stage: Count, now: float) -> str:
        """Describe the time left: the stage's, or where none of its steps has ended, that of the first."""
        if (left := stage.left(now)) is not None:
            return f"{duration(left)} left"
        if self._inner is None or (left := self._inner.left(now)) is None:
            return ""
        return f"{duration(left)} left" + (" of this step" if stage.total > 1 else "")


class LineReporter(_Shown):
    """Writes a line a step, for logs: at most about 100 a stage, and two a minute inside a long step.

    With `patient` a stage has no line before it has taken half a minute.
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic, patient: bool = False
    ) -> None:
        super().__init__(clock)
        self._write = write
        self._patient = patient
        self._last = 0.0  # when the last line was written
        self._percent = -1  # what it said

    def note(self, text: str) -> None:
        """Write the line."""
        self._write(text)

    def close(self) -> None:
        """Write how long the stage took."""
        with self._lock:
            stage = self._stage
            self._stage = None
            self._percent = -1
            if stage is None or stage.done < 0 or (self._patient and self._last <= stage.began):
                return
            now = self._clock()
            done = f"{min(stage.done + 1, stage.total)} of {stage.total}"
            rate = ""
            if stage.total == 1 and self._inner is not None:
                done = self._inner.counted()
                rate = f", {self._inner.rate()}"
            self._write(f"{stage.name}: {done} in {duration(now - stage.began)}{rate}")

    def _stepped(self, stage: Count) -> None:
        if self._patient and self._clock() - stage.began < SECONDS:
            self._last = stage.began
            return
        percent = int(100 * stage.share)
        ended = stage.done >= stage.total  # `close` says so
        if ended or (stage.total > LINES and percent == self._percent):
            return
        self._percent = percent
        self._tell(stage)

    def _advanced(self, inner: Count) -> None:
        if self._stage is not None and self._clock() - self._last >= SECONDS:
            self._tell(self._stage)

    def _tell(self, stage: Count) -> None:
        now = self._clock()
        self._last = now
        words = [f"{stage.name}: {self._detail}" if self._detail else stage.name]
        if stage.total > 1:
            words.append(f"{stage.done} of {stage.total} ({stage.share:.0%})")
            words.append("" if stage.done <= 0 else f"{duration(stage.each)} each")
        if self._inner is not None:
            words += [f"{self._inner.counted()} ({self._inner.share:.0%})", self._inner.rate()]
        words += [self._left(stage, now), f"peak {size(peak_memory())}"]
        self._write(", ".join(word for word in words if word))


class Part(NamedTuple):
    """A part of a line. Where the line is too narrow, the parts of the highest rank are left out first."""

    rank: int
    text: str


def fitted(name: str, parts: Sequence[Part], width: int) -> str:
    """Return a line of at most `width` cells: a name, which is cut at last, and the parts that fit."""
    kept = [part for part in parts if part.text]
    least = min(len(name), LEAST)
    while kept and least + sum(1 + len(part.text) for part in kept) > width:
        kept.remove(max(kept, key=lambda part: part.rank))
    room = width - sum(1 + len(part.text) for part in kept)
    shown = name.ljust(NAME)[:room] if len(name) <= NAME else name[: max(NAME, room)][:room]
    return " ".join([shown, *(part.text for part in kept)])


class BarReporter(_Shown):
    """Shows two lines on a terminal: the stage with its time left and peak memory, and the units within its step."""

    def __init__(self, transient: bool = False) -> None:
        super().__init__(time.monotonic)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False, markup=False)
        options = {"console": self._console, "transient": transient, "get_renderable": self._drawn}
        self.live = Live(refresh_per_second=4, **options)  # type: ignore[arg-type]

    def note(self, text: str) -> None:
        """Print the line above the bars."""
        self._console.print(text)

    @contextlib.contextmanager
    def hub_bars(self) -> Iterator[None]:
        """Show huggingface_hub's bars in place of this reporter's."""
        self.live.stop()
        try:
            yield
        finally:
            self.live.start()

    def lines(self, width: int) -> list[str]:
        """Return the lines for a terminal of `width` cells. The bar is left out first, and the time left never."""
        with self._lock:
            stage = self._stage
            if stage is None or stage.done < 0:
                return []
            now = self._clock()
            name = f"{stage.name}: {self._detail}" if self._detail else stage.name
            left = self._left(stage, now)
            elapsed = duration(now - stage.began)
            memory = f"peak {size(peak_memory())}"
            count = f"{stage.done}/{stage.total}"
            parts = [Part(5, self._bar(stage)), Part(2, count), Part(3, elapsed), Part(0, left), Part(4, memory)]
            lines = [fitted(name, parts, width)]
            if (inner := self._inner) is not None:
                parts = [Part(5, self._bar(inner)), Part(1, inner.counted()), Part(2, inner.rate())]
                lines.append(fitted("", parts, width))
            return lines

    def _bar(self, count: Count) -> str:
        full, empty = ("━", "╌") if self._console.encoding.startswith("utf") else ("#", ".")
        done = round(BAR * count.share)
        return full * done + empty * (BAR - done)

    def _drawn(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(line, no_wrap=True) for line in self.lines(self._console.width)))


def _write_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(quiet: bool = False, transient: bool = False) -> Iterator[Reporter]:
    """Yield a `Reporter` that shows progress on stderr, or nothing if `quiet`.

    A terminal shows bars, which `transient` removes at the end; anything else gets lines, with `transient` of stages
    alone that take half a minute.
    """
    if quiet:
        yield SILENT
        return
    if not sys.stderr.isatty():
        lines = LineReporter(_write_line, patient=transient)
        yield lines
        lines.close()  # not of a stage that has failed
        return
    bars = BarReporter(transient)
    with bars.live:
        yield bars


@contextlib.contextmanager
def loading(name: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the bytes read and the bytes in all, which shows the loading of a model on stderr."""
    with progress(transient=True) as reporter:
        reporter.stage("loading", 1)
        reporter.step(name)
        yield reporter.bytes


@contextlib.contextmanager
def loading_line(name: str) -> Iterator[Callable[[int, int], None]]:
    """Do as `loading`, and where stderr is no terminal say at once what is loading."""
    if not sys.stderr.isatty():
        _write_line(f"moepack: loading {name}")
    with loading(name) as report:
        yield report
