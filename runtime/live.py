"""A bundle served by a policy that changes versions: pools, windows, the worker that carries transitions out.

Here the parts meet: the plan (capacity.py), the policy (hotness.py), residency and its transitions, the device. The
forward pass calls `begin`, `observe` and `end`; under a policy that does not block none of them waits for a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import PAGE, Version, align

from .budget import BudgetTracker
from .capacity import base_bytes, choose_low, even_room, room_by_loss
from .demand import load_now
from .device import CpuDevice, Device
from .experts import Handle, LayerExperts
from .hotness import Hotness, LivePolicy, Observation, Recent
from .kernels.forms import resident_size
from .policies import LiveOptions, Policy
from .pools import Pool
from .residency import Key, Residency
from .store import BackingStore
from .transitions import Transitions

log = logging.getLogger("moepack.runtime")
TABLES = "calibration.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is served in a budget.

    Attributes:
        versions: those of the bundle, most precise first; the other fields count in it.
        high, low: the two versions that are served.
        sizes: [layers][versions], bytes of a block.
        experts: [layers].
        fixed: bytes outside the experts: dense tensors and the staging buffer.
        staging: of them, the staging buffer's.
        budget: bytes for everything.
        gains: [layers][experts], what promotions save by the loss tables; empty where the budget is shared evenly.
    """

    versions: tuple[Version, ...]
    high: int
    low: int
    sizes: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]
    fixed: int
    staging: int
    budget: int
    gains: tuple[tuple[float, ...], ...]

    def room(self, kv: int = 0) -> list[int]:
        """How many experts of each layer may be at the high version beside a KV reserve of `kv` bytes."""
        left = self.budget - self.fixed - kv - base_bytes(self.sizes, self.experts, self.low)
        high = [row[self.high] for row in self.sizes]
        return room_by_loss(high, self.gains, left) if self.gains else even_room(high, self.experts, left)


def make_plan(bundle: Bundle, options: LiveOptions, dense: int, budget: int) -> Plan:
    """Choose versions and see that they fit.

    Args:
        bundle: the bundle.
        options: the policy's.
        dense: bytes of the dense tensors.
        budget: bytes for everything.

    Raises:
        InputError: when versions are not there, or the budget does not hold the low version of every expert; the
            message names the least that would do.
    """
    versions = bundle.versions
    names = [v.name for v in versions]
    for name in filter(None, (options.hi, options.lo)):
        if name not in names:
            raise InputError(f"{bundle.path}: has no version {name!r}: here are {', '.join(names)}")
    high = names.index(options.hi) if options.hi else 0
    if high == len(names) - 1:
        raise InputError(f"{bundle.path}: has no version below {names[high]}: changing versions needs two")
    sizes = tuple(tuple(align(resident_size(x.matrices, v), PAGE) for v in versions) for x in bundle.layers)
    experts = tuple(x.experts for x in bundle.layers)
    fixed, staging = dense, _staging(bundle, versions[high])
    fixed += staging
    if options.lo:
        low: int | None = names.index(options.lo)
        assert low is not None
        if low <= high:
            raise InputError(f"{bundle.path}: the low version {options.lo} is not below {names[high]}")
        if base_bytes(sizes, experts, low) > budget - fixed:
            low = None
    else:
        low = choose_low(sizes, experts, high, budget - fixed)
    if low is None:
        smallest = options.lo or min(names[high + 1 :], key=lambda n: base_bytes(sizes, experts, names.index(n)))
        least = fixed + base_bytes(sizes, experts, names.index(smallest))
        raise InputError(
            f"{bundle.path}: a budget of {budget} bytes does not hold every expert at {smallest}: the least that would "
            f"do is {least} bytes ({fixed} of them outside the experts)"
        )
    gains = _gains(bundle, names[high], names[low]) if options.share == "loss" else ()
    return Plan(versions, high, low, sizes, experts, fixed, staging, budget, gains)


def _staging(bundle: Bundle, high: Version) -> int:
    """Bytes of the buffer that compressed extents are decoded from; other versions are read into their blocks."""
    if not high.is_lossless:
        return 0
    files = [bundle.layer_file(high.name, p) for p in range(len(bundle.layers))]
    return align(max(f.extent_size(e) for f in files for e in range(f.layer.experts)), PAGE)


def _gains(bundle: Bundle, high: str, low: str) -> tuple[tuple[float, ...], ...]:
    """Squared error that promotions save on the calibration tokens (pack/FORMAT.md, "Calibration tables")."""
    from safetensors import safe_open

    out = []
    with safe_open(bundle.path / TABLES, framework="np") as f:
        columns = f.metadata()["versions"].split(",")
        for layer in bundle.layers:
            tokens, gated = (f.get_tensor(f"layers.{layer.index}.{k}") for k in ("tokens", "gated"))
            gain = (tokens + 1.0) * (gated[:, columns.index(low)] - gated[:, columns.index(high)])
            out.append(tuple(float(g) for g in gain))
    return tuple(out)


def _device(device: torch.device, plan: Plan, on_event: Callable[[], None]) -> Device:
    if device.type == "cpu":
        return CpuDevice(plan.staging, on_event)
    from .device_cuda import CudaDevice

    largest = max(max(row[plan.high], row[plan.low]) for row in plan.sizes)
    return CudaDevice(max(plan.staging, largest), device, on_event)


