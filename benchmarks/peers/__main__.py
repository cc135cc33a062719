"""moepack beside llama.cpp and kt-kernel on a CPU, in one run.

    python -m benchmarks.peers [--threads N ...] [--shape NAME ...] [--version NAME ...] [--checkpoint MODEL ...]
                               [--calibration FILE] [--data FILE] [--only layers|models|quality ...]
                               [--work DIR] [--install]

llama-cpp-python, compiled for this processor without BLAS, and kt-kernel are installed into environments of their own,
under the user's cache, when they are not there; `--install` does no more, and `--quick` installs nothing.
With MOEPACK_ISA=avx2 llama.cpp is compiled for AVX2 as well, in an environment of its own.
A peer that cannot be had is named, with the reason, and left out.
Every side is a process of its own on the same processors with as many threads; sides take turns;
lower quartiles. moepack's kernels are tuned for each number of threads first, as `moepack doctor --kernels` does.

layers: a layer's experts after routing, weights cold: passes walk through more experts than caches hold. The floor is
the time in which the same threads read a side's bytes and do nothing else. gpt-oss' biases and clamp are left out, on
every side.
models: a generated Qwen3-MoE of true layer shapes, 4 layers, decoding one token at a time and a prompt of 512. Once
with all matrices beside the experts in BF16 on both sides, once as a user would run each: llama.cpp's own mixes, and
moepack's dense versions where it has them. About 22 GB of files are generated and kept there: `--work`.
quality: error and divergence at so many bits a weight, both sides from the same matrices and moments: generated ones of
true shape, and those of each `--checkpoint`, a small trained Qwen3-MoE (default: the one in examples/, whose rows are
too short for K-quants); then with attention quantised as well, as users run them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import EXAMPLES, arguments, finish, show

from . import environments
from .generated import FULL, QUICK, prepare
from .gguf_layout import MIXES
from .judge import judged
from .worker import PeerError, Worker

LAYERS = ("Qwen3-30B-A3B", "gpt-oss-20b", "Mixtral-8x7B")
AVX2 = os.environ.get("MOEPACK_ISA") in ("plain", "avx2")
PEERS = {"llama.cpp": environments.LLAMA_AVX2 if AVX2 else environments.LLAMA, "kt-kernel": environments.KT}
PARTS = ("layers", "models", "quality")
COLUMNS = {
    "layers": [
        "shape",
        "threads",
        "side",
        "tokens",
        "bits/weight",
        "ms",
        "GB/s",
        "floor ms",
        "over floor",
        "llama.cpp's best over ours",
        "not measured",
    ],
    "models": [
        "rest",
        "threads",
        "side",
        "decode tokens/s",
        "prefill tokens/s",
        "decode over llama.cpp's best",
        "prefill over llama.cpp's best",
        "not measured",
    ],
    "quality": [
        "model",
        "quantised",
        "who",
        "encoding",
        "bits/weight",
        "error",
        "KL, mnat",
        "+-",
        "added, %",
        "added +-",
    ],
}


class Sides:
    """The peers that can be had, and workers of all sides."""

    def __init__(self, scratch: Path, install: bool) -> None:
        self.scratch = scratch
        self.missing = {}
        self.python = {"moepack": Path(sys.executable)}
        for who, peer in PEERS.items():
            try:
                self.python[who] = environments.environment(peer, environments.cache(), install)
            except PeerError as error:
                self.missing[who] = str(error)
                print(f"{who} is left out: {error}", flush=True)

    def start(self, who: str, threads: int) -> Worker:
        """A side's process, on so many processors. kt-kernel's main thread spins while its others work: it gets one
        more, where there is one."""
        module = {"moepack": "ours", "llama.cpp": "llama", "kt-kernel": "kt"}[who]
        # what tuning finds for this benchmark is not what the user's own cache should hold
        env = {"XDG_CACHE_HOME": str(self.scratch)} if who == "moepack" else {}
        cpus = processors(threads + (who == "kt-kernel"))
        log = self.scratch / f"{module}.log"
        return Worker(self.python[who], f"benchmarks.peers.{module}", cpus, log, env, threads)

    def versions(self) -> dict[str, str]:
        """What the peers are, and why those that are missing are."""
        out = {who: f"not measured: {why}" for who, why in self.missing.items()}
        for who in self.python.keys() - {"moepack"}:
            try:
                with self.start(who, 1) as worker:
                    out |= worker.call("versions")
            except PeerError as error:  # it is installed and does not run here
                out[who] = f"not measured: {error}"
                del self.python[who]
                print(f"{who} is left out: {error}", flush=True)
        return out


def processors(count: int) -> list[int]:
    """The last ones: the first serves interrupts."""
    return sorted(os.sched_getaffinity(0))[-count:]


def main() -> None:
    """Parse arguments, install, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", action="append", type=int, help="default: 1 and 2")
    parser.add_argument("--shape", action="append", choices=LAYERS, help="of layers; default: all")
    parser.add_argument("--version", action="append", help="moepack's, of layers; default: all that have a peer")
    parser.add_argument("--checkpoint", action="append", type=Path, help="default: examples/mini-qwen3-moe")
    parser.add_argument("--calibration", action="append", help="text to make moments from")
    parser.add_argument("--data", action="append", help="text to measure on")
    parser.add_argument("--group-size", type=int, default=64, help="of moepack's versions")
    parser.add_argument("--only", action="append", choices=PARTS, help="default: all three parts")
    parser.add_argument("--work", type=Path, default=environments.cache() / "models", help="where models are kept")
    parser.add_argument("--install", action="store_true", help="install the peers and stop")
    args = parser.parse_args()
    threads = args.threads or ([1] if args.quick else [1, 2])
    if max(threads) > len(os.sched_getaffinity(0)):
        threads = [n for n in threads if n <= len(os.sched_getaffinity(0))]
        print(f"threads: {threads}: there are no more processors here")
    parts = args.only or PARTS
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    with tempfile.TemporaryDirectory() as scratch:
        sides = Sides(Path(scratch), install=args.install or not args.quick)
        if args.quick and not args.install and len(sides.missing) == len(PEERS):
            return  # there is nothing to stand beside
        peers = sides.versions()
        if args.install:
            for name, what in peers.items():
                print(f"{name}: {what}")
            return
        if "models" in parts:
            with ExitStack() as stack:
                writer = None
                if "llama.cpp" in sides.python:
                    writer = stack.enter_context(sides.start("llama.cpp", len(os.sched_getaffinity(0))))
                size = QUICK if args.quick else FULL
                try:
                    bundle, home = prepare(args.work, size, args.group_size, MIXES, writer)
                except PeerError as error:
                    raise SystemExit(str(error)) from None
        for count in threads:
            with ExitStack() as stack:
                workers = {w: stack.enter_context(sides.start(w, count)) for w in sides.python}
                peers[f"moepack, {count} threads"] = workers["moepack"].call("tune")
                if "layers" in parts:
                    rows["layers"] += _layers(workers, args, count, Path(scratch))
                if "models" in parts:
                    rows["models"] += _models(workers, bundle, home, args.quick, count)
        if "quality" in parts:
            rows["quality"] = _quality(sides, args, Path(scratch))
    for part in parts:
        show(part, COLUMNS[part], rows[part])
    for name, what in peers.items():
        print(f"{name}: {what}")
    every = [{"part": part, **row} for part in parts for row in rows[part]]
    gaps = [row for row in every if "not measured" in row]
    whole = {"rows": every, "peers": peers}  # in the file, in place of the gaps that are shown last
    finish("not measured", ["part", "side", "not measured"], gaps, judged(every), args.json, whole)


