"""One row: a side in its cage, from a cold start to the end of its texts, its time, or itself. Judges nothing."""

import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import Row
from benchmarks.peers import environments
from benchmarks.peers.sides import processors
from benchmarks.peers.worker import PeerEnded, PeerError, Worker

from .cage import Cage, forget, read_ahead
from .make import bundle_of, gguf_of, home
from .shapes import SESSION, TOPICS, Shape, text

WARM = 64  # tokens decoded before those that count
REPEATED = 32  # tokens whose keys and values fill a deep context
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

    def opens(self, shape: Shape) -> tuple[Path, str, Row]:
        """The interpreter and the module of the side, and what it opens.

        Raises PeerError where llama.cpp, or the model, is not there.
        """
        who, _, rest = self.side.partition(":")
        rest = rest.partition(":read-ahead=")[0].removesuffix(":avx2")
        what, *named = re.split(r":(?=dense=|kv=|flash=)", rest)
        options: Row = dict(option.split("=", 1) for option in named)
        room = self.depth + self.prompt + self.decode
        if who == "moepack":
            path = bundle_of(shape)
            python, module = Path(sys.executable), "ours"
            memory = self.cage - max(self.cage // MARGIN, LEAST_MARGIN)
            options |= {"bundle": str(path), "policy": what, "memory": memory, "looks": True}
            options |= {"kv_tokens": room, "prefill_tokens": self.prompt, "all_logits": False}
        elif who == "llama":
            path = gguf_of(shape, what)
            peer = environments.LLAMA_AVX2 if self.environment else environments.LLAMA
            python, module = environments.environment(peer, install=False), "llama"
            if "flash" in options:
                options["flash"] = options["flash"] == "1"
            # Repacked weights are copied, and the whole model must fit in memory.
            options |= {"path": str(path), "repacked": False, "context": room, "batch": self.prompt}
            options["deep"] = self.depth > 0
        else:
            raise PeerError(f"side {who!r} is unknown: moepack and llama are known")
        if not path.exists():
            raise PeerError(f"{path} is not there: --make")
        return python, f"benchmarks.peers.{module}", options


def measure(asked: Asked, shape: Shape) -> Row:
    """Run a side, and say what it did."""
    row: Row = {"side": asked.side, "cage GB": asked.cage / 1e9, "depth": asked.depth}
    python, module, opens = asked.opens(shape)
    if asked.cold:
        row["page cache"] = forget(p for p in (bundle_of(shape), gguf_of(shape, "Q4_K_M")) if p.is_file())
    ahead = int(asked.side.partition(":read-ahead=")[2] or 0) or None
    said: list[Row] = []
    with (
        read_ahead(home(shape), ahead) as found,
        Cage(asked.cage) as cage,
        tempfile.TemporaryDirectory() as scratch,
    ):
        # A cage larger than what the machine has left measures the other programs.
        free = psutil.virtual_memory().available / 1e9
        row |= {"bounds": cage.bounds, "read ahead kB": found, "available GB": free}
        began = time.monotonic()
        log = Path(scratch) / "log"
        cpus = processors(asked.threads)
        with Worker(python, module, cpus, log, asked.environment, asked.seconds, cage.enter) as side:
            try:
                for line in _passes(side, asked, opens):
                    said.append({**line, "at": time.monotonic() - began})
            except PeerEnded as error:
                row["result"] = str(error)
            except PeerError as error:
                row["result"] = f"refused: {error}".replace(f"{opens.get('bundle')}: ", "")
        row |= {"peak GB": (cage.peak() or 0) / 1e9, **summary(said, asked.prompt)}
        if cage.killed():
            row["result"] = "killed: out of memory" + ("" if "first token s" in row else ", before its first token")
    return row


def _passes(side: Worker, asked: Asked, opens: Row) -> Iterator[Row]:
    """Load a model, and go through the texts; what each pass took, with all that is counted until then.

    Every side reads the same ids: a text's prompt at once, then its next tokens one by one, whatever the model would
    have said. So routing is the text's on every side.
    """
    side.call("open_model", key="model", **opens)
    yield side.call("facts", key="model")
    for topic in range(TOPICS):
        ids = text(topic, asked.prompt + asked.decode, SESSION)
        if asked.depth:
            side.call("deepen", key="model", ids=text(topic, REPEATED, SESSION + 1), depth=asked.depth)
        for number, part in enumerate((ids[: asked.prompt], *([token] for token in ids[asked.prompt :]))):
            afresh = number == 0 and not asked.depth
            (seconds,) = side.call("read", key="model", parts=[part], afresh=afresh)
            yield {"text": topic, "tokens": len(part), "seconds": seconds, **side.call("facts", key="model")}


def summary(said: Sequence[Row], prompt: int) -> Row:
    """The measures of a row from the lines of its passes."""
    if not said:
        return {}
    loaded, *passes = said
    out: Row = {"load s": loaded["at"], "process GB": max(line["anonymous"] for line in said) / 1e9}
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
