"""One bundle and its texts, served under one policy after another."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import moepack
from benchmarks.common import Row, least_budget
from benchmarks.decoding import Decoded, Text, decode
from moepack.pack.reader import open_bundle
from moepack.pack.spec import PAGE, align

if TYPE_CHECKING:
    from moepack.runtime.served_model import ServedModel

PLENTY = 1 << 40  # bytes: a budget that nothing comes near


class Session:
    """One bundle and its texts; loads it under one policy after another."""

    def __init__(self, bundle: Path, texts: Sequence[Text], prompt: int) -> None:
        self.bundle = bundle
        self.texts = texts
        self.prompt = prompt
        self.length = texts[0].ids.shape[1]
        self._opened = open_bundle(bundle)
        self.experts = max(layer.experts for layer in self._opened.layers)

    def bytes_at(self, version: str) -> int:
        """Of all experts at a version."""
        return sum(self._layers(version))

    def coded_bytes(self) -> int:
        """Of all experts' lossless weights, entropy-coded."""
        total = 0
        for position, layer in enumerate(self._opened.layers):
            file = self._opened.layer_file("bf16", position)
            total += sum(align(file.extent_size(expert), PAGE) for expert in range(layer.experts))
        return total

    def layer_bytes(self, version: str) -> int:
        """Of the largest layer's."""
        return max(self._layers(version))

    def _layers(self, version: str) -> list[int]:
        described = self._opened.manifest.version(version)
        return [align(described.resident_size(x.matrices), PAGE) * x.experts for x in self._opened.layers]

    def least(self, policy: str) -> int:
        """The smallest budget that holds a policy, which a refusal names."""
        return least_budget(lambda budget: self.load(policy, budget))

    def load(self, policy: str, budget: int = PLENTY) -> ServedModel:
        """The model, with room for one window."""
        room: Row = {"kv_tokens": self.length, "prefill_tokens": self.prompt, "all_logits": False}
        model: ServedModel = moepack.load(self.bundle, policy=policy, device_memory=budget, **room)
        return model

    def run(self, policy: str, budget: int = PLENTY, reference: Decoded | None = None) -> tuple[Decoded, Row]:
        """What a session under a policy gave, and what it counted, loading apart."""
        model = self.load(policy, budget)
        try:
            served = model.moepack
            decode(model, [Text("warm", self.texts[0].ids[:1])], self.prompt)
            before = served.counters()
            got = decode(model, self.texts, self.prompt, reference)
            counted = {name: n - before[name] for name, n in served.counters().items()}
            counted["peak"], counted["fixed"] = served.resident_bytes_peak, served.fixed.total
            return got, counted
        finally:
            model.moepack.close()
            del model
            gc.collect()

    def row(self, policy: str, got: Decoded, counted: Row, best: Decoded) -> Row:
        """One line of the table."""
        out: Row = {"policy": policy}
        out |= {text.name: got.perplexity(text.name) for text in self.texts}
        if got is not best:
            kl = got.divergence()
            out |= {"KL, mnat": 1000 * kl.value, "+-": 1000 * kl.half}
        out["TTFT ms"] = 1000 * statistics.median(got.ttft)
        out["TPOT p50 ms"] = 1000 * statistics.median(got.tpot)
        out |= {"MB copied": counted["bytes_moved"] / 1e6, "MB demand": counted.get("demand_bytes", 0) / 1e6}
        out |= {"MB ahead": counted.get("prefetch_bytes", 0) / 1e6, "waits": counted["forward_waits"]}
        return out | {"MB host": counted.get("host_bytes", 0) / 1e6, "peak MB": counted["peak"] / 1e6}