class Live:
    """Serves a bundle while its experts' versions change. Every method may be called from any thread.

    Attributes:
        plan: what fits.
        tracker: the budget.
        waits: how often a forward pass waited for a copy.
        waited: seconds it did.
    """

    def __init__(self, bundle: Bundle, policy: Policy, plan: Plan, devices: Sequence[torch.device]) -> None:
        """Load the low version of every expert and start serving; `devices` are the layers'.

        Raises:
            InputError: on a device that cannot change versions.
            BundleError: when a low version is damaged.
        """
        options = policy.live_options()
        if len(set(devices)) > 1 or devices[0].type not in ("cpu", "cuda"):
            raise InputError(f"policy {policy}: versions change on one CPU or one CUDA device, not on {devices}")
        self.plan, self._policy_text = plan, str(policy)
        self.store = BackingStore(bundle)
        self._wake = threading.Event()
        self.device = _device(devices[0], plan, self._wake.set)
        self.tracker = BudgetTracker(plan.budget, plan.fixed)
        self.layers = [LayerExperts(self.store, p, (), d) for p, d in enumerate(devices)]
        pools = self._pools()
        self.residency = Residency(
            plan.experts, plan.low, lambda p, v: pools[v, plan.sizes[p][v]], self._fetch, self._make, self._publish,
            self.device.mark,
        )  # fmt: skip
        self.transitions = Transitions(self.residency, self.tracker, list(pools.values()))
        try:
            for p, layer in enumerate(self.layers):
                for e in range(plan.experts[p]):
                    layer.handles.append(self.residency.place((p, e)))
                    layer.publish(e, layer.handles[e])
        except BaseException:
            self.device.close()
            raise
        self.device.limit(options.rate * 1e6 or None)
        self.policy: LivePolicy
        if policy.name == "lru":
            self.device.limit(None)
            self.policy = Recent(plan.high)
        else:
            self.policy = Hotness(plan.experts, plan.high, options.hotness())
        self.waits, self.waited = 0, 0.0
        self._counts_lock = threading.Lock()
        self._counts = [np.zeros(n, np.int64) for n in plan.experts]
        self._seen_at, self._seen_room = 0.0, [-1]
        self._one_at_a_time = threading.RLock()
        self._closing = False
        self._patience = min(0.1, options.interval / 4)
        self._worker = threading.Thread(target=self._run, name="moepack-transitions", daemon=True)
        if not self.policy.blocking:
            self._worker.start()

    def _pools(self) -> dict[tuple[int, int], Pool]:
        plan, pools = self.plan, {}
        spare = plan.budget - plan.fixed - base_bytes(plan.sizes, plan.experts, plan.low)
        for version in (plan.high, plan.low):
            for size in sorted({row[version] for row in plan.sizes}):
                blocks = sum(n for row, n in zip(plan.sizes, plan.experts, strict=True) if row[version] == size)
                if version == plan.high:
                    blocks = min(blocks, spare // size)
                memory = self.device.memory(size * blocks)
                pools[version, size] = Pool(f"{plan.versions[version].name}/{size}", size, blocks, self.tracker, memory)
        return pools

    def _fetch(self, key: Key, version: int, target: Tensor) -> Any:
        position, expert = key
        described = self.plan.versions[version]
        stored = self.store.stored(described.name, position, expert)
        return self.device.fetch(stored, target, self.layers[position].layer, described)

    def _make(self, key: Key, version: int, tensor: Tensor) -> Handle:
        layer, described = self.layers[key[0]], self.plan.versions[version]
        return layer.over(described, tensor[: resident_size(layer.layer.matrices, described)])

    def _publish(self, key: Key, made: Handle) -> None:
        self.layers[key[0]].publish(key[1], made)

    # --- windows

    def begin(self) -> int:
        """Begin a window. Under a policy that blocks, one runs at a time."""
        if self.policy.blocking:
            self._one_at_a_time.acquire()
        return self.residency.begin()

    def end(self, window: int, counts: Sequence[npt.NDArray[np.int64]]) -> None:
        """End a window in which the router chose experts so often, int64 [experts] a layer."""
        self.residency.end(window)
        if self.policy.blocking:
            self.residency.reclaim()
            self._one_at_a_time.release()
            return
        with self._counts_lock:
            for mine, new in zip(self._counts, counts, strict=True):
                mine += new
        self._wake.set()

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
        return self.plan.room(self.transitions.kv_bytes + self.transitions.kv_asked)

    # --- the worker

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(max(self._patience, 0.01))
            self._wake.clear()
            try:
                self.step(time.monotonic())
            except Exception:  # serving goes on with the versions that are there
                log.exception("transitions have stopped")
                return

    def step(self, now: float) -> None:
        """One round: let the policy see what was counted, then carry transitions on."""
        room = self._room()
        if now - self._seen_at >= self._patience or room != self._seen_room:
            self._seen_at, self._seen_room = now, room
            with self._counts_lock:
                counts, self._counts = self._counts, [np.zeros(n, np.int64) for n in self.plan.experts]
            wanted = self.policy.observe(Observation(now, [c.tolist() for c in counts], room))
            if wanted is not None:
                self.transitions.want(wanted)
        self.transitions.tick()
        if self.residency.boundary():
            self.transitions.tick()

    def grow_kv(self, size: int) -> bool:
        """Ask for `size` bytes more for the KV cache; whether they are there already (transitions.py)."""
        granted = self.transitions.grow_kv(size)
        self._wake.set()
        return granted

    def close(self) -> None:
        """Stop changing versions; the model goes on with those it has. May be called twice."""
        self._closing = True
        self._wake.set()
        if self._worker.is_alive() and threading.current_thread() is not self._worker:
            self._worker.join()
        self.device.close()
        self.store.close()
