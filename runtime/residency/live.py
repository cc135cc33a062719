"""A bundle served by a policy that changes placements: pools, steps, the worker that carries transitions out.

Here the parts meet: the plan, the policy, residency and its transitions, the device. A forward pass is a `step`, and
calls `demand` before each layer's experts; under a policy that does not block neither waits for a copy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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

from moepack.pack.errors import BundleError, InputError, MoepackError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.runtime.devices import torch_cuda
from moepack.runtime.devices.contract import Device
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.devices.migration import FLOOR
from moepack.runtime.experts.counters import Counters
from moepack.runtime.experts.handles import NOTHING, Handle, LayerExperts, Pages, Snapshot
from moepack.runtime.experts.host_tier import CudaLink, HostTier
from moepack.runtime.experts.prediction import Prediction
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.paging.opening import gpu_rates, open_filler
from moepack.runtime.paging.paging import Paging
from moepack.runtime.paging.window import Window
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.capacity import base_bytes
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.paging import window_size
from moepack.runtime.planning.plan import Plan
from moepack.runtime.policies.contract import (
    DecodingBegan,
    Event,
    Interval,
    Key,
    LayerReached,
    PrefillEnded,
    SequenceBegan,
    SequenceEnded,
    Wanted,
)
from moepack.runtime.policies.placements import PAGED, Where
from moepack.runtime.policies.registry import Policy
from moepack.runtime.store.files import BackingStore

from .demand import Demand
from .pools import Pool
from .residency import Residency
from .sequences import Sequences
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
    if not torch_cuda.is_gpu(device):
        return CpuDevice(plan.staging, on_event)
    from moepack.runtime.devices.cuda import open_cuda

    staging, last = plan.staging // buffers, len(plan.ladder) - plan.keep
    on_device = [v for v, placement in enumerate(plan.ladder) if placement.where is Where.DEVICE]
    coded = [v for v in on_device if not _version(plan, v).is_lossless]
    largest = max([staging, *(row[v] for row in plan.sizes for v in coded)])
    served = [_version(plan, v).name for v in on_device if v < last]
    return open_cuda(store, served, device, largest, staging, buffers, on_event, host, plan.granule)


def _second_buffer(plan: Plan) -> tuple[Plan, int]:
    """A plan with two staging buffers where there is room: an extent is then copied while the last one is decoded."""
    two = replace(plan, fixed=plan.fixed + plan.staging, staging=2 * plan.staging)
    least = two.fixed + base_bytes(plan.sizes, plan.experts) + plan.reserve
    return (two, 2) if least <= plan.budget else (plan, 1)


def _check_host(bundle: Bundle, plan: Plan, host_memory: int | None) -> None:
    """See that an expert on its way from any host placement to another finds a block there."""
    on_host = [v for v, placement in enumerate(plan.ladder) if placement.where is Where.HOST]
    largest = [max(row[v] for v in on_host) for row in plan.blocks]
    least = sum(n * size for n, size in zip(plan.experts, largest, strict=True)) + max(largest)
    if host_memory is not None and host_memory < least:
        names = ", ".join(str(plan.ladder[v]) for v in on_host)
        raise TooSmallError(
            f"{bundle.path}: a host_memory of {host_memory} bytes does not hold every expert at any of {names}: the "
            f"least that would do is {least} bytes",
            least,
        )


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
        tier: what executes them; None where the ladder has none.
        prediction: what foretells the next layer's routing, where the policy asks (passes.py gives it).
        loading: what loads on demand, under a policy that blocks; else nobody asks it.
        paging: the window, where experts are paged.
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
        host_rate: float | None = None,
        host_threads: int | None = None,
    ) -> None:
        """Load what the policy wants before any token, the others' low versions, and start serving.

        Args:
            bundle: the bundle.
            policy: a live one.
            plan: of `make_plan`.
            devices: the layers'.
            host_memory: bytes that experts on the host may take, and that may be pinned for a GPU; without it, what the
                system has left.
            host_rate, host_threads: of the host tier (HostTier); without a number, torch's threads on a GPU, and beside
                a CPU's own experts half of them.

        Raises:
            TooSmallError: when the host's memory does not hold every expert at its largest placement there.
            InputError: on a device that cannot change versions.
            BundleError: when a low version is damaged.
        """
        if len(set(devices)) > 1 or devices[0].type not in ("cpu", "cuda"):
            raise InputError(f"policy {policy}: versions change on one CPU or one CUDA device, not on {devices}")
        self._on_gpu = torch_cuda.is_gpu(devices[0])
        self._can_shrink = not self._on_gpu or bool(plan.window)
        if plan.granule:
            plan = replace(plan, rates=gpu_rates(bundle, plan.ladder, devices[0]), together=True)
        plan, buffers = (plan, 1) if self._can_shrink else _second_buffer(plan)
        plan = plan if self._can_shrink else plan.divided()
        self.policy, wanted = plan.policy(policy)
        self._blocking = self.policy.needs.layers
        if not (self._can_shrink or wanted):  # all experts are at the base at first: there must be a block for each
            plan = replace(plan, keep=True, most=None).divided()
            self.policy, wanted = plan.policy(policy)
        self.plan, self._rate = plan, policy.options.bytes_per_second
        self._named, self._upset = policy, False
        self._makes_up = policy.options.makes_up_for_absent
        self.store = BackingStore(bundle, checks_again=not self._blocking)
        self._process = os.getpid()
        self.worker = Worker(self.round, self._shut, self.policy.needs.interval)
        self.device = _device(devices[0], self.store, plan, buffers, self.worker.wake, host_memory)
        self._host_device: CpuDevice | None = None
        self.tier: HostTier | None = None
        self.paging: Paging | None = None
        try:
            if any(p.where is Where.HOST for p in plan.ladder):
                _check_host(bundle, plan, host_memory)
                threads = host_threads or (None if self._on_gpu else max(1, torch.get_num_threads() // 2))
                self.tier = HostTier(threads, host_rate, CudaLink() if self._on_gpu else None)
            self._serve(bundle, devices, wanted, host_memory)
        except BaseException:
            self._end_streams()
            raise
        if not self._blocking:
            self.worker.start()

    def _serve(self, bundle: Bundle, devices: Sequence[torch.device], wanted: Wanted, host_memory: int | None) -> None:
        """Make the pools, load, and let passes read."""
        plan = self.plan
        if self._on_gpu and any(p.where is Where.HOST for p in plan.ladder):
            self._host_device = CpuDevice(plan.staging, self.worker.wake)
        self.tracker = BudgetTracker(plan.budget, plan.fixed)
        self.host = BudgetTracker(1 << 62 if host_memory is None else host_memory, 0)
        versions = bundle.manifest.versions
        self.layers = [LayerExperts(x, versions, d) for x, d in zip(bundle.layers, devices, strict=True)]
        for layer in self.layers:
            layer.of.tier = self.tier
            layer.of.makes_up_for_absent = self._makes_up
        self._epoch = 0
        self._tables = DeviceTables(plan.experts, devices[0], self.device.mark) if self._on_gpu else None
        pools = self._pools()
        self.residency = Residency(
            plan.experts, plan.base, lambda p, v: pools.get((v, plan.blocks[p][v])), self._fetch, self._make,
            self._publish, self.device.mark, plan.keep, self._snapshot,
        )  # fmt: skip
        on_device = [pool for pool in pools.values() if pool.budget_bytes]
        on_host = [pool for pool in pools.values() if not pool.budget_bytes]
        self.transitions = Transitions(self.residency, self.tracker, on_device, plan.reserve, on_host, kept=plan.demand)
        named = partial(_name, bundle, plan) if plan.ladder[plan.base].where is Where.ABSENT else None
        self.loading = Demand(self.residency, self.transitions, partial(_stored_bytes, bundle, plan), named)
        self.prediction: Prediction | None = None
        if plan.window:
            self._page()
        self._load(wanted)
        self.device.limit(self._rate, 0 if self._blocking else FLOOR)
        self.each_round: Callable[[], None] = lambda: None
        gates = plan.experts if self.policy.needs.gates else ()
        self._counts: list[npt.NDArray[np.int64]] = [np.zeros(n, np.int64) for n in plan.experts]
        self._gates: list[npt.NDArray[np.float64]] = [np.zeros(n) for n in gates]
        self._sequences = Sequences()
        self._order = itertools.count()
        self._computed, self._steps = 0.0, 0
        self._loaded = [[0] * len(plan.ladder) for _ in plan.experts]
        self._told: deque[tuple[int, Callable[[Sequence[int]], Event]]] = deque()  # made with the capacity as of then
        self._ended: deque[tuple[int, Step]] = deque(maxlen=UNHEARD)
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
                memory = (self.device.host_memory if on_host else self.device.memory)(size * blocks)
                pools[number, size] = Pool(f"{placement}/{size}", size, blocks, tracker, memory, on_host)
        return pools

    def _page(self) -> None:
        """Reserve the window: addresses for every expert, blocks for two layers' of them."""
        version = next(_version(self.plan, v) for v, p in enumerate(self.plan.ladder) if p.where in PAGED)
        layers = [layer.of.layer for layer in self.layers]
        size = window_size(layers, version, self.plan.granule)
        forms = [(x.of.layer, x.of.lossless_forms(version)) for x in self.layers]
        self.paging = Paging(
            open_filler(self.device, forms, version, partial(self.store.stored, version.name), self.plan.staging),
            Window([size.blocks] * len(size.sizes), len(layers)), len(layers), self.device.mark,
            getattr(self.policy, "looks_ahead", True),
        )  # fmt: skip
        for position, layer in enumerate(self.layers):
            layer.of.paging = partial(self._paged, position)

    def _paged(self, position: int, snapshot: Snapshot, index: Tensor) -> contextlib.AbstractContextManager[Pages]:
        assert self.paging is not None
        return self.paging.run(position, snapshot, index, self._mine.step)

    def _load(self, wanted: Wanted) -> None:
        first = {} if self.plan.keep else wanted
        keys = [(p, e) for p, n in enumerate(self.plan.experts) for e in range(n)]
        number = {key: first.get(key, self.plan.base) for key in keys}
        in_memory = [key for key in keys if self.plan.blocks[key[0]][number[key]]]
        stored = [(key, self.plan.ladder[number[key]].version) for key in in_memory]
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
        if self.plan.ladder[version].where is Where.PACKED:
            return device.fetch(stored, target, self.layers[position].of.layer, described, packed=True)
        return device.fetch(stored, target, self.layers[position].of.layer, described)

    def _make(self, key: Key, version: int, tensor: Tensor | None) -> Handle:
        layer, placement = self.layers[key[0]], self.plan.ladder[version]
        if placement.where in PAGED:
            assert self.paging is not None
            described, packed = _version(self.plan, version), None
            if tensor is not None:
                stored = self.store.stored(described.name, *key)
                packed = self.paging.filler.over(*key, tensor[: stored.size], stored.where)
            return layer.of.over(described, self.paging.space.extent(*key), placement.where, packed)
        if tensor is None:
            return NOTHING
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
    def sequence(self, given: dict[str, Any]) -> Iterator[tuple[Prompt, Callable[[Any], None]]]:
        """Around a pass with these arguments, outside its step: what it reads of a sequence, for `step`, and who is to
        be told its result. Only a policy that needs to know makes a difference."""
        needs = self.policy.needs
        if not (needs.prompts or needs.layers or needs.timings):
            yield NO_PROMPT, lambda out: None
            return
        try:
            with self._sequences.reading(given) as found:
                yield found
        finally:
            self._soon()

    @contextlib.contextmanager
    def step(self, prompt: Prompt = NO_PROMPT, mask: Tensor | None = None) -> Iterator[Step]:
        """Around a forward pass: it reads one snapshot, and blocks drain behind it, however it ends.

        Inside a step of the same thread it is that one. Under a policy that blocks, one runs at a time.

        Args:
            prompt: what `sequence` gave.
            mask: int64 [tokens] on the device, 0 for padding; without it all tokens are text.
        """
        running: Step | None = getattr(self._mine, "step", None)
        if running is not None:
            yield running
            return
        with self.turn():
            if prompt.begins:
                self._tell(partial(SequenceBegan, time.monotonic(), tokens=prompt.tokens, sequence=prompt.sequence))
            if prompt.decodes:
                self._tell(partial(DecodingBegan, time.monotonic(), sequence=prompt.sequence))
            if prompt.begins or prompt.decodes:
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
            return Step(number, snapshots, counters, prompt, table, time.perf_counter())
        except BaseException:
            self.residency.end(number)
            raise

    def _end(self, step: Step) -> None:
        if self.paging is not None:
            self.paging.end(step)
        step.seconds = time.perf_counter() - step.began - step.waited
        if step.table is not None and self._tables is not None:
            self._tables.give(step.table)
        self.residency.end(step.number)
        step.counters.send()
        self._ended.append((next(self._order), step))
        self._soon()

    def _tell(self, event: Callable[[Sequence[int]], Event]) -> None:
        if self.policy.needs.prompts:
            self._told.append((next(self._order), event))

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
        """How often a forward pass waited for an expert."""
        return self.loading.waits + (self.paging.counts.waits if self.paging is not None else 0)

    @property
    def waited(self) -> float:
        """Seconds it did."""
        return self.loading.waited + (self.paging.counts.waited if self.paging is not None else 0.0)

    def demand(self, position: int, counters: Counters, seen: Seen = NOTHING_SEEN) -> None:
        """Before a layer's experts run: under a policy that blocks, load what it wants and wait.

        Raises:
            BundleError, InputError: when an expert that has no resident version cannot be had.
        """
        if not self._blocking:
            return
        if self._upset:
            self._start_over()
        self._upset = True
        placed, coming = self.loading.where(position)
        event = LayerReached(
            time.monotonic(), self.capacity(), position, counters.layer(position), counters.gates(position),
            seen.is_prompt, seen.important, seen.predicted, seen.predicted_gates, placed, coming,
        )  # fmt: skip
        wanted = self.policy.decide(event)
        try:
            if wanted is not None:
                self.loading.reach(position, wanted)
        except BundleError:  # the other experts are where the policy has them
            self._upset = False
            raise
        self._upset = False

    def _start_over(self) -> None:
        """All experts go to the base, and a new policy starts from there.

        The one before was interrupted while it decided, or before all of its answer was carried out: what it takes to
        be in memory may not be there, or more is.
        """
        self.loading.drop_all()
        self.policy, wanted = self.plan.policy(self._named)
        self.transitions.want(wanted, self.policy.worth)
        self._upset = False

    def capacity(self) -> list[int]:
        """Where pools cannot shrink, the KV reserve has what they leave, and the experts keep theirs."""
        kv = self.transitions.kv_bytes + self.transitions.kv_asked
        return self._capacity_beside(kv if self._can_shrink else 0)

    def _hear(self) -> None:
        """Let the policy know of sequences, and add up the steps that have ended, in the order of all this: what a step
        has counted is heard before what happens to its sequence next, however late its numbers arrive."""
        for number in self._sequences.over():
            self._tell(partial(SequenceEnded, time.monotonic(), sequence=number))
        for _ in range(len(self._told) + len(self._ended)):  # not what comes meanwhile: there may be no end of it
            told = self._told[0] if self._told else None  # before looking at steps: those that went before are there
            try:
                order, step = self._ended.popleft()
            except IndexError:
                if told is None:
                    break
                self._hear_told()
                continue
            if told is not None and told[0] < order:
                self._ended.appendleft((order, step))
                self._hear_told()
                continue
            if not step.counters.arrived():
                self._ended.appendleft((order, step))
                break
            if step.counters.used:
                self._add(step)
            step.counters.clear()
            if len(self._spare_counters) < UNHEARD:
                self._spare_counters.append(step.counters)

    def _hear_told(self) -> None:
        _, event = self._told.popleft()
        self._decide(event(self.capacity()))

    def _add(self, step: Step) -> None:
        counts, gates = step.counters.take()
        for chosen, new in zip(self._counts, counts, strict=True):
            chosen += new
        for weighed, more in zip(self._gates, gates, strict=True):
            weighed += more
        if not step.prompt.several and self.policy.needs.timings:
            self._steps += 1
            self._computed += step.seconds
            for position, *sizes in step.demanded:
                row = self._loaded[position]
                row[:] = [old + new for old, new in zip(row, (0, *sizes), strict=True)]
        if step.prompt.tokens and self.policy.needs.prompts:
            mine = [row.copy() for row in counts], [row.copy() for row in gates]
            self._decide(PrefillEnded(time.monotonic(), self.capacity(), *mine, step.prompt.sequence))

    def _decide(self, event: Event) -> None:
        wanted = self.policy.decide(event)
        if wanted is not None and not self._blocking:
            self.transitions.want(wanted, self.policy.worth, self.policy.needs.exact)

    @property
    def moved(self) -> int:
        """Stored bytes copied since the start."""
        return self.device.moved + (self.paging.counts.read if self.paging is not None else 0)

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
                steps, self._steps, computed, self._computed = self._steps, 0, self._computed, 0.0
                loaded, self._loaded = self._loaded, [[0] * len(row) for row in self._loaded]
                self._decide(Interval(now, capacity, counts, gates, steps, computed, loaded))
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
        if self.paging is not None:
            self.paging.close(wait)
        for device in (self.device, self._host_device):
            if device is not None:
                device.close(wait)
        if self.tier is not None:
            self.tier.close(wait)
        self.store.close()

    def _shut(self, wait: bool = True) -> None:
        """End the streams and close the files; once no step reads them, forget what keeps the experts' memory."""
        self._end_streams(wait)
        self.each_round = lambda: None
        forget = [self.paging.forget] if self.paging is not None and self._on_gpu else []
        self.residency.let_go([*(layer.let_go for layer in self.layers), *forget])
