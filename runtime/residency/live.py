"""A bundle served by a policy that changes versions: pools, steps, the worker that carries transitions out.

Here the parts meet: the plan, the policy, residency and its transitions, the device. A forward pass is a `step`, and
calls `demand` before each layer's experts; under a policy that does not block neither waits for a copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError, MoepackError
from moepack.pack.reader import Bundle
from moepack.runtime.devices.contract import Device
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.experts.handles import Handle, LayerExperts, Snapshot
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.capacity import base_bytes
from moepack.runtime.planning.plan import Plan
from moepack.runtime.policies.contract import Key, Observation, Setting, Wanted
from moepack.runtime.policies.registry import Policy
from moepack.runtime.store.files import BackingStore

from .demand import load_now
from .pools import Pool
from .residency import Residency
from .steps import Step
from .transitions import Transitions

log = logging.getLogger("moepack.runtime")


def _device(
    device: torch.device, store: BackingStore, plan: Plan, buffers: int, on_event: Callable[[], None], host: int | None
) -> Device:
    if device.type == "cpu":
        return CpuDevice(plan.staging, on_event)
    from moepack.runtime.devices.cuda import open_cuda

    staging = plan.staging // buffers
    largest = max(staging, max(row[plan.low] for row in plan.sizes))
    if not plan.versions[plan.high].is_lossless:
        largest = max(largest, max(row[plan.high] for row in plan.sizes))
    served = [plan.versions[v].name for v in ((plan.high,) if plan.keep else (plan.high, plan.low))]
    return open_cuda(store, served, device, largest, staging, buffers, on_event, host)


def _second_buffer(plan: Plan) -> tuple[Plan, int]:
    """A plan with two staging buffers where there is room: an extent is then copied while the last one is decoded."""
    two = replace(plan, fixed=plan.fixed + plan.staging, staging=2 * plan.staging)
    least = two.fixed + base_bytes(plan.sizes, plan.experts, plan.low) + plan.reserve
    return (two, 2) if least <= plan.budget else (plan, 1)


class Live:
    """Serves a bundle while its experts' versions change. Every method may be called from any thread.

    Attributes:
        plan: what fits.
        tracker: the budget.
        waits: how often a forward pass waited for a copy.
        waited: seconds it did.
        each_round: called by the worker in every round.
    """

    def __init__(
        self,
        bundle: Bundle,
        policy: Policy,
        plan: Plan,
        devices: Sequence[torch.device],
        host_memory: int | None = None,
    ) -> None:
        """Load what the policy wants before any token, the others' low versions, and start serving.

        Args:
            bundle: the bundle.
            policy: a live one.
            plan: of `make_plan`.
            devices: the layers'.
            host_memory: bytes that may be pinned for a GPU; without it, what the system has left.

        Raises:
            InputError: on a device that cannot change versions.
            BundleError: when a low version is damaged.
        """
        if len(set(devices)) > 1 or devices[0].type not in ("cpu", "cuda"):
            raise InputError(f"policy {policy}: versions change on one CPU or one CUDA device, not on {devices}")
        self._can_shrink = devices[0].type == "cpu"
        plan, buffers = (plan, 1) if self._can_shrink else _second_buffer(plan)
        assert policy.entry.make is not None
        self.policy = policy.entry.make(Setting(plan.experts, plan.high, plan.traffic, plan.gains), policy.options)
        nothing = [[0] * n for n in plan.experts]
        wanted = self.policy.observe(Observation(time.monotonic(), nothing, plan.room())) or {}
        if not (self._can_shrink or wanted):
            plan = replace(plan, keep=True)  # all experts are low at first, so that there must be a block for each
        self.plan, self._policy_text = plan, str(policy)
        self.store = BackingStore(bundle)
        self._wake = threading.Event()
        self.device = _device(devices[0], self.store, plan, buffers, self._wake.set, host_memory)
        self.tracker = BudgetTracker(plan.budget, plan.fixed)
        versions = bundle.manifest.versions
        self.layers = [LayerExperts(x, versions, d) for x, d in zip(bundle.layers, devices, strict=True)]
        pools = self._pools()
        self.residency = Residency(
            plan.experts, plan.low, lambda p, v: pools[v, plan.sizes[p][v]], self._fetch, self._make, self._publish,
            self.device.mark, plan.keep, lambda: tuple(layer.current for layer in self.layers),
        )  # fmt: skip
        self.transitions = Transitions(self.residency, self.tracker, list(pools.values()), plan.reserve)
        try:
            self._load(wanted)
        except BaseException:
            self.device.close()
            raise
        self.device.limit(None if self.policy.blocking else policy.options.bytes_per_second)
        self.waits, self.waited = 0, 0.0
        self.each_round: Callable[[], None] = lambda: None
        self._counts_lock = threading.Lock()
        self._counts = [np.zeros(n, np.int64) for n in plan.experts]
        self._seen_at, self._seen_room = 0.0, [-1]
        self._one_at_a_time = threading.RLock()
        self._mine = threading.local()
        for position, layer in enumerate(self.layers):
            layer.reading = partial(self._reading, position)
        self._closing = False
        self._patience = self.policy.patience
        self._worker = threading.Thread(target=self._run, name="moepack-transitions", daemon=True)
        if not self.policy.blocking:
            self._worker.start()

    def _pools(self) -> dict[tuple[int, int], Pool]:
        """One for each size of each version.

        Memory that can be given back is not taken before it is used, so that a pool may be as large as it will ever
        need to be. Other memory is divided once and for all, as it will be when what fits is high: that many high
        blocks, and low ones for the others and for demotions.
        """
        plan, pools = self.plan, {}
        room = plan.room()
        for version in (plan.high, plan.low):
            for size in sorted({row[version] for row in plan.sizes}):
                mine = [p for p, row in enumerate(plan.sizes) if row[version] == size]
                blocks = sum(plan.experts[p] for p in mine)
                if version == plan.high:
                    most = sum(room[p] for p in mine)
                    blocks = min(blocks, (plan.budget - plan.fixed) // size) if self._can_shrink else most
                elif not (self._can_shrink or plan.keep):
                    blocks += plan.spare_blocks - sum(room[p] for p in mine)
                memory = self.device.memory(size * blocks)
                pools[version, size] = Pool(f"{plan.versions[version].name}/{size}", size, blocks, self.tracker, memory)
        return pools

    def _load(self, wanted: Wanted) -> None:
        first = {} if self.plan.keep else wanted
        keys = [(p, e) for p, n in enumerate(self.plan.experts) for e in range(n)]
        version = {key: first.get(key, self.plan.low) for key in keys}
        with self.store.reading_ahead((self.plan.versions[version[key]].name, *key) for key in keys):
            for p, e in keys:
                self.layers[p].publish(e, self._place((p, e), version[p, e]))
        self.transitions.want(wanted, self.policy.worth)
        self.device.serve()

    def _place(self, key: Key, version: int) -> Any:
        try:
            return self.residency.place(key, version)
        except (MoepackError, OSError) as error:
            if version == self.plan.low:
                raise
            self.transitions.note_failure(key, version, error)
            return self.residency.place(key, self.plan.low)

    def _fetch(self, key: Key, version: int, target: Tensor) -> Any:
        position, expert = key
        described = self.plan.versions[version]
        stored = self.store.stored(described.name, position, expert)
        return self.device.fetch(stored, target, self.layers[position].of.layer, described)

    def _make(self, key: Key, version: int, tensor: Tensor) -> Handle:
        layer, described = self.layers[key[0]], self.plan.versions[version]
        return layer.of.over(described, tensor[: resident_size(layer.of.layer.matrices, described)])

    def _publish(self, key: Key, made: Handle) -> None:
        self.layers[key[0]].publish(key[1], made)

    # --- steps

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Around all of a pass, its waiting for room too: under a policy that blocks, one runs at a time."""
        return self._one_at_a_time if self.policy.blocking else contextlib.nullcontext()

    @contextlib.contextmanager
    def step(self) -> Iterator[Step]:
        """Around a forward pass: it reads one snapshot, and blocks drain behind it, however it ends.

        Inside a step of the same thread it is that one. Under a policy that blocks, one runs at a time.
        """
        running: Step | None = getattr(self._mine, "step", None)
        if running is not None:
            yield running
            return
        with self.turn():
            number, snapshots = self.residency.begin()
            counts = [np.zeros(n, np.int64) for n in self.plan.experts]
            step = self._mine.step = Step(number, snapshots, counts)
            try:
                yield step
            finally:
                self._mine.step = None
                self.residency.end(number)
                self._add(counts)

    def _add(self, counts: list[npt.NDArray[np.int64]]) -> None:
        if not self.policy.blocking:
            with self._counts_lock:
                for mine, new in zip(self._counts, counts, strict=True):
                    mine += new
            self._wake.set()

    @contextlib.contextmanager
    def _reading(self, position: int) -> Iterator[Snapshot]:
        """What a layer's experts read: a pass that began outside any step is one for each of its layers."""
        with self.step() as step:
            yield self.layers[position].current if self.policy.blocking else step.snapshots[position]

    def demand(self, position: int, counts: npt.NDArray[np.int64]) -> None:
        """Before a layer's experts run: under a policy that blocks, load what it wants and wait."""
        if not self.policy.blocking:
            return
        seen = [[0] * n for n in self.plan.experts]
        seen[position] = counts.tolist()
        wanted = self.policy.observe(Observation(time.monotonic(), seen, self._room()))
        began = time.perf_counter()
        loads = load_now(self.residency, self.transitions, wanted or {})
        if loads:
            self.waits += loads
            self.waited += time.perf_counter() - began

    def _room(self) -> list[int]:
        """Where pools cannot shrink, the KV reserve has what they leave, and high blocks stay as many."""
        kv = self.transitions.kv_bytes + self.transitions.kv_asked
        return self.plan.room(kv if self._can_shrink else 0)

    # --- the worker

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(max(self._patience, 0.01))
            self._wake.clear()
            try:
                self.round(time.monotonic())
            except Exception:  # serving goes on with the versions that are there
                log.exception("transitions have stopped")
                return
        self._shut()

    def round(self, now: float) -> None:
        """One round: let the policy see what was counted, then carry transitions on."""
        self.each_round()
        room = self._room()
        if now - self._seen_at >= self._patience or room != self._seen_room:
            self._seen_at, self._seen_room = now, room
            with self._counts_lock:
                counts, self._counts = self._counts, [np.zeros(n, np.int64) for n in self.plan.experts]
            wanted = self.policy.observe(Observation(now, [c.tolist() for c in counts], room))
            if wanted is not None:
                self.transitions.want(wanted, self.policy.worth)
        self.transitions.tick()

    def grow_kv(self, size: int) -> bool:
        """Ask for `size` bytes more for the KV cache; whether they are there already (transitions.py)."""
        granted = self.transitions.grow_kv(size)
        self._wake.set()
        return granted

    def close(self) -> None:
        """Stop changing versions, and give threads and files back. May be called twice."""
        self.abandon()
        if self._worker.is_alive() and threading.current_thread() is not self._worker:
            self._worker.join()

    def abandon(self) -> None:
        """As `close`, and waits for nothing: a finalizer may run on any thread, the worker's own included."""
        self._closing = True
        self._wake.set()
        if not self._worker.is_alive():
            self._shut()

    def _shut(self) -> None:
        """End the streams and close the files; break the circles that would keep the experts' memory."""
        self.device.close()
        self.store.close()
        self.each_round = lambda: None
        for layer in self.layers:
            layer.let_go()
        self.residency.let_go()
