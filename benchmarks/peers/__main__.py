"""moepack beside llama.cpp and ik_llama.cpp on a CPU, in one run.

    python -m benchmarks.peers [--checkpoint MODEL ...] [--calibration FILE] [--data FILE] [--install]

llama-cpp-python and ik-llama-cpp-python, compiled for this processor without BLAS, are installed into environments of
their own, under the user's cache, when they are not there; `--install` does no more, and `--quick` installs nothing.
With MOEPACK_ISA=avx2 they are compiled for AVX2, in other environments. If one cannot be had, the reason is printed,
and the others run without it. Each side is a process of its own on the same processors with as many threads; sides
take turns; lower quartiles. moepack's kernels are tuned for each number of threads first, as
`moepack doctor --kernels` does.

models: four layers of `benchmarks.limited`'s generated model: a prompt of 512 tokens, decoding one token at a time, 16
further tokens at once, and decoding after 4,000 tokens, as a user would run each side: llama.cpp's own mixes,
ik_llama.cpp with the same files and with its own types, and moepack's dense versions. Its files, 10 GB, are generated
beside those of `benchmarks.limited` and kept.
quality: error and divergence at so many bits a weight, both sides from the same matrices and moments: generated ones of
true shape, and those of each `--checkpoint`, a small trained Qwen3-MoE (default: the one in examples/, whose rows are
too short for K-quants); then with attention quantised as well, as users run them.
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import EXAMPLES, Row, arguments, finish, show, texts
from benchmarks.limited.make import make
from benchmarks.limited.shapes import SHAPES

from .judge import judged
from .sides import PEERS, Sides
from .worker import PeerError

DISK = 12e9  # bytes that the files of the model may take


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", action="append", type=Path, help="default: examples/mini-qwen3-moe")
    parser.add_argument("--calibration", action="append", help="text to make moments from")
    parser.add_argument("--data", action="append", help="text to measure on")
    parser.add_argument("--install", action="store_true", help="install the peers and stop")
    args = parser.parse_args()
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sides = Sides(Path(scratch), install=args.install or not args.quick, peers=tuple(PEERS))
        if args.quick and not args.install and len(sides.python) == 1:
            return  # there is nothing to stand beside
        peers = sides.versions()
        if not args.install:
            rows["models"] = _models(sides, args.quick, peers)
            rows["quality"] = _quality(sides, args)
    for part, of_part in rows.items():
        show(part, of_part)
    for name, what in peers.items():
        print(f"{name}: {what}")
    if args.install:
        return
    every = [{"part": part, **row} for part, of_part in rows.items() for row in of_part]
    gaps = [row for row in every if "not measured" in row]
    whole = {"rows": every, "peers": peers}  # in the file, in place of the gaps that are shown last
    finish("not measured", gaps, judged(every), args.json, whole)


def _models(sides: Sides, quick: bool, peers: dict[str, str]) -> list[Row]:
    """Rows of whole models by number of threads; what moepack's kernels are is added to `peers`."""
    from .whole import MATCHES, make_own, measure

    shape = SHAPES["tiny" if quick else "four"]
    try:
        make(shape, [match.mix for match in MATCHES] if "llama.cpp" in sides.python else [], DISK)
    except PeerError as error:
        raise SystemExit(str(error)) from None
    if "ik_llama.cpp" in sides.python:
        try:
            with sides.start("ik_llama.cpp", len(os.sched_getaffinity(0))) as worker:
                make_own(worker, shape)
        except PeerError as error:
            print(f"ik_llama.cpp runs without files of its own: {error}", flush=True)
    rows = []
    for count in range(1, 1 + min(1 if quick else 2, len(os.sched_getaffinity(0)))):
        with ExitStack() as stack:
            workers = {who: stack.enter_context(sides.start(who, count)) for who in sides.python}
            peers[f"moepack, {count} threads"] = workers["moepack"].call("tune")
            for match in MATCHES:
                rows += measure(workers, shape, match, *((8, 0.5) if quick else (24, 5.0)), count)
    return rows


def _quality(sides: Sides, args: argparse.Namespace) -> list[Row]:
    from . import quality

    calibration, data = texts(args)
    shapes = ((256, 512), (512, 256)) if args.quick else ((1536, 2048), (2048, 768))
    windows = (48, 12) if args.quick else (256, 64)
    with ExitStack() as stack:
        llama = None
        if "llama.cpp" in sides.python:
            llama = stack.enter_context(sides.start("llama.cpp", len(os.sched_getaffinity(0))))
        every = quality.encodings(llama, sides.scratch)
        rows = quality.of_generated(shapes, every)
        for checkpoint in args.checkpoint or [EXAMPLES / "mini-qwen3-moe"]:
            rows += quality.of_model(checkpoint, calibration, data, windows, every)
        return rows


if __name__ == "__main__":
    main()
