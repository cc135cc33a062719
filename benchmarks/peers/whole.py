"""A whole model on both sides: tokens a second of decoding and of a prompt. Alternates; judges nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.common import Row, lower_quartile
from benchmarks.limited.make import bundle_of, gguf_of
from benchmarks.limited.shapes import Shape

from .worker import PeerError, Worker

PROMPT = 512


@dataclass(frozen=True, slots=True)
class Match:
    """What is compared with what.

    Attributes:
        version: of moepack's experts.
        dense: moepack's versions of the matrices beside experts, a side each.
        mix: of llama.cpp's file.
    """

    version: str
    dense: tuple[str, ...]
    mix: str


MATCHES = (Match("w4", ("w8", "w4"), "Q4_K_M"), Match("w2", ("w8", "w4"), "Q2_K"))


def measure(
    workers: dict[str, Worker], shape: Shape, match: Match, steps: int, seconds: float, threads: int
) -> list[Row]:
    """Rows of one match, a side each; a side that cannot be measured says why.

    Args:
        workers: the sides' processes.
        shape: of the generated model, which was made.
        match: what is compared.
        steps: tokens that are decoded after each prompt.
        seconds: that the rounds may take, about.
        threads: the workers'.
    """
    rows: list[Row] = []
    opened: dict[str, tuple[Worker, bool]] = {}
    asked: list[tuple[str, Worker, Row]] = []
    for dense in match.dense:
        order = {"bundle": str(bundle_of(shape)), "version": match.version, "dense": dense}
        asked.append((f"moepack {match.version}, dense {dense}", workers["moepack"], order))
    if "llama.cpp" in workers:
        for layout in ("repacked", "plain"):
            more = {"path": str(gguf_of(shape, match.mix)), "repacked": layout == "repacked"}
            asked.append((f"llama.cpp {match.mix} {layout}", workers["llama.cpp"], more))
    try:
        for name, worker, arguments in asked:
            try:
                worker.call("open_model", key=name, **arguments)
                opened[name] = worker, name.startswith("moepack")
            except PeerError as error:
                rows.append({"threads": threads, "side": name, "not measured": str(error)})
        if any(ours for _, ours in opened.values()):
            rows += _rates(opened, steps, seconds, threads)
    finally:
        for name, (worker, _) in opened.items():
            with suppress(PeerError):
                worker.call("close_model", key=name)
    return rows


def _rates(opened: dict[str, tuple[Worker, bool]], steps: int, seconds: float, threads: int) -> list[Row]:
    """Rows of the sides that are open. One that fails meanwhile is a row that says why, and leaves `opened`."""
    rows: list[Row] = []
    prompt = [(37 * i + 11) % 4000 for i in range(PROMPT)]
    parts = [prompt, *([token] for token in prompt[:steps])]
    prefill: dict[str, list[float]] = {name: [] for name in opened}
    decode: dict[str, list[float]] = {name: [] for name in opened}
    began = time.monotonic()
    turns = 0
    while turns < 3 or (time.monotonic() - began < seconds and turns < 16):
        for name, (worker, _) in list(opened.items()):
            try:
                first, *others = worker.call("read", key=name, parts=parts, afresh=True)
            except PeerError as error:
                rows.append({"threads": threads, "side": name, "not measured": str(error)})
                del opened[name]
                continue
            if turns:
                prefill[name].append(first)
                decode[name] += others
        turns += 1
    rates = {
        name: {
            "decode tokens/s": 1 / lower_quartile(decode[name]),
            "prefill tokens/s": PROMPT / lower_quartile(prefill[name]),
        }
        for name in opened
    }
    for name, (_, ours) in opened.items():
        rows.append({"threads": threads, "side": name, **rates[name]})
        theirs = [rates[other] for other, (_, mine) in opened.items() if not mine]
        if ours and theirs:
            for what in rates[name]:
                best = max(rate[what] for rate in theirs)
                rows[-1][f"{what.split()[0]} over llama.cpp's best"] = rates[name][what] / best
    return rows
