"""Experts in pinned host memory for many tokens on a GPU: a layer brings each to the device once.

Kernels for many tokens read an expert's weights once for each block of its slots. In pinned memory each time is over
the bus: 2,048 tokens of 128 experts, of which each has 8, read them 4.5 times. So the chosen ones are first copied to
memory on the device, a part of the layer's experts at a time, and kernels find them there by a table of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moepack.runtime.kernels.forms import VERSION_BITS, handle

if TYPE_CHECKING:
    from .handles import Handle, ServedLayer

NONE = (1 << VERSION_BITS) - 1  # a word of no version: kernels pass over its expert


class Gpu(Protocol):
    """The GPU operations that a stage needs: its computing stream, and events on that stream."""

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Issue work on the stream that computes."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Let that stream wait for an event; the host does not."""

    def record(self) -> torch.cuda.Event:
        """Return an event that occurs when the work issued so far has ended."""


class Stage:
    """Memory on the device for experts of one layer. Layers, and steps of several threads, take turns in it."""

    def __init__(self, gpu: Gpu, memory: Tensor, block: int) -> None:
        """Use uint8 `memory` on the device, of whole blocks of `block` bytes, each for any expert in pinned memory."""
        self._gpu = gpu
        self._rows = memory.view(torch.int32).view(-1, block // 4)
        self._lock = threading.Lock()
        self._last: torch.cuda.Event | None = None  # the end of the work on it
        with torch.inference_mode(False):
            words = [row.data_ptr() for row in self._rows]
            self._words = torch.tensor(words, dtype=torch.int64, device=memory.device)

    @contextlib.contextmanager
    def turn(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield its rows, int32 [experts, words], and their addresses, int64 [experts]; earlier work there comes first.

        The host does not wait.
        """
        gpu = self._gpu
        with self._lock, gpu.computing():
            if self._last is not None:
                gpu.wait(self._last)
            try:
                yield self._rows, self._words
            finally:
                self._last = gpu.record()


class StagedLayer:
    """The experts of one layer in pinned memory, and the stage to which passes of many tokens bring them."""

    def __init__(self, stage: Stage, of: ServedLayer, pinned: Sequence[Handle]) -> None:
        """Know where the experts are: `pinned` are handles of all experts, [experts], at one version."""
        self._stage = stage
        version = pinned[0].version
        assert version is not None
        words = [handle(h.extent.data_ptr(), of.numbers[version.name]) for h in pinned]
        sizes = [-(-h.extent.numel() // 16) * 4 for h in pinned]  # blocks are whole pages
        with torch.inference_mode(False):
            self._words = torch.tensor(words, dtype=torch.int64, device=of.device)
            self._sizes = torch.tensor(sizes, dtype=torch.int64, device=of.device)
        self._most = max(sizes)

    @contextlib.contextmanager
    def tables(self, handles: Tensor, counts: Tensor) -> Iterator[Iterator[Tensor]]:
        """Bring the layer's experts that have slots, and yield handle tables, which together have every expert once.

        A part of the experts is in the stage until the next table is asked for. Nothing waits for the device.

        Args:
            handles: int64 [experts], the pass's handle table.
            counts: int32 [experts], the slots of each expert.
        """
        with self._stage.turn() as (rows, places):
            yield self._parts(handles, counts, rows, places)

    def _parts(self, handles: Tensor, counts: Tensor, rows: Tensor, places: Tensor) -> Iterator[Tensor]:
        from moepack.runtime.kernels import exponent_triton

        there = handles == self._words
        sizes = there * self._sizes
        sources = torch.where(there, (handles & ~NONE) + 1, 0)
        rest = torch.where(there, NONE, handles)
        for begin in range(0, len(handles), len(rows)):
            part = slice(begin, begin + len(rows))
            exponent_triton.bring(None, counts[part], sources[part], sizes[part], rows, self._most)
            table = rest if begin == 0 else torch.full_like(handles, NONE)
            brought = places[: len(table[part])] | (handles[part] & NONE)
            table[part] = torch.where(there[part], brought, table[part])
            yield table
