"""A loaded bundle for users: `model.moepack`, with its state and counters."""

from __future__ import annotations

import atexit
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from moepack.pack.reader import Bundle
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.fixed import Fixed, MeasuredNeeds
from moepack.runtime.planning.outputs import Outputs
from moepack.runtime.policies.contract import Versions
from moepack.runtime.residency.kv_reserve import KvBudget
from moepack.runtime.residency.manager import ResidencyManager
from moepack.runtime.residency.on_demand import MovedBytes
from moepack.runtime.residency.reserves import EvictionReserve, FreeReserve
from moepack.runtime.step.context import RoutingCounter
from moepack.runtime.step.counters import Counters

from .forward_wrapper import ForwardWrapper
from .process_limit import ProcessLimit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moepack.runtime.kv.forms import Bits

COUNTERS: dict[str, Callable[[ResidencyManager], int]] = {
    "promotions": lambda m: m.residency.counts.promotions,
    "demotions": lambda m: m.residency.counts.demotions,
    "forward_waits": lambda m: m.waits,
    "cancelled": lambda m: m.residency.counts.cancelled,
    "transition_failures": lambda m: m.transitions.failures,
    "refusals": lambda m: m.transitions.refusals,
    "bytes_moved": lambda m: m.moved,
    "worker_failures": lambda m: m.worker.failures,
    "host_bytes": lambda m: m.tier.bytes if m.tier is not None else 0,
}
UNCOUNTED_GRADIENTS = "gradients keep activations that a budget does not count: load without a budget to train"


class Serving:
    """The state of serving: the bundle, the policy, the bytes in use, and counters since loading."""

    def __init__(
        self,
        model: PreTrainedModel,
        bundle: Bundle,
        policy: str,
        layers: list[LayerExperts],
        fixed: Fixed,
        manager: ResidencyManager | None,
        tracker: BudgetTracker | None,
        replaced: dict[str, int],
        kv: Sequence[Bits] = (),
    ) -> None:
        """Wrap the model's forward passes.

        Args:
            fixed: the bytes outside the experts; without a budget, those of dense tensors alone.
            tracker: the budget, if there is one.
            replaced: how many modules of each class the kernels replace, without linear maps.
            kv: the bits of each layer's cache; empty for plain ones.
        """
        self.bundle = bundle
        self.policy = policy
        self.layers = layers
        self.manager = manager
        self.fixed = fixed
        self.tracker = tracker
        self.replaced = replaced
        self.kv = kv
        self.budget_bytes = None if tracker is None else tracker.budget
        self.limit: ProcessLimit | None = None  # the process's memory limit, where one was given
        self.caches: KvBudget | None = None  # keeps the KV caches inside the budget
        self._wrapper = ForwardWrapper(model, layers, manager, kv)
        self._routed: Counters | None = None
        if manager is not None:
            _live.add(manager)
        weakref.finalize(model, _let_go, list(layers), manager)

    def watch_caches(self, model: PreTrainedModel, needs: MeasuredNeeds) -> None:
        """Keep the caches of the model's forward passes inside the budget, from now on."""
        assert self.tracker is not None
        reserve = FreeReserve(self.tracker) if self.manager is None else EvictionReserve(self.manager)
        for layer in self.layers:
            layer.no_gradients = layer.no_gradients or UNCOUNTED_GRADIENTS
        routed = sum(layer.of.layer.experts for layer in self.layers)
        outputs = Outputs.of(model, routed, needs.workload.all_logits)
        self.caches = self._wrapper.caches = KvBudget(model.config, needs, reserve, self.tracker.budget, outputs)
        if self.manager is not None:
            self.manager.each_round = self.caches.settle

    def count_routing(self, counter: RoutingCounter) -> None:
        """Add a counter that sees every layer's routing from now on."""
        self._wrapper.watchers = (*self._wrapper.watchers, counter)

    def routed(self) -> list[list[int]]:
        """Return how often routers chose each expert since the first call, [layers][experts]: padding included."""
        if self._routed is None:
            experts = [layer.of.layer.experts for layer in self.layers]
            device = self.layers[0].of.device if self.layers else torch.device("cpu")
            self._routed = Counters(experts, (), device)
            self.count_routing(self._routed)
        return [row.tolist() for row in self._routed.take()[0]]

    def trace(self, path: str | Path) -> None:
        """Write every step from now on into a file (trace.py)."""
        self._wrapper.trace_to(path, self.policy, self.bundle, self.resident_bytes)

    def close(self) -> None:
        """End the trace and stop changing versions. Later forward passes raise InputError."""
        try:
            self._wrapper.close()
        finally:
            if self.manager is not None:
                self.manager.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickles and copies, as the model does."""
        self._wrapper.refuse_copies()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Describe the policy, the bytes in use, the budget and how many experts each version has."""
        experts = ", ".join(f"{count:,} {name}" for name, count in self.by_version.items())
        room = "without a budget" if self.budget_bytes is None else f"of a budget of {self.budget_bytes:,}"
        used = f"{self.resident_bytes():,} bytes {room}"
        return f"<moepack {self.bundle.path}: policy {self.policy}; {used}; experts: {experts}>"

    @property
    def versions(self) -> Versions:
        """The active version of every expert, by layer."""
        return tuple(tuple(str(h) for h in layer.current.handles) for layer in self.layers)

    @property
    def by_version(self) -> dict[str, int]:
        """The number of experts that have each version active; the most frequent version first."""
        return dict(Counter(name for row in self.versions for name in row).most_common())

    def resident_bytes(self) -> int:
        """Return the device memory in use: in a budget the reserved bytes, otherwise those of weights."""
        if self.tracker is not None:
            return self.tracker.reserved
        return self.fixed.total + sum(layer.resident_bytes for layer in self.layers)

    @property
    def resident_bytes_peak(self) -> int:
        """The largest `resident_bytes` since loading began."""
        return self.tracker.peak if self.tracker is not None else self.resident_bytes()

    def counters(self) -> dict[str, int]:
        """Return counts since loading: transitions, waits, bytes moved, and bytes of weights that the host tier read.

        Under a policy that changes nothing all are zero, except `kv_waits`, the passes that waited for room, and
        `graph_failures`, the decode steps that could not be captured in a CUDA graph.
        """
        manager = self.manager
        kv_waits = self.caches.waits if self.caches is not None else 0
        counts = {name: 0 if manager is None else count(manager) for name, count in COUNTERS.items()}
        moved = MovedBytes() if manager is None else manager.on_demand.moved
        failures = 0 if self._wrapper.graphs is None else self._wrapper.graphs.failures
        return {**counts, "kv_waits": kv_waits, "graph_failures": failures, **asdict(moved)}

    def health(self) -> dict[str, object]:
        """Describe whether versions still change, for JSON.

        The keys are `ok`, `worker`, `error`, `failed_rounds` and `last_round_seconds_ago`. `worker` is "none" where
        nothing changes, else "running", "failing" (its rounds raise `error`, and are tried again), "stuck" (a round
        has not ended for long) or "stopped".
        """
        if self.manager is None:
            return {"ok": True, "worker": "none", "error": None, "failed_rounds": 0, "last_round_seconds_ago": 0.0}
        return self.manager.worker.health()


_live: weakref.WeakSet[ResidencyManager] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Wait for the threads of models that were not closed: one that the interpreter ends inside torch aborts all."""
    for manager in list(_live):
        manager.close()


def _let_go(layers: list[LayerExperts], manager: ResidencyManager | None) -> None:
    """Free the experts of a model that was deleted, once the last step has ended."""
    if manager is not None:
        manager.abandon()
    for layer in layers:
        layer.let_go()
