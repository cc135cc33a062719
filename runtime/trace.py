"""Traces of serving: one line of JSON a step, written while serving.

The first line describes the model: {"format": "moepack-trace", "version": 2, "policy", "versions": [name, ...],
"layers": [{"index", "experts"}, ...]}. Every other line is a step, a `Record`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from moepack.pack.errors import InputError

FORMAT = {"format": "moepack-trace", "version": 2}


@dataclass(frozen=True, slots=True)
class Record:
    """One step. `bytes_moved`, `refusals` and `waits` are sums since serving began."""

    step: int  # the step's number, from 1
    time: float  # seconds from the start of serving to the step's end
    active: list[list[int]]  # [layers][experts], numbers of the active versions, -1 for an absent expert
    counts: list[list[int]]  # [layers][experts], how often the router chose each
    updates: int  # promotions that had not begun at the step's end
    evictions: int  # demotions that had not begun then
    in_flight: int  # copies in flight then
    bytes_moved: int  # stored bytes copied
    reserved_bytes: int  # bytes reserved in the budget then
    refusals: int  # promotions put off for want of room
    waits: int  # times that a forward pass waited for a copy


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read: the model, and its steps in order."""

    policy: str
    layers: list[dict[str, int]]
    versions: list[str]
    records: list[Record]


class TraceWriter:
    """Writes a trace, each step's line at once.

    After an OSError, which names it, the file holds whole lines, or is not there.
    """

    def __init__(self, path: Path, policy: str, layers: Sequence[tuple[int, int]], versions: Sequence[str]) -> None:
        """Open the file and write its first line. `layers` are pairs (index in the model, number of experts)."""
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._size = 0  # bytes of whole lines
        described = [{"index": index, "experts": experts} for index, experts in layers]
        self._line({**FORMAT, "policy": policy, "layers": described, "versions": list(versions)})

    def write(self, record: Record) -> None:
        """Add the line of a step."""
        self._line(asdict(record))

    def _line(self, value: dict[str, object]) -> None:
        left = line = (json.dumps(value, separators=(",", ":")) + "\n").encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # a device cannot be cut
                self._file.truncate(self._size)
            self._file.close()
            if not self._size and self._path.is_file():
                self._path.unlink()
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_trace(path: Path | str) -> Trace:
    """Read a trace back.

    Raises:
        InputError: when the file cannot be read, or a line is not of a trace; the message says which.
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
