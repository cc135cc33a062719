"""Traces of serving: one line of JSON a step, written while serving and read back for replays.

The first line describes the model: {"format": "moepack-trace", "version": 2, "policy", "versions": [name, ...],
"layers": [{"index", "experts"}, ...]}. Every other line is a step; `Record` says what it holds. Decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from moepack.pack.errors import InputError
from moepack.runtime.policies.contract import Interval, LivePolicy, Wanted

FORMAT = {"format": "moepack-trace", "version": 2}


@dataclass(frozen=True, slots=True)
class Record:
    """One step.

    Attributes:
        step: its number, from 1.
        time: seconds since serving began, at its end.
        active: [layers][experts], numbers of the versions that were active, -1 for an expert that was absent.
        counts: [layers][experts], how often the router chose each.
        updates, evictions, in_flight: lengths of the queues at its end, and copies in flight.
        bytes_moved: stored bytes copied since serving began.
        reserved_bytes: of the budget, at its end.
        refusals: promotions put off for want of room since serving began.
        waits: times that a forward pass waited for a copy since serving began.
    """

    step: int
    time: float
    active: list[list[int]]
    counts: list[list[int]]
    updates: int
    evictions: int
    in_flight: int
    bytes_moved: int
    reserved_bytes: int
    refusals: int
    waits: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read: what the model is, and its steps in order."""

    policy: str
    layers: list[dict[str, int]]
    versions: list[str]
    records: list[Record]


class TraceWriter:
    """Writes a trace; each step's line goes out at once."""

    def __init__(self, path: Path, policy: str, layers: Sequence[tuple[int, int]], versions: Sequence[str]) -> None:
        """`layers` are pairs (index in the model, experts)."""
        self._file: IO[str] = path.open("w", buffering=1)
        described = [{"index": index, "experts": experts} for index, experts in layers]
        self._line({**FORMAT, "policy": policy, "layers": described, "versions": list(versions)})

    def write(self, record: Record) -> None:
        """Add a step."""
        self._line(asdict(record))

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_trace(path: Path | str) -> Trace:
    """Read a trace back.

    Raises:
        InputError: naming the line that is not one of a trace.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    number = 1
    try:
        head = json.loads(lines[0])
        if {k: head[k] for k in FORMAT} != FORMAT:
            raise ValueError
        records = []
        for line in lines[1:]:
            number += 1
            row = json.loads(line)
            records.append(Record(**{f.name: row[f.name] for f in fields(Record)}))
            experts = [len(counts) for counts in records[-1].counts]
            if experts != [layer["experts"] for layer in head["layers"]]:
                raise ValueError
        return Trace(head["policy"], head["layers"], head["versions"], records)
    except (ValueError, KeyError, TypeError, IndexError):
        raise InputError(f"{path}: line {number} is not a line of a trace") from None


def replay(trace: Trace, policy: LivePolicy, capacity: Sequence[int]) -> Iterator[tuple[Record, Wanted | None]]:
    """What a policy wants after each step of a trace."""
    for record in trace.records:
        counts = [np.array(row, np.int64) for row in record.counts]
        yield record, policy.decide(Interval(record.time, capacity, counts))
