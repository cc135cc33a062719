"""Handle tables on a GPU, with maps of where experts are: one for each running step, whose kernels read one epoch.

A step takes a table that no other step reads. If the table holds another epoch, the step copies the handles into the
table from pinned memory, on the step's stream and before its kernels. Steps do not share tables, so a later step
changes nothing for running ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.devices.contract import Completion
from moepack.runtime.experts.handles import ROWS, Snapshot
from moepack.runtime.kernels.current import current


@dataclass(slots=True, eq=False)
class HandleTable:
    """All layers at an epoch: `words`, int64 [layers, ROWS, most experts + 1]. `read` ends with the last use."""

    words: Tensor
    epoch: int
    snapshots: tuple[Snapshot, ...] = ()  # of the epoch, which read `words`
    read: Completion | None = None


class DeviceTables:
    """The tables of one device. Every method may be called from any thread."""

    def __init__(self, experts: Sequence[int], device: torch.device, mark: Callable[[], Completion]) -> None:
        """Prepare tables for layers of `experts` experts; `mark` makes an event that ends with the issued compute."""
        self._shape = (len(experts), ROWS, max(experts) + 1)
        self._device = device
        self._mark = mark
        self._free: list[HandleTable] = []
        self._lock = threading.Lock()
        self._host: tuple[int, Tensor] | None = None

    def take(self, epoch: int, snapshots: Sequence[Snapshot]) -> HandleTable:
        """Return a table with an epoch's handles for one step; they are copied on the current stream if need be.

        Raises InputError inside the capture of a CUDA graph: its replays would always read the same handles.
        """
        with current(self._device), self._lock:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "a step under a policy that changes versions is not captured in a CUDA graph from outside: use a "
                    "static policy, or the runtime's own graphs"
                )
            ended = [t for t in self._free if t.read is None or t.read.done()]
            table = next((t for t in ended if t.epoch == epoch), ended[0] if ended else None)
            if table is None:
                with torch.inference_mode(False):
                    table = HandleTable(torch.zeros(self._shape, dtype=torch.int64, device=self._device), -1)
            else:
                self._free.remove(table)
            if table.epoch != epoch:
                table.words.copy_(self._pinned(epoch, snapshots), non_blocking=True)
                table.epoch = epoch
                table.snapshots = tuple(s.over(row) for s, row in zip(snapshots, table.words, strict=True))
            return table

    def _pinned(self, epoch: int, snapshots: Sequence[Snapshot]) -> Tensor:
        """Return an epoch's handles in pinned memory, never rewritten because a pending copy may read it."""
        if self._host is None or self._host[0] != epoch:
            words = np.zeros(self._shape, np.int64)
            for row, snapshot in zip(words, snapshots, strict=True):
                row[:, : len(snapshot.table) + 1] = snapshot.words
            made = torch.from_numpy(words)
            self._host = epoch, made.pin_memory() if self._device.type == "cuda" else made
        return self._host[1]

    def give(self, table: HandleTable) -> None:
        """Take back a step's table, for reuse once the step's kernels have ended."""
        table.read = self._mark()
        with self._lock:
            self._free.append(table)
