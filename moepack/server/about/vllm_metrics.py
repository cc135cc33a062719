"""Metrics under the names that vLLM gives them, for dashboards and balancers made for it. They repeat our own."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.batching.scheduler import Scheduler
from moepack.server.options import UNLIMITED

LABELS = ("engine", "model_name")
# vLLM's own bounds, in seconds and in tokens.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = tuple(n * 10**e for e in range(6) for n in (1, 2, 5))


class VllmNames(Collector):
    """Counts of one model's requests, and numbers of its scheduler."""

    def __init__(self, model: str, scheduler: Scheduler, registry: CollectorRegistry) -> None:
        self._values = ("0", model)
        self._scheduler = scheduler
        self._registry = registry
        registry.register(self)
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.", FIRST)
        self._each = self._histogram("request_time_per_output_token_seconds", "Mean time of a later token.", EACH)
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of a whole request.", WHOLE)
        self._read = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._made = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._ended = Counter(
            "vllm:request_success", "Finished sequences.", (*LABELS, "finished_reason"), registry=registry
        )

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"vllm:{name}", what, LABELS, buckets=buckets, registry=self._registry)
        return made.labels(*self._values)

    def ended(self, job: Job, event: JobEvent) -> None:
        """Record a finished sequence by its last event."""
        self._ended.labels(*self._values, event.finish).inc()
        self._whole.observe(time.monotonic() - job.submitted)
        self._read.observe(len(job.prompt))
        self._made.observe(event.generated)
        if event.generated:
            self._first.observe(job.first - job.submitted)
        if event.generated > 1:
            self._each.observe((job.last - job.first) / (event.generated - 1))

    def collect(self) -> Iterator[Metric]:
        """Yield the scheduler's present state; prometheus_client calls this."""
        scheduler, totals = self._scheduler, self._scheduler.totals
        limit = scheduler.limits.kv_tokens
        gauges = {
            "num_requests_running": ("Running sequences.", float(scheduler.running)),
            "num_requests_waiting": ("Waiting sequences.", float(scheduler.waiting)),
        }
        if limit < UNLIMITED:  # otherwise experts make room, and there is nothing that could be full
            gauges["kv_cache_usage_perc"] = ("Share of --max-kv-tokens.", scheduler.cached_tokens / limit)
        for name, (what, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        counts = {
            "prompt_tokens": (
                "Prompt tokens read, or taken from kept prompts.",
                totals.prompt_tokens + totals.prefix_hits,
            ),
            "generation_tokens": ("Tokens generated.", totals.generated_tokens),
            "num_preemptions": ("Times a sequence gave up its cache.", totals.preempted),
            "prefix_cache_queries": ("Tokens of prompts looked for among kept ones.", totals.prefix_queries),
            "prefix_cache_hits": ("Tokens of prompts taken from kept ones.", totals.prefix_hits),
        }
        for name, (what, count) in counts.items():
            counter = CounterMetricFamily(f"vllm:{name}", what, labels=LABELS)
            counter.add_metric(self._values, count)
            yield counter
