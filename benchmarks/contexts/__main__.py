"""Tokens a second of whole models by depth of the context, beside llama.cpp, in one run.

    python -m benchmarks.contexts [--quick] [--only MODEL ...] [--threads N] [--depths N ...] [--beside N]

Models are four layers of released shapes with random weights, fewer experts and a smaller vocabulary, made once and
kept under the user's cache: 1.5 to 2.4 GB each, and 8 GB more while one is made. moepack serves `w4` in all matrices,
llama.cpp Q4_0, repacked for the processor, each with its own KV cache of 16 bits. Each side is a process of its own on
the same processors. They read the same prompt in passes of 512 tokens, in turns, and decode at each depth, in turns.
Decoding's ratio is the median over turns, a prompt's that of all its passes. llama.cpp attends with or without its
fused kernel ("flash attention"): whichever reads a prompt of 1,024 tokens faster here. It is installed as
`python -m benchmarks.peers --install` does; without it moepack runs alone. With `--beside` so many processes of one
thread compute all the time on the same processors, as other programs of a user do.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import Row, Target, arguments, finish
from benchmarks.peers.sides import Sides, processors
from benchmarks.peers.worker import PeerError, Worker

from .make import bundle_of, gguf_of, make
from .shapes import SHAPES, TINY, VOCABULARY

PASS = 512  # tokens of a prompt that are read at once
TURNS = 6
STEPS = 6  # tokens that a side decodes in a turn
DEEP = 4000
MOST = {"grouped": 1.15, "latent": 1.15, "hybrid": 1.1}  # of a token's time at DEEP tokens over the first depth's


def deepened(workers: Mapping[str, Worker], name: str, attention: str, depths: Sequence[int]) -> Iterator[Row]:
    """A model's rows, by depth: rates of each side, and moepack's over llama.cpp's.

    Args:
        workers: the sides, in which the model is open.
        name: the model's.
        attention: its kind.
        depths: in tokens, ascending, each further than what is decoded at the one before.
    """
    draw = np.random.default_rng(0)
    at = 0

    def spent(who: str, parts: list[list[int]], afresh: bool = False) -> list[float]:
        seconds: list[float] = workers[who].call("read", key=name, parts=parts, afresh=afresh)
        return seconds

    def in_order(turn: int) -> Sequence[str]:
        return tuple(workers)[:: 1 if turn % 2 else -1]

    for who in workers:  # what a first pass alone costs does not count
        spent(who, [[VOCABULARY - 1] * PASS], afresh=True)
        spent(who, [], afresh=True)
    for depth in depths:
        prompt: dict[str, list[float]] = {who: [] for who in workers}
        lengths = [min(PASS, depth - begin) for begin in range(at, depth, PASS)]
        for number, length in enumerate(lengths):
            part = draw.integers(10, VOCABULARY, length).tolist()
            for who in in_order(number):
                prompt[who] += spent(who, [part])
            at += length
        decode: dict[str, list[float]] = {who: [] for who in workers}
        for turn in range(TURNS + 1):
            parts = draw.integers(10, VOCABULARY, (STEPS, 1)).tolist()
            for who in in_order(turn):
                taken = statistics.median(spent(who, parts))
                if turn:
                    decode[who].append(taken)
            at += STEPS
        row: Row = {"model": name, "attention": attention, "depth": depth}
        for who in workers:
            row[f"{who}, decode"] = 1 / statistics.median(decode[who])
            row[f"{who}, prompt"] = sum(lengths) / sum(prompt[who])
        if len(workers) > 1:
            ours, theirs = workers
            pairs = zip(decode[theirs], decode[ours], strict=True)
            row["decode over llama.cpp's"] = statistics.median(b / a for b, a in pairs)
            row["prompt over llama.cpp's"] = sum(prompt[theirs]) / sum(prompt[ours])
        yield row


def opened(llama: Worker, name: str, path: Path, room: int) -> str:
    """Open a model in llama.cpp with the way of attention that reads a prompt faster; say which."""
    ways = {"with its fused attention": True, "without its fused attention": False}
    prompt = [[10 + i % 1000 for i in range(PASS)]] * 2
    took: dict[str, float] = {}
    for way, flash in ways.items():
        llama.call("open_model", key=name, path=str(path), repacked=True, context=room, flash=flash)
        llama.call("read", key=name, parts=prompt[:1], afresh=True)
        took[way] = sum(llama.call("read", key=name, parts=prompt, afresh=True))
        llama.call("close_model", key=name)
    best = min(took, key=lambda way: took[way])
    llama.call("open_model", key=name, path=str(path), repacked=True, context=room, flash=ways[best])
    return best


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """Let a process compute on the processors of the sides."""
    own = partial(os.sched_setaffinity, 0, processors(threads))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=own) as process:
        try:
            yield
        finally:
            process.kill()


def judged(rows: Sequence[Row]) -> list[Target]:
    """What the rows are held to: llama.cpp's rates, and how little a deeper context may cost."""
    out: list[Target] = []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        beside = [row for row in mine if "decode over llama.cpp's" in row]
        if beside:
            least = min(row["decode over llama.cpp's"] for row in beside)
            out.append(Target(f"{name}: decode over llama.cpp's, at the worst depth", least, 1.0, "higher"))
        first = mine[0]
        for row in mine[1:]:
            if row["depth"] != DEEP:
                continue
            if "prompt over llama.cpp's" in row:
                ratio = row["prompt over llama.cpp's"]
                out.append(Target(f"{name}, prompt to {DEEP:,}: over llama.cpp's", ratio, 1.0, "higher"))
            longer = first["moepack, decode"] / row["moepack, decode"]
            what = f"{name}: a token's time at {DEEP:,} over that at {first['depth']:,}"
            out.append(Target(what, longer, MOST[row["attention"]], "lower"))
    return out


