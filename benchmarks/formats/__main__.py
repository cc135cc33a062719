"""What encodings cost at their bytes: moepack's versions, other libraries', llama.cpp's types, and ideas.

    python -m benchmarks.formats --part ideas [--checkpoint MODEL --calibration FILE... --data FILE...]
    python -m benchmarks.formats --part generated --part libraries
    python -m benchmarks.formats --part generated --part ideas --bits 2
    python -m benchmarks.formats --part bytes --part generated: scales of a byte
    python -m benchmarks.formats --part grids [--part generated]: narrower scales and zero points, unequal levels

Of the same weights and second moments, each scheme gives values. They are compared by relative output error on
held-out tokens, gate and up apart from down, and by the divergence of a model that computes in float32 with them. The
last columns are that divergence over the one of `w4` to `w1`, in groups of 64, at as many bits (between two widths
log-linear); of versions whose down is rotated, over the plain version's; and of generated matrices the error of `w4` to
`w1` at another scheme's bits over that scheme's, for the matrix where that is more. ggml's types get the moments'
diagonal as importance; they are left out where llama-cpp-python is not installed for benchmarks.peers.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import EXAMPLES, Target, arguments, finish
from benchmarks.peers import environments
from benchmarks.peers.worker import PeerError, Worker

from . import schemes
from .grids import grids
from .measure import OURS, PARTS, of_generated, of_model

RATIO, PLAIN = "of today's at these bits", "of the plain version's"
MORE = ("libraries", "ideas", "rotated", "grids", "bytes", "generated")  # generated: matrices in place of models


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        action="append",
        help="a small Qwen3-MoE; may be given again; with --part generated none without",
    )
    parser.add_argument("--calibration", action="append", help="text to make moments from")
    parser.add_argument("--data", action="append", help="text to measure on")
    parser.add_argument("--windows", type=int, nargs=2, default=(256, 64), help="windows of 256 tokens, of each")
    parser.add_argument(
        "--bits", type=int, choices=schemes.WIDTHS, action="append", help="ideas for these widths alone"
    )
    parser.add_argument("--part", choices=MORE, action="append", help="these alone beside versions; may be given again")
    args = parser.parse_args()
    calibration = args.calibration or [str(EXAMPLES / "text" / "calibration.jsonl")]
    data = args.data or [str(EXAMPLES / "text" / "evaluation.jsonl")]
    parts = args.part or list(MORE if args.quick else MORE[:3])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        every = [*schemes.today(), *schemes.built()]
        every += schemes.rotated() if "rotated" in parts else ()
        every += schemes.small() if "bytes" in parts else ()
        if "libraries" in parts and not args.quick:
            every += [scheme for method in ("gptqmodel", "hqq") for scheme in schemes.others(method)]
            if (llama := ggml(stack, scratch)) is not None:
                every += [schemes.of_ggml(name, llama, scratch) for name in schemes.GGML]
        if "ideas" in parts:
            ideas = [idea for bits in args.bits or schemes.WIDTHS for idea in schemes.ideas(bits)]
            every += ideas[:2] if args.quick and not args.bits else ideas
        if "grids" in parts:
            tried = [schemes.of_trials(*idea) for bits in args.bits or schemes.WIDTHS for idea in grids(bits)]
            every += tried[:: 12 if args.quick else 1]
        windows = (24, 8) if args.quick else tuple(args.windows)
        models = args.checkpoint or ([EXAMPLES / "mini-qwen3-moe"] if args.quick or "generated" not in parts else [])
        for checkpoint in models:
            rows += of_model(checkpoint, calibration, data, windows, every)
        shapes = ((128, 256), (256, 128)) if args.quick else ((768, 2048), (2048, 768))
        # Many schemes, and what they make of a row depends on few others.
        if {"grids", "bytes"} & set(parts) and not args.quick:
            shapes = ((192, 2048), (512, 768))
        for kind in ("normal", "heavy", "outliers") if "generated" in parts else ():
            rows += of_generated(kind, shapes, every)
    errors = [f"error {p}" for p in PARTS]
    columns = ["model", "who", "encoding", "bits/weight", *errors, "KL, mnat", "+-", RATIO, PLAIN, OURS]
    finish("Error and divergence by bits", columns, rows, targets(rows), args.json)


def ggml(stack: ExitStack, scratch: Path) -> Worker | None:
    """llama.cpp's process; None where it is not installed."""
    try:
        python = environments.environment(environments.LLAMA, environments.cache(), install=False)
    except PeerError as error:
        print(f"llama.cpp is left out: {error}", flush=True)
        return None
    worker = Worker(python, "benchmarks.peers.llama", [0], scratch / "llama.log", threads=1)
    return stack.enter_context(worker)


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """For each width 0.8 of its divergence, by the version whose down has a bit more; half of the IQ types' errors."""
    iq = [r for r in rows if OURS in r and r["encoding"].startswith("IQ")]
    out = [Target(f"{r['model']}: error at the bits of {r['encoding']} over its", r[OURS], 0.5, "lower") for r in iq]
    for model in dict.fromkeys(row["model"] for row in rows if RATIO in row):
        found = {r["encoding"]: float(r[RATIO]) for r in rows if r["model"] == model and r["who"] == "moepack"}
        for width, mixed in zip(schemes.TODAY, schemes.MIXED, strict=True):
            name = f"{model}: divergence of {mixed} over {width}'s at as many bits"
            out.append(Target(name, found[mixed], 0.8, "lower"))
        turned = [r for r in rows if r["model"] == model and PLAIN in r]
        out += [Target(f"{model}: divergence of {r['encoding']} over plain", r[PLAIN], 1.0, "lower") for r in turned]
    return out


if __name__ == "__main__":
    main()
