"""Prometheus metrics, in a registry of the server's own.

Requests, tokens and times have a second name, the one that vLLM gives them, for dashboards and balancers made for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moepack.server.batching.engine import Engine
from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.batching.scheduler import Scheduler
from moepack.server.options import UNLIMITED
from moepack.shared.memory import peaks

if TYPE_CHECKING:
    from moepack.runtime.served_model import ServedModel

LABELS = ("engine", "model_name")  # of every name of vLLM
FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
EACH = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
# vLLM's own bounds, in seconds and in tokens.
VLLM_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
VLLM_EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = tuple(n * 10**e for e in range(6) for n in (1, 2, 5))


class Metrics(Collector):
    """Counters that are updated as requests end, and gauges that are read on each request for /metrics."""

    def __init__(self, model: ServedModel, name: str, engine: Engine, scheduler: Scheduler) -> None:
        self._serving, self._engine, self._scheduler = model.moepack, engine, scheduler
        self._labels = ("0", name)
        self._registry = own = CollectorRegistry()
        self.requests = Counter("moepack_requests", "Requests by path and status.", ("path", "status"), registry=own)
        self._finished = Counter(
            "vllm:request_success", "Finished sequences.", (*LABELS, "finished_reason"), registry=own
        )
        first = self._histogram("time_to_first_token_seconds", "From a request's arrival.", VLLM_FIRST)
        each = self._histogram("request_time_per_output_token_seconds", "Mean time of a later token.", VLLM_EACH)
        self._first = (
            first,
            Histogram("moepack_time_to_first_token_seconds", "From a request's arrival.", buckets=FIRST, registry=own),
        )
        self._each = (
            each,
            Histogram(
                "moepack_time_per_output_token_seconds",
                "After the first, a sequence's mean.",
                buckets=EACH,
                registry=own,
            ),
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of a whole request.", WHOLE)
        self._read = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._made = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        own.register(self)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", what, LABELS, buckets=buckets, registry=self._registry)
        return made.labels(*self._labels)

    def ended(self, job: Job, event: JobEvent) -> None:
        """Record a finished sequence by its last event."""
        generated = event.generated
        self._finished.labels(*self._labels, event.finish).inc()
        self._whole.observe(time.monotonic() - job.submitted)
        self._read.observe(len(job.prompt))
        self._made.observe(generated)
        if generated:
            for histogram in self._first:
                histogram.observe(job.first - job.submitted)
        if generated > 1:
            for histogram in self._each:
                histogram.observe((job.last - job.first) / (generated - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read on each request for /metrics; prometheus_client calls this."""
        serving, scheduler, totals = self._serving, self._scheduler, self._scheduler.totals
        for name, what in _WHAT.items():
            yield CounterMetricFamily(f"moepack_{name}", what, value=getattr(totals, name.removeprefix("sequences_")))
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
        limit = scheduler.limits.kv_tokens
        vllm: list[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, float]] = [
            (GaugeMetricFamily, "num_requests_running", "Running sequences.", scheduler.running),
            (GaugeMetricFamily, "num_requests_waiting", "Waiting sequences.", scheduler.waiting),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens read, or taken from kept prompts.",
             totals.prompt_tokens + totals.prefix_hits),
            (CounterMetricFamily, "generation_tokens", _WHAT["generated_tokens"], totals.generated_tokens),
            (CounterMetricFamily, "num_preemptions", _WHAT["sequences_preempted"], totals.preempted),
            (CounterMetricFamily, "prefix_cache_queries", _WHAT["prefix_queries"], totals.prefix_queries),
            (CounterMetricFamily, "prefix_cache_hits", _WHAT["prefix_hits"], totals.prefix_hits),
        ]  # fmt: skip
        if limit < UNLIMITED:  # otherwise experts make room, and there is nothing that could be full
            share = scheduler.cached_tokens / limit
            vllm.append((GaugeMetricFamily, "kv_cache_usage_perc", "Share of --max-kv-tokens.", share))
        for family, name, what, number in vllm:
            made = family(f"vllm:{name}", what, labels=LABELS)
            made.add_metric(self._labels, number)
            yield made


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
