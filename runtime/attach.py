"""Attach an open bundle to a model without experts: choose what fits the budget, and load the experts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.families.model_class import top_k
from moepack.pack.reader import Bundle
from moepack.pack.spec import SECTION, Version, align
from moepack.runtime.dense.file_rows import FileRows
from moepack.runtime.dense.linears import serve as serve_dense
from moepack.runtime.dense.mapped import own
from moepack.runtime.devices import glibc, graphs, torch_cuda
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.devices.migration import HostEvent
from moepack.runtime.devices.reading import read_rate
from moepack.runtime.experts import backends
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.experts.op import enter
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.choice import choose_policy
from moepack.runtime.planning.fixed import Fixed, MeasuredNeeds, rounding
from moepack.runtime.planning.matrices import dense_bytes
from moepack.runtime.planning.measure import measure, on_cuda
from moepack.runtime.planning.options import LoadOptions, Workload
from moepack.runtime.planning.plan import make_plan, staging_bytes, unchanging
from moepack.runtime.planning.sizes import parse_size
from moepack.runtime.planning.token_cost import looked_up, within
from moepack.runtime.policies.contract import Versions
from moepack.runtime.residency.manager import ResidencyManager
from moepack.runtime.store.files import BackingStore
from moepack.runtime.store.loading import in_order, loading
from moepack.runtime.store.read_ahead import Place

from .serving import Serving

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("moepack.runtime")


def attach(model: PreTrainedModel, bundle: Bundle, options: LoadOptions, dense: Sequence[Version] = ()) -> None:
    """Load a bundle's experts into a model under a policy, and give dense matrices their versions, `dense`.

    Raises:
        InputError: when the policy does not fit the bundle, or its versions do not fit the device memory.
        BundleError: when an extent is damaged.
    """
    from moepack.runtime.kv.growing import layer_bits  # which imports transformers

    device_memory = options.budget
    workload = options.workload
    devices = [
        next(model.get_submodule(layer.module.rpartition(".")[0]).parameters()).device for layer in bundle.layers
    ]
    compiled = all(device.type == "cpu" and backends.backend(device) == "native" for device in devices)
    bits = layer_bits(model, workload.kv, compiled)
    kernels = compiled and backends.serves_dense()
    on_cpu = devices[0].type == "cpu"
    in_place = device_memory is not None and on_cpu
    if in_place:
        glibc.bound()  # at once: memory freed while loading goes back
    if on_cpu:  # what is mapped changes with its file, and a file that is cut ends the process
        own(model, bundle, options.memory is not None)  # before matrices move to where kernels read them
    serve_dense(model, bundle, dense, compiled, kernels, in_place)
    if (bound := options.bound) is not None:
        kv = measure(bundle, model.config, model.dtype, devices[0], workload, dense).kv if workload.kv_tokens else None
        in_file = any(isinstance(module, FileRows) for module in model.modules())
        read = max(0, dense_bytes(model) - (0 if in_file else looked_up(model.config)))
        read += kv.bytes(workload.kv_tokens) if kv else 0
        bundle = within(bundle, bound, read, top_k(model.config), partial(read_rate, devices[0]))
    policy = choose_policy(options.policy, bundle, [str(device) for device in devices], device_memory is not None)
    replaced = _replaced(model, bundle) if kernels else {}
    if all(torch_cuda.is_gpu(d) and backends.backend(d) == "triton" for d in devices) and backends.serves_dense():
        replaced = _replaced_on_gpu(model, bundle)
    fixed = Fixed(dense_bytes(model))
    needs = None
    if device_memory is not None:
        fixed, needs = _held_back(model, bundle, devices, workload, dense, fixed, policy.is_live)
    manager: ResidencyManager | None = None
    tracker: BudgetTracker | None = None
    if policy.is_live:
        assert device_memory is not None and needs is not None
        host = parse_size(options.host_memory), parse_size(options.host_rate), options.host_threads
        on_gpu = torch_cuda.is_gpu(devices[0])
        plan = make_plan(bundle, policy.options, fixed.total, device_memory, on_gpu, host[0], needs.ahead)
        manager = ResidencyManager(bundle, policy, plan, devices, *host)
        activations = fixed.activations + manager.plan.workspace
        fixed = replace(fixed, activations=activations, **manager.plan.parts)
        layers = manager.layers
        tracker = manager.tracker
    else:
        table, needed = unchanging(bundle, policy, fixed, device_memory)
        if device_memory is not None:
            tracker = BudgetTracker(device_memory, fixed.total)
            tracker.try_reserve("experts", needed)
        layers = load_map(bundle, table, devices, in_place)
    try:
        serving = Serving(model, bundle, str(policy), layers, fixed, manager, tracker, replaced, bits)
        _hand_over(model, bundle, serving, needs, dense)
    except BaseException:
        if manager is not None:
            manager.close()
        raise


def _replaced_on_gpu(model: PreTrainedModel, bundle: Bundle) -> dict[str, int]:
    """Let Triton's kernels run norms, routers and what is between attention's products; return as `_replaced` does."""
    from moepack.runtime.dense.gpu_latent import serve_gpu_latents
    from moepack.runtime.dense.gpu_linear_attention import serve_gpu_linear_attention
    from moepack.runtime.dense.gpu_modules import serve_norms, serve_routers
    from moepack.runtime.dense.gpu_projections import serve_gpu_projections

    modules = serve_norms(model) | serve_routers(model, bundle.layers)
    modules |= serve_gpu_projections(model) | serve_gpu_latents(model)
    return modules | serve_gpu_linear_attention(model)


def _replaced(model: PreTrainedModel, bundle: Bundle) -> dict[str, int]:
    """Let the compiled kernels run norms, routers and attention; return the number of modules of each class."""
    from moepack.runtime.dense.borrowed import serve_attention, serve_routers
    from moepack.runtime.dense.decoder_layers import serve_layers
    from moepack.runtime.dense.indexer import serve_indexers
    from moepack.runtime.dense.latent import serve_latents
    from moepack.runtime.dense.latent_projections import serve_latent_projections
    from moepack.runtime.dense.linear_attention import serve_linear_attention, serve_scans
    from moepack.runtime.dense.norms import serve_norms
    from moepack.runtime.dense.projections import serve_projections

    norms = serve_norms(model)
    routers = serve_routers(model, [layer.module for layer in bundle.layers])
    attention = serve_attention(model) | serve_latents(model) | serve_linear_attention(model)
    attention |= serve_scans(model) | serve_indexers(model)
    attention |= serve_projections(model) | serve_latent_projections(model)
    return norms | routers | attention | serve_layers(model)


def _hand_over(
    model: Any, bundle: Bundle, serving: Serving, needs: MeasuredNeeds | None, dense: Sequence[Version]
) -> None:
    """Connect the model's modules to the experts that are served, and keep its passes inside the budget."""
    backends.prepare(model.dtype, (*serving.layers[0].of.versions, *dense), serving.layers[0].of.device)
    if needs is not None and serving.layers[0].of.device.type == "cpu":
        glibc.trim()
    log.info("%s", serving.fixed)
    for layer, experts in zip(bundle.layers, serving.layers, strict=True):
        module = model.get_submodule(layer.module)
        module._moepack, experts.number = experts, enter(module)
    model.requires_grad_(False)  # a bundle is for inference: adapters beside it are enabled by name
    model.moepack = serving
    if needs is not None:
        serving.watch_caches(model, needs)


