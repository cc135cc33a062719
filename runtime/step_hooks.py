"""Steps, by hooks on the model: one forward pass each; router counts in it; and the trace of what happened.

Tells a live policy's runtime (live.py) when steps begin and end, and what the router chose. Decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.reader import Bundle
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.residency.live import Live

from .trace import Record, TraceWriter

Counts = list[npt.NDArray[np.int64]]


class StepHooks:
    """Watches a model's forward passes. A pass that another thread begins meanwhile is a step of its own."""

    def __init__(self, model: Any, layers: Sequence[LayerExperts], live: Live | None) -> None:
        self._layers, self._live = tuple(layers), live
        self._running = threading.local()
        self._trace: TraceWriter | None = None
        self._resident: Callable[[], int] = lambda: 0
        self._written, self._began = 0, time.monotonic()
        self._lock = threading.Lock()
        for position, layer in enumerate(self._layers):
            layer.observer = partial(self._saw, position)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        running = self._running
        depth = running.depth = getattr(running, "depth", 0) + 1
        if depth == 1:  # a forward inside another belongs to its step
            running.counts = [np.zeros(layer.layer.experts, np.int64) for layer in self._layers]
            running.step = self._live.begin() if self._live is not None else 0

    def _end(self, *_: Any) -> None:
        running = self._running
        if not getattr(running, "depth", 0):
            return  # refused before its step began
        running.depth -= 1
        if running.depth:
            return
        if self._live is not None:
            self._live.end(running.step, running.counts)
        if self._trace is not None:
            self._write(running.counts)

    def _saw(self, position: int, top_k_index: Tensor) -> None:
        if not getattr(self._running, "depth", 0):
            return  # an experts module that was called by itself
        experts = self._layers[position].layer.experts
        counts = torch.bincount(top_k_index.reshape(-1), minlength=experts)[:experts].cpu().numpy()
        self._running.counts[position] += counts
        if self._live is not None:
            self._live.demand(position, counts)

    def trace_to(self, path: str | Path, policy: str, bundle: Bundle, resident: Callable[[], int]) -> None:
        """Write every step from now on into a file; `resident` gives the bytes that are taken."""
        self.close()
        layers = [(layer.index, layer.experts) for layer in bundle.layers]
        self._resident = resident
        self._trace = TraceWriter(Path(path), policy, layers, [v.name for v in bundle.manifest.versions])

    def _write(self, counts: Counts) -> None:
        live, now = self._live, time.monotonic()
        queues = live.transitions.queues() if live is not None else None
        with self._lock:
            if self._trace is None:
                return
            self._written += 1
            record = Record(
                self._written,
                now - self._began,
                [[layer.number(h.version) for h in layer.handles] for layer in self._layers],
                [c.tolist() for c in counts],
                queues.updates if queues else 0,
                queues.evictions if queues else 0,
                queues.in_flight if queues else 0,
                live.device.moved if live is not None else 0,
                self._resident(),
                live.transitions.refusals if live is not None else 0,
                live.waits if live is not None else 0,
            )
            self._trace.write(record)

    def close(self) -> None:
        """End the trace."""
        with self._lock:
            if self._trace is not None:
                self._trace.close()
            self._trace = None
