"""The sides of a comparison: moepack's interpreter and its peers', and their processes on the same processors."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moepack.runtime.patches import SPINS

from . import environments
from .worker import PeerError, Worker

AVX2 = os.environ.get("MOEPACK_ISA") in ("plain", "avx2")
PEER = environments.LLAMA_AVX2 if AVX2 else environments.LLAMA
PEERS = {"llama.cpp": PEER, "ik_llama.cpp": environments.IK_AVX2 if AVX2 else environments.IK}  # their environments
MODULES = {"moepack": "ours", "llama.cpp": "llama", "ik_llama.cpp": "ik"}


class Sides:
    """The interpreters of all sides, and their workers.

    Attributes:
        python: interpreters by side; without those of peers that cannot be had.
        missing: by peer, why it cannot be had.
    """

    def __init__(self, scratch: Path, install: bool, peers: Sequence[str] = ("llama.cpp",)) -> None:
        self.scratch = scratch
        self.missing: dict[str, str] = {}
        self.python = {"moepack": Path(sys.executable)}
        self._peers = peers
        for peer in peers:
            try:
                self.python[peer] = environments.environment(PEERS[peer], install)
            except PeerError as error:
                self._leave_out(peer, error)

    def _leave_out(self, peer: str, error: PeerError) -> None:
        self.python.pop(peer, None)
        self.missing[peer] = str(error)
        print(f"{peer} is left out: {error}", flush=True)

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
        """Return what the peers are, or why they are missing."""
        found: dict[str, str] = {}
        for peer in self._peers:
            if peer in self.python:
                try:
                    with self.start(peer, 1) as worker:
                        found |= worker.call("versions")
                except PeerError as error:  # it is installed and does not run here
                    self._leave_out(peer, error)
            if peer in self.missing:
                found[peer] = f"not measured: {self.missing[peer]}"
        return found


def processors(count: int) -> list[int]:
    """The last ones: the first serves interrupts."""
    return sorted(os.sched_getaffinity(0))[-count:]