def _layers(workers: dict[str, Worker], args: Any, threads: int, scratch: Path) -> list[dict[str, Any]]:
    from benchmarks.kernels.layers import SHAPES

    from . import layers

    shapes = args.shape or (LAYERS[:1] if args.quick else LAYERS)
    tokens = (1, 16) if args.quick else layers.TOKENS
    seconds = 2.0 if args.quick else 6.0
    pool = layers.CACHES // 4 if args.quick else layers.CACHES
    rows = []
    for shape in shapes:
        known = [v for v in args.version or layers.VERSIONS if v in _versions()]
        described = (shape, SHAPES[shape])
        rows += layers.measure(workers, described, known, args.group_size, tokens, seconds, scratch, threads, pool)
    return rows


def _versions() -> tuple[str, ...]:
    from moepack.pack.spec import version_names

    return version_names()


def _models(workers: dict[str, Worker], bundle: Path, home: Path, quick: bool, threads: int) -> list[dict[str, Any]]:
    from .whole import MATCHES, measure

    rows = []
    for match in MATCHES:
        rows += measure(workers, bundle, home, match, 8 if quick else 24, 2.0 if quick else 20.0, threads)
    return rows


def _quality(sides: Sides, args: Any, scratch: Path) -> list[dict[str, Any]]:
    from . import quality

    calibration = args.calibration or [str(EXAMPLES / "text" / "calibration.jsonl")]
    data = args.data or [str(EXAMPLES / "text" / "evaluation.jsonl")]
    shapes = ((256, 512), (512, 256)) if args.quick else ((1536, 2048), (2048, 768))
    windows = (48, 12) if args.quick else (256, 64)
    with ExitStack() as stack:
        llama = None
        if "llama.cpp" in sides.python:
            llama = stack.enter_context(sides.start("llama.cpp", len(os.sched_getaffinity(0))))
        every = quality.encodings(args.group_size, llama, scratch)
        rows = quality.of_generated(shapes, every)
        for checkpoint in args.checkpoint or [EXAMPLES / "mini-qwen3-moe"]:
            rows += quality.of_model(checkpoint, calibration, data, windows, every)
        return rows


if __name__ == "__main__":
    main()
