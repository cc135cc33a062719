"""A bundle served by a policy that changes placements: pools, steps, the worker that carries transitions out.

Here the parts meet: the plan, the policy, residency and its transitions, the device. A forward pass is a `step`, and
calls `demand` before each layer's experts; under a policy that does not block neither waits for a copy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError, MoepackError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.runtime.devices.contract import Device
from moepack.runtime.devices.cpu import CpuDevice, CpuMemory
from moepack.runtime.devices.migration import FLOOR
from moepack.runtime.experts.counters import Counters
from moepack.runtime.experts.handles import NOTHING, Handle, LayerExperts, Snapshot
from moepack.runtime.experts.prediction import Prediction
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.capacity import base_bytes
from moepack.runtime.planning.plan import Plan
from moepack.runtime.policies.contract import Event, Interval, Key, LayerReached, PrefillEnded, SequenceBegan, Wanted
from moepack.runtime.policies.placements import Where
from moepack.runtime.policies.registry import Policy
from moepack.runtime.store.files import BackingStore

from .demand import Demand
from .pools import Pool
from .residency import Residency
from .steps import NO_PROMPT, Prompt, Step
from .tables import DeviceTables
from .transitions import Transitions
from .worker import Worker


@dataclass(frozen=True, slots=True)
class Seen:
    """What a layer that is reached is told beside its routing: as of `LayerReached`."""

    is_prompt: bool = False
    important: npt.NDArray[np.int64] | None = None
    predicted: npt.NDArray[np.int64] | None = None
    predicted_gates: npt.NDArray[np.float64] | None = None


NOTHING_SEEN = Seen()
UNHEARD = 64  # steps whose counts wait for the worker: of more, those of the oldest are forgotten


def _device(
    device: torch.device, store: BackingStore, plan: Plan, buffers: int, on_event: Callable[[], None], host: int | None
) -> Device:
    if device.type == "cpu":
        return CpuDevice(plan.staging, on_event)
    from moepack.runtime.devices.cuda import open_cuda

    staging, last = plan.staging // buffers, len(plan.ladder) - plan.keep
    on_device = [v for v, placement in enumerate(plan.ladder) if placement.where is Where.DEVICE]
    coded = [v for v in on_device if not _version(plan, v).is_lossless]
    largest = max([staging, *(row[v] for row in plan.sizes for v in coded)])
    served = [_version(plan, v).name for v in on_device if v < last]
    return open_cuda(store, served, device, largest, staging, buffers, on_event, host)


def _second_buffer(plan: Plan) -> tuple[Plan, int]:
    """A plan with two staging buffers where there is room: an extent is then copied while the last one is decoded."""
    two = replace(plan, fixed=plan.fixed + plan.staging, staging=2 * plan.staging)
    least = two.fixed + base_bytes(plan.sizes, plan.experts) + plan.reserve
    return (two, 2) if least <= plan.budget else (plan, 1)


def _version(plan: Plan, placement: int) -> Version:
    version = plan.ladder[placement].version
    assert version is not None
    return version


def _stored_bytes(bundle: Bundle, plan: Plan, key: Key, version: int) -> int:
    return bundle.layer_file(_version(plan, version).name, key[0]).extent_size(key[1])


def _name(bundle: Bundle, plan: Plan, key: Key, version: int) -> str:
    return f"{bundle.path}: layer {bundle.layers[key[0]].index}, expert {key[1]}, version {plan.ladder[version]}"


class Live:
    """Serves a bundle while its experts' versions change. Every method may be called from any thread.

    Attributes:
        plan: what fits.
        tracker: the budget.
        host: host memory of the placements that are executed there.
        prediction: what foretells the next layer's routing, where the policy asks (passes.py gives it).
        loading: what loads on demand, under a policy that blocks; else nobody asks it.
        worker: the thread that carries transitions on.
        each_round: called by it in every round.
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
            host_memory: bytes that experts on the host may take, and that may be pinned for a GPU; without it, what the
                system has left.

        Raises:
            InputError: on a device that cannot change versions.
            BundleError: when a low version is damaged.
        """
        if len(set(devices)) > 1 or devices[0].type not in ("cpu", "cuda"):
            raise InputError(f"policy {policy}: versions change on one CPU or one CUDA device, not on {devices}")
        self._can_shrink = devices[0].type == "cpu"
        plan, buffers = (plan, 1) if self._can_shrink else _second_buffer(plan)
        plan = plan if self._can_shrink else plan.divided()
        self.policy, wanted = plan.policy(policy)
        self._blocking = self.policy.needs.layers
        if not (self._can_shrink or wanted):  # all experts are at the base at first: there must be a block for each
            plan = replace(plan, keep=True, most=None).divided()
            self.policy, wanted = plan.policy(policy)
        self.plan, self._rate = plan, policy.options.bytes_per_second
        self._makes_up = policy.options.makes_up_for_absent
        self.store = BackingStore(bundle, checks_again=not self._blocking)
        self._process = os.getpid()
        self.worker = Worker(self.round, self._shut, self.policy.needs.interval)
        self.device = _device(devices[0], self.store, plan, buffers, self.worker.wake, host_memory)
        self._host_device: CpuDevice | None = None
        try:
            self._serve(bundle, devices, wanted, host_memory)
        except BaseException:
            self._end_streams()
            raise
        if not self._blocking:
            self.worker.start()

    def _serve(self, bundle: Bundle, devices: Sequence[torch.device], wanted: Wanted, host_memory: int | None) -> None:
        """Make the pools, load, and let passes read."""
        plan = self.plan
        if not self._can_shrink and any(p.where is Where.HOST for p in plan.ladder):
            self._host_device = CpuDevice(plan.staging, self.worker.wake)
        self.tracker = BudgetTracker(plan.budget, plan.fixed)
        self.host = BudgetTracker(1 << 62 if host_memory is None else host_memory, 0)
        versions = bundle.manifest.versions
        self.layers = [LayerExperts(x, versions, d) for x, d in zip(bundle.layers, devices, strict=True)]
        for layer in self.layers:
            layer.of.makes_up_for_absent = self._makes_up
        self._epoch = 0
        self._tables = DeviceTables(plan.experts, devices[0], self.device.mark) if devices[0].type != "cpu" else None
        pools = self._pools()
        self.residency = Residency(
            plan.experts, plan.base, lambda p, v: pools.get((v, plan.blocks[p][v])), self._fetch, self._make,
            self._publish, self.device.mark, plan.keep, self._snapshot,
        )  # fmt: skip
        on_device = [pool for pool in pools.values() if pool.budget_bytes]
        self.transitions = Transitions(self.residency, self.tracker, on_device, plan.reserve, kept=plan.demand)
        named = partial(_name, bundle, plan) if plan.ladder[plan.base].where is Where.ABSENT else None
        self.loading = Demand(self.residency, self.transitions, partial(_stored_bytes, bundle, plan), named)
        self.prediction: Prediction | None = None
        self._load(wanted)
        self.device.limit(self._rate, 0 if self._blocking else FLOOR)
        self.each_round: Callable[[], None] = lambda: None
        gates = plan.experts if self.policy.needs.gates else ()
        self._counts: list[npt.NDArray[np.int64]] = [np.zeros(n, np.int64) for n in plan.experts]
        self._gates: list[npt.NDArray[np.float64]] = [np.zeros(n) for n in gates]
        self._told: deque[SequenceBegan] = deque()
        self._ended: deque[Step] = deque(maxlen=UNHEARD)
        self._spare_counters: list[Counters] = []
        self._decided_at, self._capacity = 0.0, [-1]
        self._capacity_beside = functools.lru_cache(4)(plan.capacity)
        self._one_at_a_time = threading.RLock()
        self._mine = threading.local()
        for position, layer in enumerate(self.layers):
            layer.reading = partial(self._reading, position)

    def _pools(self) -> dict[tuple[int, int], Pool]:
        """One for each size of each placement that takes memory.

        Memory that can be given back is not taken before it is used, so that a pool may be as large as it will ever
        need to be. Other memory is divided once and for all as the plan says, with base blocks for demotions beside.
        """
        plan, pools = self.plan, {}
        for number, placement in enumerate(plan.ladder):
            on_host = placement.where is Where.HOST
            tracker, returnable = (self.host, True) if on_host else (self.tracker, self._can_shrink)
            for size in sorted({row[number] for row in plan.blocks} - {0}):
                mine = [p for p, row in enumerate(plan.blocks) if row[number] == size]
                blocks = sum(plan.experts[p] for p in mine)
                if returnable:
                    blocks = min(blocks, tracker.budget // size)
                elif number < plan.base or not plan.keep:
                    assert plan.most is not None
                    spare = plan.spare_blocks if number == plan.base else 0
                    blocks = sum(plan.most[p][number] for p in mine) + spare
                memory = CpuMemory(size * blocks) if on_host else self.device.memory(size * blocks)
                pools[number, size] = Pool(f"{placement}/{size}", size, blocks, tracker, memory, on_host)
        return pools

    def _load(self, wanted: Wanted) -> None:
        first = {} if self.plan.keep else wanted
        keys = [(p, e) for p, n in enumerate(self.plan.experts) for e in range(n)]
        number = {key: first.get(key, self.plan.base) for key in keys}
        stored = [(key, self.plan.ladder[number[key]].version) for key in keys]
        with self.store.reading_ahead((version.name, *key) for key, version in stored if version is not None):
            for p, e in keys:
                self.layers[p].publish(e, self._place((p, e), number[p, e]))
        self.transitions.want(wanted, self.policy.worth)
        self.device.serve()

    def _place(self, key: Key, version: int) -> Any:
        try:
            return self.residency.place(key, version)
        except (MoepackError, OSError) as error:
            if version == self.plan.base:
                raise
            self.transitions.note_failure(key, version, error)
            return self.residency.place(key, self.plan.base)

    def _fetch(self, key: Key, version: int, target: Tensor) -> Any:
        position, expert = key
        described = _version(self.plan, version)
        stored = partial(self.store.stored, described.name, position, expert)
        on_host = self.plan.ladder[version].where is Where.HOST
        device = self._host_device if on_host and self._host_device is not None else self.device
        return device.fetch(stored, target, self.layers[position].of.layer, described)

    def _make(self, key: Key, version: int, tensor: Tensor | None) -> Handle:
        if tensor is None:
            return NOTHING
        layer, placement = self.layers[key[0]], self.plan.ladder[version]
        described = _version(self.plan, version)
        return layer.of.over(described, tensor[: resident_size(layer.of.layer.matrices, described)], placement.where)

    def _publish(self, key: Key, made: Handle) -> None:
        self.layers[key[0]].publish(key[1], made)
        self._epoch += 1

    def _snapshot(self) -> tuple[int, tuple[Snapshot, ...]]:
        """What a step that begins now sees: its epoch and every layer's handles; the residency's lock is held."""
        return self._epoch, tuple(layer.current for layer in self.layers)

    # --- steps

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Around all of a pass, its waiting for room too: under a policy that blocks, one runs at a time."""
        return self._one_at_a_time if self._blocking else contextlib.nullcontext()

    @contextlib.contextmanager
    def step(self, prompt: Prompt = NO_PROMPT, mask: Tensor | None = None) -> Iterator[Step]:
        """Around a forward pass: it reads one snapshot, and blocks drain behind it, however it ends.

        Inside a step of the same thread it is that one. Under a policy that blocks, one runs at a time.

        Args:
            prompt: what it reads of prompts; only a policy that needs to know is told.
            mask: int64 [tokens] on the device, 0 for padding; without it all tokens are text.
        """
        running: Step | None = getattr(self._mine, "step", None)
        if running is not None:
            yield running
            return
        with self.turn():
            if prompt.begins and self.policy.needs.prompts:
                self._told.append(SequenceBegan(time.monotonic(), self.capacity(), prompt.tokens))
                self._soon()
            step = self._mine.step = self._begin(prompt, mask)
            try:
                yield step
            finally:
                self._mine.step = None
                self._end(step)

    def _begin(self, prompt: Prompt, mask: Tensor | None) -> Step:
        number, (epoch, snapshots) = self.residency.begin()
        try:
            table = None
            if self._tables is not None:
                table = self._tables.take(epoch, snapshots)
                snapshots = tuple(s.over(row) for s, row in zip(snapshots, table.words, strict=True))
            counters = self._counters()
            counters.mask = mask
            return Step(number, snapshots, counters, prompt.tokens > 0, table)
        except BaseException:
            self.residency.end(number)
            raise

    def _end(self, step: Step) -> None:
        if step.table is not None and self._tables is not None:
            self._tables.give(step.table)
        self.residency.end(step.number)
        step.counters.send()
        self._ended.append(step)
        self._soon()

    def _soon(self) -> None:
        """Let what was noted be heard: by the worker, or at once where there is none."""
        if self._blocking:
            self._hear()
        else:
            self.worker.wake()

    def _counters(self) -> Counters:
        try:
            return self._spare_counters.pop()
        except IndexError:
            return Counters(self.plan.experts, self.policy.needs.gates, self.layers[0].of.device)

    @contextlib.contextmanager
    def _reading(self, position: int) -> Iterator[Snapshot]:
        """What a layer's experts read: a pass that began outside any step is one for each of its layers."""
        with self.step() as step:
            yield self.layers[position].current if self._blocking else step.snapshots[position]

    @property
    def waits(self) -> int:
        """How often a forward pass waited for a copy."""
        return self.loading.waits

    @property
    def waited(self) -> float:
        """Seconds it did."""
        return self.loading.waited

    def demand(self, position: int, counters: Counters, seen: Seen = NOTHING_SEEN) -> None:
        """Before a layer's experts run: under a policy that blocks, load what it wants and wait.

        Raises:
            BundleError, InputError: when an expert that has no resident version cannot be had.
        """
        if not self._blocking:
            return
        placed, coming = self.loading.where(position)
        event = LayerReached(
            time.monotonic(), self.capacity(), position, counters.layer(position), counters.gates(position),
            seen.is_prompt, seen.important, seen.predicted, seen.predicted_gates, placed, coming,
        )  # fmt: skip
        wanted = self.policy.decide(event)
        if wanted is not None:
            self.loading.reach(position, wanted)

    def capacity(self) -> list[int]:
        """Where pools cannot shrink, the KV reserve has what they leave, and the experts keep theirs."""
        kv = self.transitions.kv_bytes + self.transitions.kv_asked
        return self._capacity_beside(kv if self._can_shrink else 0)

    def _hear(self) -> None:
        """Let the policy know which prompts have begun, and add up the steps that have ended, in their order."""
        while self._told:
            self._decide(self._told.popleft())
        for _ in range(len(self._ended)):  # not those that end meanwhile: there may be no end of them
            try:
                step = self._ended.popleft()
            except IndexError:  # the oldest were dropped meanwhile
                break
            if not step.counters.arrived():
                self._ended.appendleft(step)
                break
            if step.counters.used:
                self._add(step)
            step.counters.clear()
            if len(self._spare_counters) < UNHEARD:
                self._spare_counters.append(step.counters)

    def _add(self, step: Step) -> None:
        counts, gates = step.counters.take()
        for chosen, new in zip(self._counts, counts, strict=True):
            chosen += new
        for weighed, more in zip(self._gates, gates, strict=True):
            weighed += more
        if step.is_prompt and self.policy.needs.prompts:
            mine = [row.copy() for row in counts], [row.copy() for row in gates]
            self._decide(PrefillEnded(time.monotonic(), self.capacity(), *mine))

    def _decide(self, event: Event) -> None:
        wanted = self.policy.decide(event)
        if wanted is not None and not self._blocking:
            self.transitions.want(wanted, self.policy.worth)

    # --- the worker

    def round(self, now: float) -> None:
        """One round: let the policy see what was counted, then carry transitions on, whatever becomes of the former."""
        try:
            self.each_round()
            self._hear()
            capacity = self.capacity()
            if now - self._decided_at >= self.policy.needs.interval or capacity != self._capacity:
                self._decided_at, self._capacity = now, capacity
                counts, gates = self._counts, self._gates
                self._counts = [np.zeros_like(row) for row in counts]
                self._gates = [np.zeros_like(row) for row in gates]
                self._decide(Interval(now, capacity, counts, gates))
        finally:
            self.transitions.tick()

    def grow_kv(self, size: int) -> bool:
        """Ask for `size` bytes more for the KV cache; whether they are there already (transitions.py)."""
        granted = self.transitions.grow_kv(size)
        self.worker.wake()
        return granted

    def close(self) -> None:
        """Stop changing versions, and give threads and files back. May be called twice."""
        self.abandon(wait=True)
        self.worker.join()

    def abandon(self, wait: bool = False) -> None:
        """As `close`, and waits for nothing: a finalizer may run on any thread, the worker's own included.

        In a forked child neither does anything: the threads are the parent's, and locks may be held for ever.
        """
        if os.getpid() == self._process and not self.worker.stop():
            self._shut(wait)

    def _end_streams(self, wait: bool = True) -> None:
        for device in (self.device, self._host_device):
            if device is not None:
                device.close(wait)
        self.store.close()

    def _shut(self, wait: bool = True) -> None:
        """End the streams and close the files; once no step reads them, forget what keeps the experts' memory."""
        self._end_streams(wait)
        self.each_round = lambda: None
        self.residency.let_go([layer.let_go for layer in self.layers])
