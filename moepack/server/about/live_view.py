"""The JSON behind the page: placements of experts, their use, and the budget's bytes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from moepack.server.batching.engine import Engine
from moepack.server.batching.scheduler import Scheduler
from moepack.shared.memory import peaks
from moepack.shared.palette import PARTS, colour

if TYPE_CHECKING:
    from moepack.runtime.served_model import ServedModel


class LiveView:
    """Make the page's JSON, at most once every `FRESH` seconds for all open pages."""

    FRESH = 0.25  # seconds for which one answer is reused

    def __init__(self, model: ServedModel, name: str, engine: Engine, scheduler: Scheduler) -> None:
        self._serving, self._name, self._engine, self._scheduler = model.moepack, name, engine, scheduler
        self._serving.routed()  # counts from now on
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._made: tuple[float, dict[str, object]] = (-1.0, {})

    def __call__(self) -> dict[str, object]:
        """The page's state, ready for JSON."""
        with self._lock:
            at, made = self._made
            if time.monotonic() - at > self.FRESH:
                self._made = time.monotonic(), (made := self._make())
            return made

    def _make(self) -> dict[str, object]:
        serving, scheduler = self._serving, self._scheduler
        versions = [v.name for v in serving.bundle.manifest.versions]
        placed = serving.versions
        kinds = sorted({kind for row in placed for kind in row}, key=lambda k: _rank(k, versions))
        return {
            "model": self._name,
            "policy": str(serving.policy),
            "seconds": time.monotonic() - self._began,
            "packed": self._engine.is_packed,
            "moves": serving.manager is not None,
            "kinds": kinds,
            "colours": {**PARTS, **{kind: colour(kind) for kind in kinds}},
            "layers": [layer.of.layer.index for layer in serving.layers],
            "placed": [[kinds.index(kind) for kind in row] for row in placed],
            "heat": serving.routed(),
            "budget": self._budget(),
            "counters": serving.counters(),
            "health": serving.health(),
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "totals": asdict(scheduler.totals),
            "prefixes": {
                "bytes": self._engine.kept_bytes,
                "most": self._engine.most_kept,
                "why_off": self._engine.why_not_kept,
            },
        }

    def _budget(self) -> dict[str, object]:
        serving = self._serving
        fixed = ("dense", "activations", "staging", "window", "kv")
        parts = Counter({name: getattr(serving.fixed, name) for name in fixed})
        if serving.tracker is None:
            for layer in serving.layers:
                for handle in layer.current.handles:
                    parts[str(handle)] += handle.resident_bytes
        else:
            for name, size in serving.tracker.named().items():
                if name != "fixed":
                    parts[name.partition("/")[0]] += size
        return {
            "total": serving.budget_bytes,
            "reserved": serving.resident_bytes(),
            "peak": serving.resident_bytes_peak,
            **peaks(),
            "kv_used": self._engine.cache_bytes,
            "parts": {name: size for name, size in parts.items() if size},
        }


def _rank(kind: str, versions: list[str]) -> tuple[int, str]:
    """Sort key of placements: in the manifest's order of versions, and each version on the device before elsewhere."""
    at = next((n for n, version in enumerate(versions) if kind.startswith(version)), len(versions))
    return 2 * at + (kind not in versions), kind
