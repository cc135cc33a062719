"""Throughput, TTFT and TPOT of `moepack serve` by clients and policies, with plain `transformers serve` beside it.

    python -m benchmarks.serve [--bundle BUNDLE] [--checkpoint MODEL] [--device-memory SIZE] [--data FILE...]
    python -m benchmarks.serve --bundle BUNDLE --soak 480 [--clients N] [--policy POLICY] [--dense VERSION]
        [--memory SIZE]

Every server is a process of its own; clients stream from this one, over plain sockets. Each of 1, 4, 16 and 32 clients
asks for one answer after another, with prompts from the files in turn. `transformers serve` has one set of sampling
parameters for all and no `ignore_eos`: there what came is what counts, and only greedy answers are asked of either.
`--soak SECONDS` loads one server instead, with the files changing every 30 seconds and clients that leave half-way, and
says how its memory grew after a tenth of the time. With `--memory` the server runs under `--memory auto` in a control
group of that size, which must not kill it. Without arguments: the model and texts in examples/.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.clients import Ask, Reply, clients, percentile, stream
from benchmarks.common import EXAMPLES, Row, Target, arguments, build, finish
from benchmarks.limited.cage import Cage, anonymous
from moepack.calibrate.text.documents import documents
from moepack.runtime.planning.sizes import parse_size

POLICIES = ("hotness", "uniform", "lru")
CLIENTS = (1, 4, 16, 32)
# characters of a prompt, tokens of an answer
LENGTH = 200
TOKENS = 64
RECIPE = "versions: [bf16, w4, w3, w2]\nquantize: {method: rtn, loss_tokens: 256}\ncalibration: {samples: 16}\n"
PATIENCE = 120  # seconds that a client of a soak waits for the end of an answer


@contextlib.contextmanager
def moepack_serve(bundle: Path, *options: str, cage: Cage | None = None) -> Iterator[tuple[int, int]]:
    """A server of a bundle, in a cage or not: its port and process."""
    command = [sys.executable, "-m", "moepack", "serve", str(bundle), "--name", "model", "--port", "0", *options]
    enter = None if cage is None else cage.enter
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=enter)
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving model at http://[^:]+:(\d+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
                yield int(found[1]), process.pid
                return
        raise SystemExit(said)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def transformers_serve(checkpoint: Path) -> Iterator[tuple[int, int]]:
    """transformers' own server of a plain checkpoint, with continuous batching."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "from transformers.cli.serve import Serve; Serve("
        f"force_model={str(checkpoint)!r}, port={port}, device='cpu', dtype='auto', host='127.0.0.1', "
        "continuous_batching=True, cb_use_cuda_graph=False, log_level='error')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(600):
            if process.poll() is not None:
                assert process.stderr is not None
                raise RuntimeError(process.stderr.read().strip().splitlines()[-1])
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def prompts_of(path: Path) -> list[str]:
    """The documents of a file, without short ones and conversations."""
    return [one for one in documents(str(path)) if isinstance(one, str) and len(one) > 40]


