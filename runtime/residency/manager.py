"""The residency manager: serves a bundle by a policy that changes placements while the model runs.

It joins the plan, the policy, the pools, residency and its transitions, the device, and the worker thread that carries
transitions out. Only a policy that blocks (`Needs.layers`) lets a forward pass wait for a copy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moepack.pack.errors import BundleError
from moepack.pack.reader import Bundle
from moepack.runtime.devices import torch_cuda
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.devices.handle_tables import DeviceTables, HandleTable
from moepack.runtime.experts.handles import NOTHING, RUN_THERE, Handle, LayerExperts, Snapshot
from moepack.runtime.experts.host_tier import CudaLink, HostTier
from moepack.runtime.experts.packed import CodedExtent
from moepack.runtime.experts.prediction import Prediction
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.paging import source_of
from moepack.runtime.planning.plan import Plan
from moepack.runtime.policies.contract import FLOOR, Event, Key, LayerReached, Wanted
from moepack.runtime.policies.placements import CODED, ON_HOST, Where
from moepack.runtime.policies.registry import Policy
from moepack.runtime.step.context import NO_PROMPT, Prompt, Step, opened, step_of
from moepack.runtime.store.files import BackingStore
from moepack.runtime.store.loading import AHEAD, loading

from . import opening
from .headroom import Headroom
from .on_demand import OnDemandLoader
from .residency import Residency
from .routing_statistics import RoutingStatistics
from .transitions import Transitions, fails, makes_room
from .worker import Worker

if TYPE_CHECKING:
    from moepack.runtime.devices.contract import Completion
    from moepack.runtime.paging.in_place import PagesInPlace

CHANGING = (
    "gradients need versions that stay: this policy changes them while serving; load the bundle with a static policy "
    "to train beside it, or run the pass under torch.no_grad()"
)


class PassLock:
    """Lets passes of one thread at a time run."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._let_go = 0  # how often; changed by the thread that has the lock

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside the context, unless `let_go` ends that before."""
        self._lock.acquire()
        before = self._let_go
        try:
            yield
        finally:
            if before == self._let_go:  # else it is another pass's by now
                self._lock.release()

    def let_go(self) -> None:
        """Release the lock if this thread has it. Contexts of the thread that are still open then release nothing."""
        if not self._lock.acquire(blocking=False):  # another thread's
            return
        self._let_go += 1
        with contextlib.suppress(RuntimeError):  # once it is free
            while True:
                self._lock.release()


class ResidencyManager:
    """Serves a bundle while its experts' versions change. Every method may be called from any thread."""

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
        """Load the placements that the policy wants before any token, and start serving.

        Args:
            policy: a policy that changes placements.
            plan: from `make_plan`.
            devices: the device of each layer, [layers]; all are the same.
            host_memory: bytes for experts on the host and pinned memory; `None` allows what the system has left.
            host_rate, host_threads: rate and threads of the host tier, as in `HostTier`.

        Raises:
            TooSmallError: if host memory does not hold every expert at its largest placement there.
            InputError: for a device on which versions cannot change, or a GPU that lacks Triton for them.
            BundleError: if the base version of an expert is damaged.
        """
        opening.check_devices(plan, policy, bundle.manifest.versions, devices)
        self._on_gpu = torch_cuda.is_gpu(devices[0])
        self._can_shrink = not self._on_gpu or bool(plan.window)
        plan, buffers = (plan, 1) if self._can_shrink else opening.second_buffer(plan)
        plan = plan if self._can_shrink else plan.divided()
        self.key = object()  # identifies the model: `step_of` finds the model's running step by it
        self.policy, wanted = plan.policy(policy)
        self._blocking = self.policy.needs.layers
        if not (self._can_shrink or wanted):  # all experts start at the base: each needs a block there
            plan = replace(plan, keep=True, most=None).divided()
            self.policy, wanted = plan.policy(policy)
        self.plan = plan
        self._named = policy
        self._upset = False  # whether a load was interrupted
        direct = not self._on_gpu or plan.reads_host  # else the page cache would have all of host memory's experts, too
        self.store = BackingStore(bundle, not (self._blocking or plan.in_place), direct=direct)
        self._process = os.getpid()
        self._one_at_a_time = PassLock()
        self.worker = Worker(self.round, self._shut, self.policy.needs.interval)
        wake = self.worker.wake
        self.device = opening.open_device(devices[0], self.store, plan, buffers, wake, host_memory, self._blocking)
        self._host_device: CpuDevice | None = None
        self.tier: HostTier | None = None  # runs the experts in host memory
        self.in_place: PagesInPlace | None = None  # the slots in which a GPU decodes experts
        try:
            if any(p.where in ON_HOST for p in plan.ladder):
                opening.check_host(bundle, plan, host_memory, self._on_gpu)
                self._open_host(host_rate, host_threads)
            self._serve(bundle, devices, wanted, host_memory)
        except BaseException:
            with contextlib.ExitStack() as ends:
                ends.callback(self._free)
                self._end_streams()
            raise
        if not self._blocking:
            self.worker.start()

    def _free(self) -> None:
        (self.device.free if self.in_place is None else self.in_place.forget)()

    def _open_host(self, rate: float | None, threads: int | None) -> None:
        """Open what reads experts into host memory, and the host tier if it runs some.

        By default the tier has as many threads as torch beside a GPU, and half as many on a CPU.
        """
        if any(p.where is Where.HOST for p in self.plan.ladder):
            threads = threads or (None if self._on_gpu else max(1, torch.get_num_threads() // 2))
            self.tier = HostTier(threads, rate, CudaLink() if self._on_gpu else None)
        if self._on_gpu:
            self._host_device = CpuDevice(self.plan.staging, self.worker.wake, readers=1)

    def _serve(self, bundle: Bundle, devices: Sequence[torch.device], wanted: Wanted, host_memory: int | None) -> None:
        plan = self.plan
        options = self._named.options
        self.tracker = BudgetTracker(plan.budget, plan.fixed)
        self.host = BudgetTracker(1 << 62 if host_memory is None else host_memory, 0)
        versions = bundle.manifest.versions
        self.layers = [LayerExperts(x, versions, d) for x, d in zip(bundle.layers, devices, strict=True)]
        there = {plan.version(n).name for n, p in enumerate(plan.ladder) if p.where in RUN_THERE}
        for layer in self.layers:
            layer.of.launched = tuple(sorted(layer.of.numbers[name] for name in there))
            layer.of.tier = self.tier
            layer.no_gradients = CHANGING
        self._epoch = 0
        self._tables = DeviceTables(plan.experts, devices[0], self.device.mark) if self._on_gpu else None
        pools = opening.make_pools(plan, self.device, self.tracker, self.host, self._can_shrink)
        self.residency = Residency(
            plan.experts,
            plan.base,
            lambda p, v: pools.get((v, plan.blocks[p][v])),
            self._fetch,
            self._make,
            self._publish,
            self.device.mark,
            plan.keep,
            self._snapshot,
            source_of(plan.ladder),
        )
        headroom = Headroom(self.residency, self.tracker, pools.values(), plan.reserve, plan.demand + plan.present)
        self.transitions = Transitions(headroom, plan.base - 1 if plan.present else None)
        named = partial(opening.name_of, bundle, plan) if plan.ladder[plan.base].version is None else None
        self.on_demand = OnDemandLoader(self.transitions, partial(opening.stored_bytes, bundle, plan), named)
        self.prediction: Prediction | None = None  # predicts the next layer's routing; set by the `ForwardWrapper`
        if plan.in_place:
            self.in_place = opening.open_in_place(plan, self.layers, self.device)
        self._load(wanted)
        # A pass may wait for the KV cache's room: experts leave as fast as they can.
        hurried = partial(makes_room, weakref.ref(self.transitions))
        self.device.limit(options.bytes_per_second, 0 if self._blocking else FLOOR, hurried)
        self.each_round: Callable[[], None] = lambda: None  # called by the worker in every round
        self.statistics = RoutingStatistics(plan.experts, len(plan.ladder), self.policy.needs, devices[0])
        self._decided_at = 0.0
        self._capacity = [-1]
        self._capacity_beside = functools.lru_cache(4)(plan.capacity)

    def _load(self, wanted: Wanted) -> None:
        plan = self.plan
        keys = [(p, e) for p, n in enumerate(plan.experts) for e in range(n)]
        number = {key: wanted.get(key, plan.base) for key in keys}
        loaded = [(key, v) for key in keys for v in dict.fromkeys([*[plan.base] * plan.keep, number[key]])]
        sizes = {(key, v): self._stored_size(key, v) for key, v in loaded if plan.blocks[key[0]][v]}
        count = loading()
        count.expect(sum(sizes.values()))
        # A GPU copies from one place in order, and a lossless version is decoded from it. Others are read in place, by
        # several threads, which digest them: host memory gets each byte once.
        ahead = [(plan.version(v), key, plan.ladder[v].where) for key, v in sizes]
        copied = [
            (v.name, *key)
            for v, key, where in ahead
            if (self._on_gpu and where not in ON_HOST) or (v.entropy_coded and where is not Where.PACKED_PINNED)
        ]
        with self.store.reading_ahead(copied):
            made = self.residency.place(
                number.items(),
                0 if self._on_gpu else AHEAD,
                lambda key, v: count.add(sizes.get((key, v), 0)),
                fails if plan.present else self.transitions.note_failure,
            )
            for (p, e), handle in made:
                self.layers[p].publish(e, handle)
        if plan.stage:
            opening.open_stage(plan, self.layers, self.device, self.residency)
        self.transitions.want({} if self._blocking else wanted, self.policy.worth)
        self._moved_before = self.device.moved
        if self.in_place is not None:
            self.in_place.serve()
        for device in (self.device, self._host_device):
            if device is not None:
                device.serve()

    def _stored_size(self, key: Key, version: int) -> int:
        with contextlib.suppress(BundleError):  # raised again when the extent is fetched
            return self.store.stored(self.plan.version(version).name, *key).size
        return 0

    def _fetch(self, key: Key, version: int, target: Tensor) -> Completion:
        position, expert = key
        described = self.plan.version(version)
        where = self.plan.ladder[version].where
        stored = partial(self.store.stored, described.name, position, expert)
        device = self._host_device if where in ON_HOST and self._host_device is not None else self.device
        here = self._pinned(key, version) if self.plan.reads_host else None
        source = self.residency.source_of(key)
        packed = None if source is None else source.handle.packed
        coded = None if packed is None else packed.extent
        return device.fetch(stored, target, self.layers[position].of.layer, described, where in CODED, here, coded)

    def _pinned(self, key: Key, number: int) -> Tensor | None:
        """Return an expert's bytes in pinned memory, for a placement; None while they are loaded, or elsewhere."""
        if not self.plan.is_of_base(number):
            return None
        with self.residency.lock:
            entry = self.residency.entries.get(key)
            if entry is None:
                return None
            base = entry.complete[self.plan.base].handle
            return base.extent if base.packed is None else base.packed.extent

    def _make(self, key: Key, version: int, tensor: Tensor | None) -> Handle:
        layer = self.layers[key[0]]
        placement = self.plan.ladder[version]
        if tensor is None:
            return replace(NOTHING, where=placement.where)
        described = self.plan.version(version)
        if placement.where in CODED:
            stored = self.store.stored(described.name, *key)
            coded = tensor[: stored.size]
            if self.in_place is not None:
                packed: CodedExtent = self.in_place.over(*key, coded, stored.where)
                return layer.of.over(described, self.in_place.extent(*key), placement.where, packed)
            packed = CodedExtent(coded, layer.of.layer, layer.of.forms[described.name], stored.where)
            return layer.of.over(described, NOTHING.extent, placement.where, packed)
        return layer.of.over(described, tensor[: described.resident_size(layer.of.layer.matrices)], placement.where)

    def _publish(self, key: Key, made: Handle) -> None:
        self.layers[key[0]].publish(key[1], made)
        self._epoch += 1

    def _snapshot(self) -> tuple[int, tuple[Snapshot, ...]]:
        """Return the epoch and every layer's handles, for a step that begins now. The caller holds residency's lock."""
        return self._epoch, tuple(layer.current for layer in self.layers)

    # --- steps

    def pass_lock(self) -> contextlib.AbstractContextManager[object]:
        """Return a lock for a whole forward pass and its wait for room; it does nothing unless the policy blocks."""
        return self._one_at_a_time.held() if self._blocking else contextlib.nullcontext()

    def end_interrupted(self) -> None:
        """Let go what an interrupted pass of this thread still has. None of its passes runs.

        An interruption (Ctrl-C) may fall between the instructions by which a pass begins or ends.
        """
        self.residency.end_interrupted()
        self._one_at_a_time.let_go()

    @contextlib.contextmanager
    def sequence(self, given: dict[str, object]) -> Iterator[tuple[Prompt, Callable[[object], None]]]:
        """Enclose a forward pass with these arguments, and its step.

        Yields a `Prompt` (what the pass reads of a sequence), for `step`, and a function to call with the result.
        """
        needs = self.policy.needs
        if not (needs.prompts or needs.layers or needs.timings):
            yield NO_PROMPT, lambda out: None
            return
        try:
            with self.statistics.sequences.reading(given) as found:
                yield found
        finally:
            self._soon()

    @contextlib.contextmanager
    def step(self, prompt: Prompt = NO_PROMPT, mask: Tensor | None = None, counted: bool = True) -> Iterator[Step]:
        """Enclose a forward pass, which reads one snapshot. However it ends, old versions can be freed afterwards.

        Inside a running step of this thread, yield that step. One step runs at a time under a policy that blocks, and
        where steps share the memory of pages.

        Args:
            prompt: from `sequence`.
            mask: int64 [tokens] on the device, 0 for padding; None if all tokens are text.
            counted: whether the step's routing is counted.
        """
        if (running := step_of(self.key)) is not None:
            yield running
            return
        with self._one_at_a_time.held() if self._blocking or self.plan.in_place else contextlib.nullcontext():
            if self.statistics.begins(prompt):
                self._soon()
            step, table = self._begin(prompt, mask, counted)
            try:
                with opened(step):
                    yield step
            finally:
                self._end(step, table)

    def _begin(self, prompt: Prompt, mask: Tensor | None, counted: bool) -> tuple[Step, HandleTable | None]:
        number, (epoch, snapshots) = self.residency.begin()
        try:
            table = None
            if self._tables is not None:
                table = self._tables.take(epoch, snapshots)
                snapshots = table.snapshots
            if self.in_place is not None:
                self.in_place.begin()
            step = Step(
                self.key,
                snapshots,
                self.statistics.counters(prompt, mask) if counted else None,
                prompt=prompt,
                loader=self if self._blocking else None,
                number=number,
                words=None if table is None else table.words,
                began=time.perf_counter(),
            )
            return step, table
        except BaseException:
            self.residency.end(number)
            raise

    def _end(self, step: Step, table: HandleTable | None) -> None:
        with contextlib.ExitStack() as ends:  # all are called, even if one raises
            ends.callback(self.residency.end, step.number)
            if table is not None and self._tables is not None:
                ends.callback(self._tables.give, table)
            if self.in_place is not None:
                ends.callback(self.in_place.end)
        step.seconds = time.perf_counter() - step.began - step.waited
        if step.counters is not None:
            step.counters.send()
            self.statistics.ended(step)
        self._soon()

    def _soon(self) -> None:
        """Have the worker deliver events soon. A policy that blocks has no worker: deliver them at once."""
        if not self._blocking:
            self.worker.wake()
            return
        self.statistics.deliver(self._decide, self.capacity)
        now = time.monotonic()
        if self.policy.needs.timings and now - self._decided_at >= self.policy.needs.interval:
            self._decided_at = now
            self._decide(self.statistics.interval(now, self.capacity()))

    @property
    def waits(self) -> int:
        """Return the number of times that forward passes waited for an expert."""
        return self.on_demand.waits

    @property
    def waited(self) -> float:
        """Seconds that forward passes waited for experts."""
        return self.on_demand.waited

    def load(self, step: Step, position: int, hidden: Tensor, index: Tensor) -> None:
        """Ask a policy that blocks what a layer needs before its experts run; load that, and wait for it.

        Args:
            step: the running step, which has counted the layer's routing.
            position: the layer's number among the layers with experts, from 0.
            hidden: [tokens, hidden], the experts' input.
            index: [tokens, top_k], the router's choice.

        Raises:
            BundleError, InputError: when an expert without a resident version cannot be loaded.
        """
        foresees = self.prediction
        predicted = (None, {}) if foresees is None else foresees.ahead(position, hidden, index, step.counted.mask)
        # A load was interrupted while the policy decided, or before its whole answer was carried out: the policy's
        # state may not match memory. So all experts go to the base, and a new policy starts from there.
        if self._upset:
            self.on_demand.drop_all()
            self.device.rest()
            self.policy, _ = self.plan.policy(self._named)
            self.transitions.want({}, self.policy.worth)
        self._upset = True
        placed, coming = self.on_demand.where(position)
        counts, sums = step.counted.layer(position)
        if step.counted.mask is not None:  # what padding alone chose counts as one choice: it runs as all tokens do
            chosen = np.bincount(index.reshape(-1).cpu().numpy(), minlength=len(counts))
            counts = np.maximum(counts, chosen[: len(counts)] > 0)
        event = LayerReached(
            time.monotonic(),
            self.capacity(),
            position,
            counts,
            sums,
            step.prompt.several,
            *predicted,
            placed,
            coming,
        )
        wanted = self.policy.decide(event)
        waited = self.on_demand.waited
        try:
            if wanted is not None:
                origins = self.on_demand.reach(position, wanted)
                size = self.plan.sizes[position][0]
                step.demanded += [(position, origin, size) for origin in origins]
        except BundleError:  # the other experts are where the policy placed them
            self._upset = False
            raise
        step.waited += self.on_demand.waited - waited
        self._upset = False

    def capacity(self) -> list[int]:
        """Return the bytes that each layer's experts may take above the base, less a KV reserve if pools can shrink."""
        kv = self.transitions.kv_bytes + self.transitions.kv_asked
        return self._capacity_beside(kv if self._can_shrink else 0)

    def _decide(self, event: Event) -> None:
        wanted = self.policy.decide(event)
        if wanted is not None and not self._blocking:
            self.transitions.want(wanted, self.policy.worth, self.policy.needs.exact)

    @property
    def moved(self) -> int:
        """Bytes copied since serving began."""
        return self.device.moved - self._moved_before

    # --- the worker

    def round(self, now: float) -> None:
        """Run one round: tell the policy the counts, then carry transitions on, even if telling the policy fails."""
        try:
            self.each_round()
            self.statistics.deliver(self._decide, self.capacity)
            capacity = self.capacity()
            if now - self._decided_at >= self.policy.needs.interval or capacity != self._capacity:
                self._decided_at = now
                self._capacity = capacity
                self._decide(self.statistics.interval(now, capacity))
        finally:
            self.transitions.tick()

    def grow_kv(self, size: int) -> bool:
        """Ask for `size` more bytes for KV caches; return whether they are reserved already (`Transitions.grow_kv`)."""
        granted = self.transitions.grow_kv(size)
        self.worker.wake()
        return granted

    def close(self) -> None:
        """Stop changing versions, and release threads and files. May be called twice."""
        self.abandon(wait=True)
        self.worker.join()

    def abandon(self, wait: bool = False) -> None:
        """Close, by default without waiting: a finalizer may run on any thread, even on the worker itself.

        In a forked child it does nothing: the threads are the parent's, and locks may be held for ever.
        """
        if os.getpid() == self._process and not self.worker.stop():
            self._shut(wait)

    def _end_streams(self, wait: bool = True) -> None:
        for device in (self.device, self._host_device):
            if device is not None:
                device.close(wait)
        if self.tier is not None:
            self.tier.close(wait)
        self.store.close()

    def _shut(self, wait: bool = True) -> None:
        """End the streams and close the files. Once no step reads the experts, drop the references to their memory."""
        self._end_streams(wait)
        self.each_round = lambda: None
        self.residency.let_go([*(layer.close for layer in self.layers), self._free])
