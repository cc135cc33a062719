"""A full-depth model larger than memory: moepack and llama.cpp, each in the same limit of memory, page cache included.

    python -m benchmarks.limited --make [--shape NAME] [--gguf MIX ...] [--disk GB]
    python -m benchmarks.limited [--cage SIZE ...] [--sides SIDE ...] [--depth N ...] [--seconds N] [--again]
        [--json FILE]
    python -m benchmarks.limited --kept [--depth N ...] --json FILE

`--make` generates a model of Qwen3-30B-A3B's shape (48 layers of 128 experts) under the user's cache: a bundle with w4
and w2, dense matrices in w8 and w4, and GGUF files in llama.cpp's own mixes. Weights are random, but routing is uneven
as in trained models, and shifts with the text.

A side is a process in a control group of its own that holds its memory and its page cache. It starts with no file in
the page cache, and reads three texts of three topics one after another: a prompt of 512 tokens at once, then the next
128 one by one, the same ids on every side. The first 64 of those do not count.

With `--depth` each text follows a context of so many tokens. Its keys and values are those of 32 tokens again and
again, on both sides: reading such a context would take up to an hour a row.

Sides: moepack:POLICY[:dense=VERSION][:kv=BITS] in `memory=` a 64th below the limit; llama:MIX[:kv=TYPE][:flash=0].
With :avx2 a side is held to AVX2, llama.cpp in a build of its own:
`MOEPACK_ISA=avx2 python -m benchmarks.peers --install` makes it. With :read-ahead=KB at the end the disk reads so far
ahead of page faults meanwhile (Linux' own value is 128, which llama.cpp's default row has); moepack reads past the page
cache. Rows are kept in rows.json beside the model, and finished ones are not run again without `--again`. A side that
is refused, killed or stopped is a row too.
"""

import argparse
import itertools
import os

from benchmarks.common import Row, arguments, finish
from benchmarks.peers.worker import PeerError
from moepack.runtime.planning.sizes import parse_size

from .make import home, make
from .rows import Asked, kept, measure
from .shapes import SHAPES, Shape, read_rows

SIDES = ("moepack:hotness:lo=stored:dense=w4", "moepack:lru:lo=absent:dense=w4", "llama:Q4_K_M:read-ahead=128")
QUICK = ("moepack:hotness:lo=stored:dense=w4", "moepack:static:w2:dense=w4")
# tokens of a text that are read at once, and one by one
PROMPT = 512
DECODE = 128
COLUMNS = (
    "side",
    "cage GB",
    "depth",
    "first token s",
    "prefill tokens/s",
    "decode tokens/s",
    "p99 ms",
    "MB/token read",
    "served w4",
    "process GB",
    "result",
)


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-moe")
    parser.add_argument("--make", action="store_true", help="generate the model and stop")
    parser.add_argument("--gguf", nargs="*", default=["Q4_K_M"], metavar="MIX", help="files that --make writes")
    parser.add_argument("--disk", type=float, default=45.5, help="GB that the model's files may take (default: 45.5)")
    parser.add_argument("--cage", nargs="+", type=parse_size, default=[6 * 10**9, 10**10], metavar="SIZE")
    parser.add_argument("--sides", nargs="+", default=SIDES, metavar="SIDE")
    parser.add_argument("--depth", nargs="+", type=int, default=[0], metavar="N", help="tokens before each text")
    parser.add_argument("--seconds", type=float, default=600, help="after which a row is stopped (default: 600)")
    parser.add_argument("--again", action="store_true", help="run rows again that are there")
    parser.add_argument("--kept", action="store_true", help="run nothing: print the rows that are there")
    args = parser.parse_args()
    args.prompt = PROMPT
    args.decode = DECODE
    args.threads = len(os.sched_getaffinity(0))
    if args.quick:
        args.shape = "tiny"
        args.sides = QUICK
        args.gguf = []
        args.again = True
        args.cage = [2 * 10**9]
        args.seconds = 50
        args.prompt = 64
        args.decode = 8
    return args


def main() -> None:
    args = parsed()
    shape = SHAPES[args.shape]
    try:
        if args.make or args.quick:
            make(shape, args.gguf, args.disk * 1e9)
        if args.make:
            return
        rows = measured(shape, args)
    except PeerError as error:
        raise SystemExit(str(error)) from None
    facts = {"shape": args.shape, "prompt": args.prompt, "decode": args.decode, "threads": args.threads}
    finish(f"{shape.name} in a memory limit", rows, [], args.json, facts, COLUMNS)


def measured(shape: Shape, args: argparse.Namespace) -> list[Row]:
    """The rows that were asked for, in their order."""
    path = home(shape) / "rows.json"
    out = []
    if args.kept:
        found = [row for row in read_rows(path) if row["depth"] in args.depth]
        return sorted(found, key=lambda row: (float(row["cage GB"]), row["depth"]))
    for cage, depth, side in itertools.product(args.cage, args.depth, args.sides):
        rows = read_rows(path)
        asked = Asked(side, cage, args.prompt, args.decode, depth, args.seconds, args.threads, not args.quick)
        wanted = {"side": side, "cage GB": cage / 1e9, "depth": depth}
        row = next((r for r in rows if wanted.items() <= r.items()), None)
        if row is None or args.again:
            print(f"{side} in {cage / 1e9:g} GB" + (f" at {depth:,} tokens" if depth else ""), flush=True)
            row = measure(asked, shape)
            kept(path, row, rows)
        out.append(row)
    return out


if __name__ == "__main__":
    main()
