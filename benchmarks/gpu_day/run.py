"""Runs stages, each in a process of its own, and goes on after whatever one of them does.

A child measures the rows that it is given, one after another, and prints each as a line of JSON. When it dies, hangs or
fails, the row that it had begun says so, and a new process goes on with the next. When the stage's time is over, its
process is killed, with all that it started. A child whose parent is killed ends, too.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Row

from .rows import NO_GPU, Rows, Setting, Skipped, shown, without

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "gpu-day-row: "


def child(entries: Rows, names: Sequence[str], setting: Setting) -> None:
    """Measure rows, in the child. A row that fails ends the process: a CUDA error stays for all that comes after it."""
    threading.Thread(target=_follow, daemon=True).start()
    for name in names:
        print(MARK + json.dumps({"begun": name}), flush=True)
        entry = entries[name]
        try:
            if not setting.on_gpu and not entry.on_cpu:
                raise Skipped(NO_GPU)
            row = shown(name, entry.work(), setting.on_gpu)
        except Skipped as reason:
            row = without(name, f"skipped: {reason}")
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            print(MARK + json.dumps(without(name, f"failed: {type(error).__name__}: {text}")), flush=True)
            raise
        print(MARK + json.dumps(row), flush=True)


class Stage:
    """A stage's rows that are not measured yet, and the processes that measure them."""

    def __init__(self, name: str, names: Sequence[str], setting: Setting, seconds: float, interpreted: bool) -> None:
        self.name = name
        self.left = list(names)
        self.setting = setting
        self.ends = time.monotonic() + seconds
        self.over = f"the stage's {seconds:.0f} s were over" if seconds else "no time was left"
        self.command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu_day"]
        self.environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if interpreted and not setting.on_gpu:
            self.environment["TRITON_INTERPRET"] = "1"

    def run(self, on_row: Callable[[Row], None]) -> None:
        """Measure all rows; `on_row` gets each as soon as it is known."""
        while self.left and time.monotonic() < self.ends:
            self._process(on_row)
        for name in self.left:
            on_row(without(name, f"skipped: {self.over}"))

    def _process(self, on_row: Callable[[Row], None]) -> None:
        asked = json.dumps({**asdict(self.setting), "work": str(self.setting.work)})
        command = [*self.command, "--stage", self.name, "--setting", asked, "--rows", json.dumps(self.left)]
        begun = None
        before = len(self.left)
        ended = False
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
            with contextlib.suppress(queue.Empty):
                while (line := lines.get(timeout=max(0.1, self.ends - time.monotonic()))) is not None:
                    if line.startswith(MARK):
                        row = json.loads(line.removeprefix(MARK))
                        begun = row.get("begun")
                        if begun is None:
                            self.left.remove(row["row"])
                            on_row(row)
                ended = True
            _end(process, 10 if ended else 0)
            assert process.stdin is not None
            process.stdin.close()
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1][:200]
        if begun is None and (len(self.left) < before or not self.left):
            return  # it did what it was asked, or told itself which row failed
        lost = begun or self.left[0]
        self.left.remove(lost)
        verdict = f"failed: status {process.returncode}: {last}" if ended else f"cut: {self.over}"
        on_row(without(lost, verdict))


def _follow() -> None:
    """End this process and those that it started once its parent, which holds the other end of stdin, has ended."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _end(process: subprocess.Popen[str], seconds: float) -> None:
    """End the child, and whatever it started, if it has not ended after so many seconds."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
