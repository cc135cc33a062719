"""A model without experts and an open bundle to a model that serves it: what fits, the experts' handles, the budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import SECTION, align
from moepack.runtime.devices import glibc, torch_cuda
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.experts.op import enter
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.choice import choose_policy
from moepack.runtime.planning.fixed import Fixed, Needs, Workload, dense_bytes, measure, on_cuda
from moepack.runtime.planning.plan import make_plan, staging_bytes, unchanging
from moepack.runtime.policies.contract import Versions
from moepack.runtime.residency.live import Live
from moepack.runtime.store.files import BackingStore

from .serving import Serving

log = logging.getLogger("moepack.runtime")


def attach(
    model: Any,
    bundle: Bundle,
    policy_text: str | None,
    device_memory: int | None,
    workload: Workload,
    host_memory: int | None = None,
    host_rate: int | None = None,
    host_threads: int | None = None,
) -> None:
    """Give every experts module its handles under a policy.

    Raises:
        InputError: when the policy does not fit the bundle, or its versions do not fit the device memory.
        BundleError: when an extent is damaged.
    """
    devices = [
        next(model.get_submodule(layer.module.rpartition(".")[0]).parameters()).device for layer in bundle.layers
    ]
    if any(device.type == "meta" for device in devices):
        raise InputError(
            "device_map puts layers on the host or the disk, which a bundle does not do: where its experts do not fit, "
            "give device= and device_memory= instead"
        )
    policy = choose_policy(policy_text, bundle, devices, device_memory is not None)
    fixed, needs = Fixed(dense_bytes(model)), None
    if device_memory is not None:
        fixed, needs = _held_back(model, bundle, devices[0], workload, fixed)
    live: Live | None = None
    tracker: BudgetTracker | None = None
    if policy.is_live:
        assert device_memory is not None
        plan = make_plan(bundle, policy.options, fixed.total, device_memory, torch_cuda.is_gpu(devices[0]))
        live = Live(bundle, policy, plan, devices, host_memory, host_rate, host_threads)
        activations = fixed.activations + live.plan.workspace
        fixed = replace(fixed, staging=live.plan.staging, activations=activations, window=live.plan.window)
        layers, tracker = live.layers, live.tracker
    else:
        table, needed = unchanging(bundle, policy, fixed, device_memory)
        if device_memory is not None:
            tracker = BudgetTracker(device_memory, fixed.total)
            tracker.try_reserve("experts", needed)
        layers = load_map(bundle, table, devices)
    try:
        _hand_over(model, bundle, Serving(bundle, str(policy), layers, fixed, device_memory, live, tracker), needs)
    except BaseException:
        if live is not None:
            live.close()
        raise


def _hand_over(model: Any, bundle: Bundle, serving: Serving, needs: Needs | None) -> None:
    """Let the model's passes read the experts, and watch them."""
    if serving.budget_bytes is not None and serving.layers[0].of.device.type == "cpu":
        glibc.own(model)
        glibc.bound()
        glibc.trim()
    log.info("%s", serving.fixed)
    for layer, experts in zip(bundle.layers, serving.layers, strict=True):
        module = model.get_submodule(layer.module)
        module._moepack, experts.number = experts, enter(module)
    model.requires_grad_(False)  # a bundle is for inference: who trains something beside it says what
    model.moepack = serving
    serving.watch(model)
    if needs is not None:
        serving.watch_caches(model, needs)


def _held_back(
    model: Any, bundle: Bundle, device: torch.device, workload: Workload, fixed: Fixed
) -> tuple[Fixed, Needs]:
    """M_fixed without a staging buffer, and what was measured for it."""
    needs, _ = measure(bundle, model.config, model.dtype, device, workload)
    activations = needs.activations
    if device.type == "cuda":
        activations = max(activations, on_cuda(model, bundle.layers, device, needs))
    return Fixed(fixed.dense, needs.kv_bytes, activations), replace(needs, activations=activations)


def load_map(bundle: Bundle, table: Versions, devices: Sequence[torch.device]) -> list[LayerExperts]:
    """The layers' experts under a map that never changes, each layer's read into one range of host memory.

    Raises:
        BundleError: when an extent is damaged.
    """
    store, versions = BackingStore(bundle), bundle.manifest.versions
    served = [v for v in versions if any(v.name in row for row in table)]
    host = CpuDevice(max(staging_bytes(bundle, v) for v in served), threads=None)
    layers = []
    try:
        with store.reading_ahead((name, p, e) for p, row in enumerate(table) for e, name in enumerate(row)):
            for p, (described, row, device) in enumerate(zip(bundle.layers, table, devices, strict=True)):
                layer = LayerExperts(described, versions, device)
                chosen = [bundle.manifest.version(name) for name in row]
                sizes = [align(resident_size(described.matrices, v), SECTION) for v in chosen]
                room = host.memory(sum(sizes)).tensor
                for e, (version, block) in enumerate(zip(chosen, room[: sum(sizes)].split(sizes), strict=True)):
                    copied = host.fetch(partial(store.stored, version.name, p, e), block, described, version)
                    copied.wait()
                    if copied.error is not None:
                        raise copied.error
                    layer.publish(e, layer.of.over(version, block.to(device)))
                if device.type != "cpu":
                    layer.current.device_table()  # now, and not in the capture of a graph
                layers.append(layer)
    finally:
        host.close()
        store.close()
    return layers