def main() -> int:
    """Print the table; the exit status is 1 if a target is missed."""
    cores = len(os.sched_getaffinity(0))
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(SHAPES), metavar="MODEL", help=", ".join(SHAPES))
    parser.add_argument("--depths", nargs="+", type=int, default=(100, DEEP, 16_000), metavar="N", help="ascending")
    parser.add_argument("--threads", type=int, default=min(2, cores), choices=range(1, cores + 1))
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="processes that compute beside")
    args = parser.parse_args()
    depths = (32, 128) if args.quick else tuple(args.depths)
    decoded = (TURNS + 1) * STEPS  # at each depth
    if any(after <= before + decoded for before, after in pairwise((-decoded, *depths))):
        parser.error(f"--depths are ascending, and more than {decoded} tokens apart")
    shapes = {"tiny": TINY} if args.quick else {name: SHAPES[name] for name in args.only or SHAPES}
    rows: list[Row] = []
    gaps: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        sides = Sides(Path(scratch), install=not args.quick)
        peers = sides.versions()
        workers = {who: stack.enter_context(sides.start(who, args.threads)) for who in sides.python}
        room = max(depths[-1], 2 * PASS) + decoded
        peers["moepack"] = workers["moepack"].call("tune")
        for _ in range(args.beside):
            stack.enter_context(busy(args.threads))
        for name, shape in shapes.items():
            try:
                make(shape, workers.get("llama.cpp"))
                bundle = str(bundle_of(shape))
                workers["moepack"].call("open_model", key=name, bundle=bundle, policy="static:w4", dense="w4")
                if "llama.cpp" in workers:
                    peers[f"llama.cpp, {name}"] = opened(workers["llama.cpp"], name, gguf_of(shape), room)
                print(f"measuring {name}", flush=True)
                rows.extend(deepened(workers, name, shape.attention, depths))
            except PeerError as error:
                gaps.append({"model": name, "not measured": str(error)})
            finally:
                for worker in workers.values():
                    with suppress(PeerError):
                        worker.call("close_model", key=name)
    targets = judged(rows)
    more = {"peers": peers, "not measured": gaps}
    where = f", {args.beside} busy processes beside" if args.beside else ""
    finish(f"tokens/s, {args.threads} threads{where}", rows, targets, args.json, more)
    for gap in gaps:
        print(f"{gap['model']} is not measured: {gap['not measured']}")
    return int(not args.quick and (bool(gaps) or not all(target.met for target in targets)))


if __name__ == "__main__":
    sys.exit(main())
