"""A whole model on all sides: tokens a second of decoding and of prompts. Alternates; judges nothing."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.common import Row, lower_quartile
from benchmarks.limited.make import bundle_of, gguf_of
from benchmarks.limited.shapes import Shape

from .worker import PeerError, Worker

PROMPT = 512
FEW = 16  # tokens of a message that goes on with a text
DEPTH = 4000
ROOM = 4096  # tokens of a text
DEEP_TURNS, DEEP_STEPS = 4, 8  # at DEPTH


@dataclass(frozen=True, slots=True)
class Match:
    """What is compared with what.

    Attributes:
        version: of moepack's experts.
        dense: moepack's versions of the matrices beside experts, a side each.
        mix: of the file that llama.cpp and ik_llama.cpp read.
        own: ik_llama.cpp's own mix at as many bits, of another file.
    """

    version: str
    dense: tuple[str, ...]
    mix: str
    own: str


MATCHES = (Match("w4", ("w8", "w4"), "Q4_K_M", "IQ4_K"), Match("w2", ("w8", "w4"), "Q2_K", "IQ2_K"))


def make_own(worker: Worker, shape: Shape) -> None:
    """Make ik_llama.cpp's own files that are not there, of those that it shares: what weights are is all the same here.

    Raises:
        PeerError: when it cannot.
    """
    for match in MATCHES:
        own = gguf_of(shape, match.own)
        if not own.exists():
            print(f"writing {own.name}", flush=True)
            source = gguf_of(shape, match.mix)
            worker.call("quantise_file", source=str(source), out=str(own), encoding=match.own)


def measure(
    workers: Mapping[str, Worker], shape: Shape, match: Match, steps: int, seconds: float, threads: int
) -> list[Row]:
    """Rows of one match, a side each; a side that cannot be measured says why.

    Args:
        workers: the sides' processes.
        shape: of the generated model, which was made.
        match: what is compared.
        steps: tokens that are decoded after each prompt.
        seconds: that a side's rounds may take, about.
        threads: the workers'.
    """
    rows: list[Row] = []
    opened: dict[str, Worker] = {}
    asked: list[tuple[str, Worker, Row]] = []
    for dense in match.dense:
        order = {"bundle": str(bundle_of(shape)), "policy": f"static:{match.version}", "dense": dense}
        asked.append((f"moepack {match.version}, dense {dense}", workers["moepack"], order))
    for peer, worker in workers.items():
        mixes = {"moepack": (), "ik_llama.cpp": (match.mix, match.own)}.get(peer, (match.mix,))
        for mix in mixes:
            for layout in ("repacked", "plain"):
                more = {"path": str(gguf_of(shape, mix)), "repacked": layout == "repacked", "context": ROOM}
                asked.append((f"{peer} {mix} {layout}", worker, more))
    try:
        for name, worker, arguments in asked:
            try:
                worker.call("open_model", key=name, **arguments)
                opened[name] = worker
            except PeerError as error:
                rows.append({"threads": threads, "side": name, "not measured": str(error)})
        if any(_program(name) == "moepack" for name in opened):
            rows += _rates(opened, steps, seconds * len(opened), threads)
    finally:
        for name, worker in opened.items():
            with suppress(PeerError):
                worker.call("close_model", key=name)
    return rows


def _program(side: str) -> str:
    return side.partition(" ")[0]


def _rates(opened: dict[str, Worker], steps: int, seconds: float, threads: int) -> list[Row]:
    """Rows of the sides that are open. One that fails meanwhile is a row that says why, and leaves `opened`."""
    rows: list[Row] = []
    text = [(37 * i + 11) % 4000 for i in range(DEPTH)]
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in opened}  # seconds of a token, by measure

    def read(name: str, parts: list[list[int]], afresh: bool) -> list[float]:
        try:
            seconds: list[float] = opened[name].call("read", key=name, parts=parts, afresh=afresh)
            return [spent / len(part) for spent, part in zip(seconds, parts, strict=True)]
        except PeerError as error:
            rows.append({"threads": threads, "side": name, "not measured": str(error)})
            del opened[name]
            return []

    def note(name: str, what: str, found: list[float]) -> None:
        taken[name].setdefault(f"{what} tokens/s", []).extend(found)

    singles = [[token] for token in text[:steps]]
    began = time.monotonic()
    turns = 0
    while turns < 3 or (time.monotonic() - began < seconds and turns < 16):
        for name in list(opened):
            found = read(name, [text[:PROMPT], *singles, text[:FEW]], afresh=True)
            if turns and found:
                note(name, "decode", found[1:-1])
                note(name, f"prefill of {FEW}", found[-1:])
                note(name, "prefill", found[:1])
        turns += 1
    passes = [text[i : i + PROMPT] for i in range(0, DEPTH, PROMPT)]
    for name in list(opened):
        if found := read(name, passes, afresh=True):
            spent = sum(one * len(part) for one, part in zip(found, passes, strict=True))
            note(name, f"prefill to {DEPTH:,}", [spent / DEPTH])
    for turn in range(DEEP_TURNS):
        for name in list(opened):
            found = read(name, singles[:DEEP_STEPS], afresh=False)
            if turn and found:
                note(name, f"decode at {DEPTH:,}", found)
    rates = {name: {what: 1 / lower_quartile(found) for what, found in taken[name].items()} for name in opened}
    for name in opened:
        rows.append({"threads": threads, "side": name, **rates[name]})
        if _program(name) != "moepack":
            continue
        for peer in dict.fromkeys(map(_program, opened)):
            theirs = [rates[other] for other in opened if _program(other) == peer]
            for what in rates[name] if peer != "moepack" else ():
                best = max(rate[what] for rate in theirs)
                rows[-1][f"{what.removesuffix(' tokens/s')} over {peer}'s best"] = rates[name][what] / best
    return rows