def asking(port: int, model: str, prompts: list[list[str]], own: bool) -> Ask:
    """What a client does in its turn: a prompt of the file whose turn it is."""

    async def ask(number: int, turn: int) -> Reply:
        pool = prompts[turn // 4 % len(prompts)]
        prompt = random.Random(f"{number} {turn}").choice(pool)[:LENGTH]
        body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        if own:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return await stream(port, "/v1/completions", body)

    return ask


def measured(ask: Ask, count: int, seconds: float) -> Row:
    """A row of the table."""
    replies, took = asyncio.run(clients(count, seconds, ask))
    good = [r for r in replies if r.error is None]
    failed = [r.error for r in replies if r.error is not None]
    row: Row = {"clients": count, "answers": len(good), "errors": len(failed)}
    if failed:
        row["error"] = str(failed[0])[:200]
    if good:
        row["tokens/s"] = sum(r.tokens for r in good) / took
        for name, values in (("TTFT", [r.first * 1e3 for r in good]), ("TPOT", [r.each * 1e3 for r in good])):
            row |= {f"{name} p50": percentile(values, 0.5), f"{name} p99": percentile(values, 0.99)}
    return row


def live(port: int) -> Row:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/live") as answer:
        found: Row = json.load(answer)
        return found


def soak(
    bundle: Path,
    memory: str,
    prompts: list[list[str]],
    options: argparse.Namespace,
    cage: Cage | None,
    serving: Sequence[str],
) -> tuple[list[Row], list[Target]]:
    """One server under a load that shifts, for so long: memory, promotions and errors, ten times."""
    budget = ("--memory", "auto") if cage is not None else ("--device-memory", memory)
    with moepack_serve(bundle, *serving, *budget, cage=cage) as (port, pid):
        began = time.monotonic()
        rows = list[Row]()
        # clients that left half-way as they meant to, or because no end came
        errors = 0
        gone = [0, 0]

        async def ask(number: int, turn: int) -> Reply:
            pool = prompts[int(time.monotonic() - began) // 30 % len(prompts)]
            chance = random.Random(f"{len(rows)} {number} {turn}")
            prompt = chance.choice(pool)[: chance.choice((40, 200, 800))]
            most = chance.choice((8, 32, 96))
            body = {"model": "model", "prompt": prompt, "max_tokens": most, "temperature": 0.8}
            leaves = chance.random() < 0.1
            try:
                return await asyncio.wait_for(stream(port, "/v1/completions", body), 0.3 if leaves else PATIENCE)
            except TimeoutError:
                gone[not leaves] += 1
                return Reply(tokens=1, at=[0.0])

        for _ in range(10):
            replies, _ = asyncio.run(clients(options.clients, options.soak / 10, ask))
            if cage is not None and cage.killed():
                raise SystemExit(f"the kernel killed the server in its cage of {cage.limit} bytes")
            now = live(port)
            errors += sum(r.error is not None and "no text" not in r.error for r in replies)
            row = {"minutes": (time.monotonic() - began) / 60, "MB": anonymous(pid) / 1e6, "answers": len(replies)}
            row |= {"errors": errors, "promotions": now["counters"]["promotions"], "left": gone[0], "gave up": gone[1]}
            row |= {"waits": now["counters"]["forward_waits"], "peak": now["budget"]["peak"] / now["budget"]["total"]}
            row |= {"steps": now["totals"]["steps"], "process MB": now["budget"]["process_bytes_peak"] / 1e6}
            rows.append(row)
    growth = rows[-1]["MB"] / rows[0]["MB"] - 1
    return rows, [
        Target("growth of memory after a tenth of the time, %", 100 * growth, 2.0, "lower"),
        Target("errors", errors, 0, "lower"),
        Target("clients that gave up", gone[1], 0, "lower"),
        Target("peak of reserved bytes by the budget", rows[-1]["peak"], 1.0, "lower"),
        *(
            caged(cage, rows[-1])  # where the disk may be a tier: passes wait for it
            if cage is not None
            else [
                Target("forward waits", rows[-1]["waits"], 0, "lower"),
                Target("promotions in the second half", rows[-1]["promotions"] - rows[4]["promotions"], 1, "higher"),
            ]
        ),
    ]


def caged(cage: Cage, row: Row) -> list[Target]:
    """What a server in a cage is held to: the kernel did not kill it, and it stayed below the limit."""
    return [
        Target("peak of the process by the cage", row["process MB"] * 1e6 / cage.limit, 1.0, "lower"),
        Target(f"peak of the cage by its limit ({cage.bounds})", (cage.peak() or 0) / cage.limit, 1.0, "lower"),
        Target("steps", row["steps"], 1000, "higher"),
    ]


def compare(
    bundle: Path, checkpoint: Path | None, memory: str, prompts: list[list[str]], options: argparse.Namespace
) -> tuple[list[Row], list[Target]]:
    """Rows by server and clients, and what the first policy is held to."""
    rows: list[Row] = []
    counts, seconds = ((1, 16), 4.0) if options.quick else (CLIENTS, options.seconds)
    waits = peak = 0.0
    for policy in POLICIES[: 1 if options.quick else None]:
        with moepack_serve(bundle, "--policy", policy, "--device-memory", memory) as (port, _):
            ask = asking(port, "model", prompts, own=True)
            measured(ask, 4, 1.0)
            for count in counts:
                rows.append({"server": f"moepack, {policy}", **measured(ask, count, seconds)})
            if policy == POLICIES[0]:
                now = live(port)
                waits = now["counters"]["forward_waits"]
                peak = now["budget"]["peak"] / now["budget"]["total"]
    if checkpoint is not None and not options.quick:
        try:
            with transformers_serve(checkpoint) as (port, _):
                ask = asking(port, str(checkpoint), prompts, own=False)
                measured(ask, 1, 1.0)
                for count in counts:
                    rows.append({"server": "transformers serve", **measured(ask, count, seconds)})
        except (ImportError, RuntimeError) as error:
            rows.append({"server": "transformers serve", "error": str(error)[:200]})
    first = {row["clients"]: row for row in rows if row["server"] == f"moepack, {POLICIES[0]}"}
    return rows, [
        Target("throughput at 16 clients by that at one", first[16]["tokens/s"] / first[1]["tokens/s"], 4.0, "higher"),
        Target("errors", sum(row["errors"] for row in first.values()), 0, "lower"),
        Target("forward waits", waits, 0, "lower"),
        Target("peak of reserved bytes by the budget", peak, 1.0, "lower"),
    ]


def enough(bundle: Path, policies: Sequence[str]) -> str:
    """A budget of twice the largest least of these policies, which the server's refusals name."""
    least = 0
    for policy in policies:
        try:
            with moepack_serve(bundle, "--policy", policy, "--device-memory", "1"):
                raise AssertionError("a byte does not suffice")
        except SystemExit as refused:
            found = re.search(r"least that would do is (\d+) bytes", str(refused))
            if found is None:
                raise
            least = max(least, int(found[1]))
    return str(2 * least)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bundle", type=Path, help="what is served; a small one is built without it")
    parser.add_argument("--checkpoint", type=Path, help="for transformers serve, and for a bundle where none is named")
    parser.add_argument("--device-memory", help="the budget; without it twice the least that the policies need")
    parser.add_argument("--data", type=Path, nargs="+", default=[EXAMPLES / "text" / "evaluation.jsonl"])
    parser.add_argument("--seconds", type=float, default=15.0, help="of a row")
    parser.add_argument("--soak", type=float, help="seconds of one long load instead")
    parser.add_argument("--clients", type=int, default=16, help="with --soak")
    parser.add_argument("--policy", default="hotness", help="with --soak: what is served")
    parser.add_argument("--dense", help="with --soak: the version of matrices beside the experts")
    parser.add_argument(
        "--memory", help="with --soak: bytes of a control group, in which the server takes what there is"
    )
    options = parser.parse_args()
    if options.memory and not options.soak:
        parser.error("--memory is of --soak")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prompts = [prompts_of(path) for path in options.data]
    with tempfile.TemporaryDirectory() as work:
        example = EXAMPLES / "mini-qwen3-moe"
        checkpoint = options.checkpoint or (None if options.bundle else example)
        bundle = options.bundle or build(checkpoint or example, Path(work) / "bundle", RECIPE)
        policies = POLICIES[: 1 if options.quick or options.soak else None]
        if not options.memory:
            options.device_memory = options.device_memory or enough(bundle, policies)
        serving = ["--policy", options.policy, *(["--dense", options.dense] if options.dense else [])]
        if options.soak:
            with Cage(parse_size(options.memory) or 0) if options.memory else contextlib.nullcontext() as cage:
                rows, targets = soak(bundle, options.device_memory, prompts, options, cage, serving)
        else:
            rows, targets = compare(bundle, checkpoint, options.device_memory, prompts, options)
    finish("Serving, times in ms", rows, targets, options.json)


if __name__ == "__main__":
    main()
