"""Prometheus metrics, in a registry of the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moepack.server.batching.engine import Engine
from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.batching.scheduler import Scheduler
from moepack.shared.memory import peaks

from .vllm_metrics import VllmNames

if TYPE_CHECKING:
    from moepack.runtime.served_model import ServedModel

FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
EACH = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics(Collector):
    """Counters that are updated as requests end, and gauges that are read on each request for /metrics."""

    def __init__(self, model: ServedModel, name: str, engine: Engine, scheduler: Scheduler) -> None:
        self._serving, self._engine, self._scheduler = model.moepack, engine, scheduler
        self._registry = own = CollectorRegistry()
        self.requests = Counter("moepack_requests", "Requests by path and status.", ("path", "status"), registry=own)
        self._first = Histogram(
            "moepack_time_to_first_token_seconds", "From a request's arrival.", buckets=FIRST, registry=own
        )
        self._each = Histogram(
            "moepack_time_per_output_token_seconds", "After the first, a sequence's mean.", buckets=EACH, registry=own
        )
        own.register(self)
        self._vllm = VllmNames(name, scheduler, own)

    def ended(self, job: Job, event: JobEvent) -> None:
        """Record the times of a finished sequence, by its last event."""
        generated = event.generated
        self._vllm.ended(job, event)
        if generated:
            self._first.observe(job.first - job.submitted)
        if generated > 1:
            self._each.observe((job.last - job.first) / (generated - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read on each request for /metrics; prometheus_client calls this."""
        serving, scheduler = self._serving, self._scheduler
        for name, what in _WHAT.items():
            value = getattr(scheduler.totals, name.removeprefix("sequences_"))
            yield CounterMetricFamily(f"moepack_{name}", what, value=value)
        for name, value in serving.counters().items():
            name = "transitions_cancelled" if name == "cancelled" else name
            yield CounterMetricFamily(f"moepack_{name}", f"{name.replace('_', ' ')} since loading.", value=value)
        gauges = {
            "running": ("Running sequences.", scheduler.running),
            "waiting": ("Waiting sequences.", scheduler.waiting),
            "decoding_most": ("Sequences that decode at a time, in turns; 0 for all.", scheduler.turns.most or 0),
            "kv_bytes": ("Bytes of live KV caches.", self._engine.cache_bytes),
            "prefix_bytes": ("Bytes of kept prompts; in a budget a part of kv_bytes.", self._engine.kept_bytes),
            "resident_bytes": ("Bytes reserved on the device.", serving.resident_bytes()),
            "resident_bytes_peak": ("The most bytes reserved so far.", serving.resident_bytes_peak),
            "budget_bytes": ("The most bytes allowed; 0 without a budget.", serving.budget_bytes or 0),
            "memory_limit_bytes": ("The process's limit; 0 without one.", getattr(serving.limit, "bytes", 0)),
        }
        named = {"process_bytes_peak": "process", "group_bytes_peak": "process's control group"}
        gauges |= {n: (f"The most bytes that the {named[n]} has taken.", v) for n, v in peaks().items() if v}
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"moepack_{name}", what, value=value)
        experts = GaugeMetricFamily("moepack_experts", "Experts by placement.", labels=["placement"])
        for kind, count in sorted(serving.by_version.items()):
            experts.add_metric([kind], count)
        yield experts


_WHAT = {
    "steps": "Forward passes.",
    "prompt_tokens": "Prompt tokens read.",
    "generated_tokens": "Tokens generated.",
    "sequences_finished": "Finished sequences.",
    "sequences_cancelled": "Sequences whose client left.",
    "sequences_failed": "Sequences that could not be answered.",
    "sequences_not_finite": "Sequences that could not be answered because logits were NaN or infinite.",
    "sequences_preempted": "Times a sequence gave up its cache for others.",
    "prefix_queries": "Tokens of prompts looked for among kept ones.",
    "prefix_hits": "Tokens of prompts taken from kept ones.",
}