def _held_back(
    model: PreTrainedModel,
    bundle: Bundle,
    devices: Sequence[torch.device],
    workload: Workload,
    dense: Sequence[Version],
    fixed: Fixed,
    live: bool,
) -> tuple[Fixed, MeasuredNeeds]:
    """Measure what passes need; return the bytes beside experts (M_fixed without a staging buffer), and the needs."""
    from moepack.runtime.planning.skeleton import latent_layers  # which imports transformers

    device = devices[0]
    taken = 0
    unserved = (m for _, m in latent_layers(model) if getattr(m, "_moepack_latent", None) is None)
    own = device.type == "cpu" and next(unserved, None) is not None
    needs = measure(bundle, model.config, model.dtype, device, workload, dense, own)
    activations = needs.activations
    if device.type == "cuda":
        activations = max(activations, on_cuda(model, bundle.layers, device, needs))
        activations += graphs.wanted() * graphs.memory(model)
        taken = rounding(len(set(devices)), live)
    return Fixed(fixed.dense + taken, needs.kv_bytes, activations), replace(needs, activations=activations)


def load_map(
    bundle: Bundle, table: Versions, devices: Sequence[torch.device], direct: bool = False
) -> list[LayerExperts]:
    """Load experts at the versions of `table`, which never change, each layer into one range of host memory.

    A GPU's experts lie in one range a device: torch's allocator rounds up whatever it is asked for.

    Args:
        direct: whether files are read past the page cache.

    Raises:
        BundleError: when an extent is damaged.
    """
    store = BackingStore(bundle, direct=direct)
    versions = bundle.manifest.versions
    count = loading()
    served = [v for v in versions if any(v.name in row for row in table)]
    coded = {v.name for v in served if v.entropy_coded}
    host = CpuDevice(max(staging_bytes(bundle, v) for v in served), threads=None)
    places = [(name, p, e) for p, row in enumerate(table) for e, name in enumerate(row)]
    layers = [LayerExperts(x, versions, device) for x, device in zip(bundle.layers, devices, strict=True)]
    chosen = [[bundle.manifest.version(name) for name in row] for row in table]
    sizes = [
        [align(v.resident_size(x.matrices), SECTION) for v in row] for x, row in zip(bundle.layers, chosen, strict=True)
    ]
    away = {device: [p for p, d in enumerate(devices) if d == device] for device in devices if device.type != "cpu"}
    arenas = {
        device: iter(_split(torch.empty(sum(sum(sizes[p]) for p in of), dtype=torch.uint8, device=device), sizes, of))
        for device, of in away.items()
    }

    def rooms() -> Iterator[tuple[Place, Version, Tensor]]:
        for p, row in enumerate(chosen):
            memory = host.memory(sum(sizes[p]))
            memory.take(0, sum(sizes[p]))
            for e, (version, block) in enumerate(zip(row, _split(memory.tensor, sizes, [p]), strict=True)):
                yield (version.name, p, e), version, block

    def start(room: tuple[Place, Version, Tensor]) -> HostEvent:
        place, version, block = room
        return host.fetch(partial(store.stored, *place), block, bundle.layers[place[1]], version)

    try:
        count.expect(sum(store.stored(*place).size for place in places))
        with store.reading_ahead(place for place in places if place[0] in coded):
            for (place, version, block), fetch in in_order(rooms(), start):
                if fetch is not None and fetch.error is not None:
                    raise fetch.error
                layer = layers[place[1]]
                there = block if layer.of.device not in arenas else next(arenas[layer.of.device]).copy_(block)
                layer.publish(place[2], layer.of.over(version, there))
                count.add(store.stored(*place).size)
    finally:
        host.close()
        store.close()
    for layer in layers:
        if layer.of.device.type != "cpu":
            layer.current.device_table()  # made now: it cannot be made in a graph's capture
    return layers


def _split(memory: Tensor, sizes: Sequence[Sequence[int]], layers: Sequence[int]) -> Sequence[Tensor]:
    """Cut a range of memory into the blocks of some layers' experts, in order."""
    every = [size for p in layers for size in sizes[p]]
    return list(memory[: sum(every)].split(every))
