"""One layer's experts on every side: what is compared with what, and how long each takes. Judges nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import lower_quartile

from .ggml_types import TYPES
from .worker import PeerError, Worker

CACHES = 512 << 20  # bytes of experts that passes walk through: more than a server's last-level cache
TOKENS = (1, 16, 512)
VERSIONS = ("bf16", "w8", "w4", "w2", "mxfp4", "nvfp4")  # moepack's, beside which something stands


@dataclass(frozen=True, slots=True)
class Side:
    """One row of the table.

    Attributes:
        who: "moepack", "llama.cpp" or "kt-kernel".
        encoding: what its experts are in.
        layout: of llama.cpp, "repacked" or "plain".
    """

    who: str
    encoding: str
    layout: str = ""

    @property
    def name(self) -> str:
        """As the table shows it."""
        return " ".join(x for x in (self.who, self.encoding, self.layout) if x)


def groups(hidden: int, inner: int, versions: Sequence[str]) -> dict[str, list[Side]]:
    """By moepack's version, the sides that are compared, moepack's first.

    Rows that are not whole blocks of 256 have no K-quant: llama.cpp then quantises to other types, which stand beside
    w4 instead, and there is nothing beside w2.
    """
    k = all(TYPES["Q4_K"].fits(n) for n in (hidden, inner))
    four = ("Q4_K",) if k else ("Q4_0", "MXFP4")
    peers = {
        "bf16": [Side("llama.cpp", "BF16", "plain"), Side("kt-kernel", "BF16")],
        "w8": [Side("llama.cpp", "Q8_0", "repacked"), Side("llama.cpp", "Q8_0", "plain")],
        "w4": [Side("llama.cpp", kind, layout) for kind in four for layout in ("repacked", "plain")]
        + [Side("kt-kernel", "Q4_K")] * k
        + [Side("kt-kernel", "RAWINT4")],
        "w2": ([Side("llama.cpp", "Q2_K", "repacked"), Side("llama.cpp", "Q2_K", "plain")] if k else []),
        "mxfp4": [Side("llama.cpp", "MXFP4", "repacked"), Side("llama.cpp", "MXFP4", "plain")],
        "nvfp4": [Side("llama.cpp", "NVFP4", "repacked"), Side("llama.cpp", "NVFP4", "plain")],
    }
    return {v: [Side("moepack", v), *peers[v]] for v in VERSIONS if v in versions}


def routing(tokens: int, experts: int, top_k: int) -> tuple[list[list[int]], int]:
    """Distinct experts for every token, and the step from one pass's to the next one's. One token goes round in order,
    so that no expert comes again before all others."""
    if tokens == 1:
        return [list(range(top_k))], top_k
    from benchmarks.kernels.layers import routed

    return routed(tokens, experts, top_k).tolist(), experts


def measure(
    workers: dict[str, Worker],
    shape: tuple[str, tuple[int, int, int, int]],
    versions: Sequence[str],
    group_size: int,
    tokens: Sequence[int],
    seconds: float,
    scratch: Path,
    threads: int,
    pool: int = CACHES,
) -> list[dict[str, Any]]:
    """Rows of one shape, a side and a number of tokens each; a side that cannot be measured says why.

    Args:
        workers: the sides' processes, by who; a peer that is not there is left out.
        shape: its name; hidden, intermediate, experts, top_k.
        versions: moepack's, of which those that something stands beside are measured.
        group_size: moepack's.
        tokens: of a pass.
        seconds: that the rounds of one group and number of tokens may take, about.
        scratch: a directory for what sides hand one another.
        threads: the workers'.
        pool: bytes of experts that passes walk through, at the least.
    """
    name, (hidden, inner, experts, top_k) = shape
    rows: list[dict[str, Any]] = []
    for version, sides in groups(hidden, inner, versions).items():
        shared = {"shape": name, "threads": threads, "beside": version}
        opened: dict[Side, dict[str, float]] = {}
        for side in sides:
            if side.who in workers:
                try:
                    opened[side] = _open(workers, side, shape[1], group_size, scratch, pool)
                except PeerError as error:
                    rows.append({**shared, "side": side.name, "not measured": str(error)})
        ours = sides[0]
        for count in tokens:
            if ours not in opened:
                break
            index, step = routing(count, experts, top_k)
            runs: dict[Any, Callable[..., list[float]]]
            runs = {s: _timer(workers[s.who], "run_layer", s, index, step) for s in opened}
            runs["read"] = _timer(workers["moepack"], "read_layer", ours, index, step)
            got, failed = rounds(runs, count, seconds)
            for side in [s for s in opened if s in failed]:
                rows.append({**shared, "side": side.name, "tokens": count, "not measured": failed[side]})
                del opened[side]
            if "read" in got:
                used = len({e for row in index for e in row})
                rows += _rows({**shared, "tokens": count}, ours, opened, used, got)
        for side in opened:
            with suppress(PeerError):  # of a process that has died since
                workers[side.who].call("close_layer", key=side.name)
    return rows


def _rows(
    shared: dict[str, Any], ours: Side, opened: dict[Side, dict[str, float]], used: int, got: dict[Any, float]
) -> list[dict[str, Any]]:
    """Of so many experts in use, a row a side from the seconds of each and of reading moepack's bytes."""
    rows = []
    rate = used * opened[ours]["bytes"] / got["read"] if ours in opened else 0.0
    best = min((got[s] for s in opened if s.who == "llama.cpp"), default=None)
    for side, facts in opened.items():
        size = used * facts["bytes"]
        row = {**shared, "side": side.name, "bits/weight": facts["bits"], "ms": 1e3 * got[side]}
        row["GB/s"] = size / got[side] / 1e9
        if rate:
            row |= {"floor ms": 1e3 * size / rate, "over floor": got[side] * rate / size}
        if side is ours and best is not None:
            row["llama.cpp's best over ours"] = best / got[ours]
        rows.append(row)
    return rows


