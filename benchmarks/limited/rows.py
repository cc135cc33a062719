"""One row: a side in its cage, from a cold start to the end of its texts, its time, or itself. Judges nothing."""

from __future__ import annotations

import itertools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.common import Row
from benchmarks.peers import environments
from benchmarks.peers.worker import ROOT, PeerError

from .cage import Cage, forget, read_ahead
from .make import bundle_of, gguf_of, home
from .passes import Order
from .shapes import Shape

WARM = 64  # tokens decoded before those that count
# what of a cage is left to the kernel: a share, and bytes
MARGIN = 64
LEAST_MARGIN = 32 << 20
# What passes count since the side began -> its name in a row, a token, and its unit.
COUNTS = {
    "read": ("MB/token read", 1e6), "demand_bytes": ("MB/token waited for", 1e6),
    "waited": ("ms/token waited", 1e-3), "cpu": ("CPU ms/token", 1e-3),
}  # fmt: skip
KEYS = ("side", "cage GB", "depth")  # what tells rows apart
AVX2 = {"MOEPACK_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A row that is asked for.

    Attributes:
        side: "moepack:POLICY[:dense=VERSION][:kv=BITS]" or "llama:MIX[:kv=TYPE][:flash=0|1]"; ":avx2" behind these
            holds the side to AVX2, and ":read-ahead=KB" at the end sets the disk.
        cage: bytes.
        prompt, decode: tokens of each text.
        depth: tokens of context before each.
        seconds: after which the side is stopped.
        threads: of the side.
        cold: whether the page cache is emptied first.
    """

    side: str
    cage: int
    prompt: int
    decode: int
    depth: int
    seconds: float
    threads: int
    cold: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """Variables that hold moepack and torch to AVX2, if the side says so."""
        return AVX2 if ":avx2" in self.side else {}

    def command(self, shape: Shape) -> list[str]:
        """What is run. Raises PeerError where llama.cpp, or the model, is not there."""
        who, _, rest = self.side.partition(":")
        rest = rest.partition(":read-ahead=")[0].removesuffix(":avx2")
        what, *named = re.split(r":(?=dense=|kv=|flash=)", rest)
        options = dict(option.split("=", 1) for option in named)
        if who == "moepack":
            options["policy"] = what
            path = bundle_of(shape)
            memory = self.cage - max(self.cage // MARGIN, LEAST_MARGIN)
            run = [sys.executable, "-m", "benchmarks.limited.ours"]
        elif who == "llama":
            path = gguf_of(shape, what)
            memory = self.cage
            peer = environments.LLAMA_AVX2 if self.environment else environments.LLAMA
            python = environments.environment(peer, install=False)
            run = [str(python), "-m", "benchmarks.limited.theirs", str(self.threads), "serve"]
        else:
            raise PeerError(f"side {who!r} is unknown: moepack and llama are known")
        if not path.exists():
            raise PeerError(f"{path} is not there: --make")
        order = Order(str(path), options, memory, self.threads, self.prompt, self.decode, self.depth)
        return [*run, json.dumps(asdict(order))]


def measure(asked: Asked, shape: Shape) -> Row:
    """Run a side, and say what it did."""
    row: Row = {"side": asked.side, "cage GB": asked.cage / 1e9, "depth": asked.depth}
    command = asked.command(shape)
    if asked.cold:
        row["page cache"] = forget(p for p in (bundle_of(shape), gguf_of(shape, "Q4_K_M")) if p.is_file())
    ahead = int(asked.side.partition(":read-ahead=")[2] or 0) or None
    with (
        read_ahead(home(shape), ahead) as found,
        Cage(asked.cage) as cage,
        tempfile.TemporaryFile() as errors,
    ):
        # A cage larger than what the machine has left measures the other programs.
        free = psutil.virtual_memory().available / 1e9
        row |= {"bounds": cage.bounds, "read ahead kB": found, "available GB": free}
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            preexec_fn=cage.enter,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(asked.threads), **asked.environment},
        )
        said, stopped = _listen(process, began, asked.seconds)
        status = process.wait()
        row |= {"peak GB": (cage.peak() or 0) / 1e9, **summary(said, asked.prompt)}
        if cage.killed():
            row["result"] = "killed: out of memory" + ("" if "first token s" in row else ", before its first token")
        elif "result" not in row and stopped:
            row["result"] = f"stopped after {asked.seconds:.0f} s"
        elif "result" not in row and status:
            errors.seek(0)
            last = (errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            row["result"] = f"ended with status {status}: {last}"
    return row


def _listen(process: subprocess.Popen[bytes], began: float, seconds: float) -> tuple[list[Row], bool]:
    """What a process says until its end, each line with the seconds until then, and whether it was stopped."""
    assert process.stdout is not None
    said: list[Row] = []
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = began + seconds - time.monotonic()
            if left <= 0 or not selector.select(left):
                process.send_signal(signal.SIGKILL)
                return said, True
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return said, False
            *lines, rest = (rest + data).split(b"\n")
            said += [{**json.loads(line), "at": time.monotonic() - began} for line in lines]


def summary(said: Sequence[Row], prompt: int) -> Row:
    """The measures of a row from the lines of its passes."""
    out: Row = {}
    for line in said:
        if "refused" in line:
            out["result"] = f"refused: {line['refused']}"
        if "loaded" in line:
            out["load s"] = line["at"]
        if "anonymous" in line:
            out["process GB"] = max(out.get("process GB", 0.0), line["anonymous"] / 1e9)
    passes = [line for line in said if "tokens" in line]
    if not passes:
        return out
    before = {id(b): a for a, b in itertools.pairwise(said)}
    prompts, single = ([p for p in passes if (p["tokens"] == prompt) == whole] for whole in (True, False))
    out |= {"first token s": passes[0]["at"], "first prompt tokens/s": prompt / passes[0]["seconds"]}
    if prompts[1:]:
        out["prefill tokens/s"] = prompt * len(prompts[1:]) / sum(p["seconds"] for p in prompts[1:])
    counted = single[WARM:] if len(single) > WARM else single[1:]
    out["decoded"] = len(single)
    if counted:
        seconds = [p["seconds"] for p in counted]
        out |= {"decode tokens/s": len(counted) / sum(seconds), "counted": len(counted)}
        out["p99 ms"] = 1e3 * sorted(seconds)[int(0.99 * (len(seconds) - 1))]
        for name, (key, unit) in COUNTS.items():
            if name in counted[0]:
                out[key] = sum(p[name] - before[id(p)][name] for p in counted) / len(counted) / unit
    served: dict[str, int] = passes[-1].get("served") or {}
    out |= {f"served {name}": count / sum(served.values()) for name, count in served.items()}
    return out


def kept(path: Path, row: Row, rows: list[Row]) -> None:
    """Put a row in place of one of the same side, cage and depth, and write the file."""
    rows[:] = [r for r in rows if any(r[name] != row[name] for name in KEYS)] + [row]
    path.write_text(json.dumps(rows, indent=1) + "\n")
