"""A process of its own for each side, with the interpreter, the processors and the threads that the side gets.

Calls and answers are JSON, one line each. Needs the standard library alone: every side's interpreter runs it.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class PeerError(Exception):
    """A side that cannot do what it was asked, in one line."""


class PeerEnded(PeerError):
    """A side whose process has ended, by itself or because its time was over."""


class Worker:
    """A side's process.

    Args:
        python: its interpreter.
        module: what it runs, a module that ends in `answer(...)`.
        cpus: the processors that it may use, with a thread on each.
        log: where its standard error goes.
        env: more of its environment.
        seconds: after which it is stopped.
        enter: called in the process before its program starts.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        cpus: Sequence[int],
        log: Path,
        env: Mapping[str, str],
        seconds: float = math.inf,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        self.log = log
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._enter = enter
        self._command = [str(python), "-m", module, str(len(cpus))]
        self._cpus = list(cpus)
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(len(cpus)), **env}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with self.log.open("wb") as errors:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._env,
                text=True,
                preexec_fn=self._begin,
            )

    def _begin(self) -> None:
        self._enter()
        os.sched_setaffinity(0, self._cpus)

    def call(self, what: str, **arguments: object) -> Any:
        """Its answer. A process that has died is started again by the next call, and holds nothing then.

        Raises:
            PeerError: when it says that it cannot.
            PeerEnded: when it has died, or its time is over.
        """
        if self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"call": what, **arguments}) + "\n")
            self._process.stdin.flush()
            left = None if self._seconds == math.inf else max(0.0, self._ends - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                raise PeerEnded(f"stopped after {self._seconds:.0f} s")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise PeerEnded(f"its process ended with status {status}, its last words: {(said or ['none'])[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(calls: Mapping[str, Callable[..., object]]) -> None:
    """Answer the parent's calls until it closes its end; what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            result = {"value": calls[arguments.pop("call")](**arguments)}
        except Exception as error:
            traceback.print_exc()
            plain = type(error) is LookupError  # what a side does not have, in its own words
            result = {"error": str(error) if plain else f"{type(error).__name__}: {error}".removesuffix(": ")}
        out.write(json.dumps(result) + "\n")
        out.flush()


def threads() -> int:
    """How many threads the parent gave this process."""
    return int(sys.argv[1])