def _open(
    workers: dict[str, Worker], side: Side, shape: tuple[int, int, int, int], group_size: int, scratch: Path, pool: int
) -> Any:
    hidden, inner, experts, top_k = shape
    worker = workers[side.who]
    if side.who == "moepack":
        return worker.call(
            "open_layer",
            key=side.name,
            version=side.encoding,
            group_size=group_size,
            sizes=[hidden, inner, experts],
            pool=pool,
        )
    sizes = [hidden, inner, top_k, experts]
    if side.who == "llama.cpp":
        repacked = side.layout == "repacked"
        return worker.call(
            "open_layer", key=side.name, encoding=side.encoding, sizes=sizes, pool=pool, repacked=repacked
        )
    more: dict[str, Any] = {}
    if side.encoding in TYPES and side.encoding != "BF16":
        if "llama.cpp" not in workers:
            raise PeerError("llama.cpp, which quantises these weights, is not there")
        more["file"] = str(scratch / "expert")
        more["parts"] = workers["llama.cpp"].call(
            "dump_expert", encoding=side.encoding, hidden=hidden, inner=inner, path=more["file"]
        )
    return worker.call("open_layer", key=side.name, encoding=side.encoding, sizes=sizes, pool=pool, **more)


def _timer(worker: Worker, what: str, side: Side, index: list[list[int]], step: int) -> Callable[..., list[float]]:
    def run(first: int, passes: int, warm: int) -> list[float]:
        times: list[float] = worker.call(
            what, key=side.name, index=index, step=step, first=first, passes=passes, warm=warm
        )
        return times

    return run


def rounds(
    runs: dict[Any, Callable[..., list[float]]], tokens: int, seconds: float
) -> tuple[dict[Any, float], dict[Any, str]]:
    """The lower quartile of a pass's times on each side, and why the others failed; sides take turns.

    Before its turn's timed passes a side makes others, which wake its threads: they slept while it waited. With many
    tokens these are part of the time that a pass takes anyway, and are left out but for the first turn.
    """
    passes, warm = (20, 5) if tokens == 1 else (4, 1) if tokens < 64 else (1, 0)
    times: dict[Any, list[float]] = {side: [] for side in runs}
    failed: dict[Any, str] = {}
    first = 0
    began = time.monotonic()
    turns = 0
    while turns < 3 or (time.monotonic() - began < seconds and turns < 15):
        spent = time.monotonic()
        for side, run in runs.items():
            if side in failed:
                continue
            try:
                times[side] += run(first=first, passes=passes, warm=1 if warm == 0 and turns == 0 else warm)
            except PeerError as error:
                failed[side] = str(error)
        first = first + passes + warm
        turns = turns + 1
        if turns >= 2 and time.monotonic() - spent > seconds:
            break
    return {side: lower_quartile(t) for side, t in times.items() if side not in failed}, failed
