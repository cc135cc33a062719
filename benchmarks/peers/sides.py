"""The sides of a comparison: moepack's interpreter and llama.cpp's, and their processes on the same processors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moepack.runtime.patches import SPINS

from . import environments
from .worker import PeerError, Worker

AVX2 = os.environ.get("MOEPACK_ISA") in ("plain", "avx2")
PEER = environments.LLAMA_AVX2 if AVX2 else environments.LLAMA
MODULES = {"moepack": "ours", "llama.cpp": "llama"}


class Sides:
    """The interpreters of both sides, and their workers.

    Attributes:
        python: interpreters by side; without llama.cpp's where it cannot be had.
        missing: why llama.cpp cannot be had.
    """

    def __init__(self, scratch: Path, install: bool) -> None:
        self.scratch = scratch
        self.missing = ""
        self.python = {"moepack": Path(sys.executable)}
        try:
            self.python["llama.cpp"] = environments.environment(PEER, install)
        except PeerError as error:
            self._leave_out(error)

    def _leave_out(self, error: PeerError) -> None:
        self.python.pop("llama.cpp", None)
        self.missing = str(error)
        print(f"llama.cpp is left out: {error}", flush=True)

    def start(self, who: str, threads: int) -> Worker:
        """Return a side's process, on so many processors."""
        # What tuning finds for this benchmark is not what the user's own cache should hold. Threads wait as under the
        # command line
        own = {"XDG_CACHE_HOME": str(self.scratch), "GOMP_SPINCOUNT": str(SPINS)}
        env = own if who == "moepack" else {}
        module = MODULES[who]
        log = self.scratch / f"{module}.log"
        return Worker(self.python[who], f"benchmarks.peers.{module}", processors(threads), log, env)

    def versions(self) -> dict[str, str]:
        """Return what llama.cpp is, or why it is missing."""
        if "llama.cpp" in self.python:
            try:
                with self.start("llama.cpp", 1) as worker:
                    found: dict[str, str] = worker.call("versions")
                    return found
            except PeerError as error:  # it is installed and does not run here
                self._leave_out(error)
        return {"llama.cpp": f"not measured: {self.missing}"}


def processors(count: int) -> list[int]:
    """The last ones: the first serves interrupts."""
    return sorted(os.sched_getaffinity(0))[-count:]
