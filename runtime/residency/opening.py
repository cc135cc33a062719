"""Open what a plan needs: the device, pools of memory on it and on the host, slots of experts decoded in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.runtime.devices import torch_cuda
from moepack.runtime.devices.contract import Device, Memory
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.experts import backends
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.kernels.forms import compiled
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.capacity import base_bytes
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.paging import coded_version, in_place_size
from moepack.runtime.planning.plan import Plan
from moepack.runtime.policies.contract import Key
from moepack.runtime.policies.placements import ON_HOST, READ_THERE, Where
from moepack.runtime.store.files import BackingStore
from moepack.runtime.store.host_limit import host_limits
from moepack.runtime.store.page_file import READERS

from .pools import Pool

if TYPE_CHECKING:
    from moepack.runtime.paging.in_place import PagesInPlace

    from .residency import Residency

LACKING = "it is not installed here (pip install triton)"


def stored_bytes(bundle: Bundle, plan: Plan, key: Key, version: int) -> int:
    """Return the bytes of an expert's extent of a placement's version in the bundle's files."""
    return bundle.layer_file(plan.version(version).name, key[0]).extent_size(key[1])


def name_of(bundle: Bundle, plan: Plan, key: Key, version: int) -> str:
    """Return how errors name an expert's placement."""
    return f"{bundle.path}: layer {bundle.layers[key[0]].index}, expert {key[1]}, version {plan.ladder[version]}"


def second_buffer(plan: Plan) -> tuple[Plan, int]:
    """Return the plan, and how many staging buffers it has: two if they fit, to copy and decode at the same time."""
    two = replace(plan, fixed=plan.fixed + plan.staging, staging=2 * plan.staging)
    least = two.fixed + base_bytes(plan.sizes, plan.experts) + plan.reserve + plan.demand + plan.present
    return (two, 2) if least <= plan.budget else (plan, 1)


def open_device(
    device: torch.device,
    store: BackingStore,
    plan: Plan,
    buffers: int,
    on_event: Callable[[], None],
    host: int | None,
    waited_for: bool = False,
) -> Device:
    """Open a device with `buffers` staging buffers. The device calls `on_event` after each copy.

    `host` is the number of bytes of host memory that may be pinned. Experts that kernels read there come first; the
    rest holds extents, from which others are copied. Where passes wait for copies (`waited_for`), a CPU reads several
    extents at a time and decodes with all of torch's threads; otherwise one, to leave cores and disk to others.
    """
    if not torch_cuda.is_gpu(device):
        return CpuDevice(plan.staging, on_event, readers=READERS if waited_for else 1)
    from moepack.runtime.devices.cuda import open_cuda

    staging = plan.staging // buffers
    on_device = [v for v, placement in enumerate(plan.ladder) if placement.where is Where.DEVICE]
    # those that no GPU kernel decodes
    as_in_memory = [v for v in on_device if not (plan.version(v).plain and plan.version(v).entropy_coded)]
    largest = max([staging, *(row[v] for row in plan.sizes for v in as_in_memory)])
    if pinned := plan.on_host(*READ_THERE):
        host = max(0, (host_limits()["pinnable_bytes"] if host is None else host) - pinned)
    return open_cuda(store, plan.copied, device, largest, staging, buffers, on_event, host, bool(plan.window))


def check_devices(plan: Plan, policy: object, versions: Sequence[Version], devices: Sequence[torch.device]) -> None:
    """Raise InputError for layers' devices on which versions cannot change as planned.

    There must be one device. Only Triton's kernels decode BF16 on a GPU, and read pinned memory.
    """
    if len(set(devices)) > 1 or devices[0].type not in ("cpu", "cuda"):
        raise InputError(f"policy {policy}: versions change on one CPU or one CUDA device, not on {devices}")
    if not torch_cuda.is_gpu(devices[0]):
        return
    kernels = backends.backend(devices[0]) == "triton"
    on_device = [plan.version(v) for v, p in enumerate(plan.ladder) if p.where is Where.DEVICE]
    decodes = bool(plan.window) or any(v.entropy_coded and v.plain for v in on_device)
    if decodes and not kernels:
        raise InputError(f"policy {policy} needs Triton's kernels to decode BF16 on a GPU: {LACKING}")
    if any(p.where in READ_THERE for p in plan.ladder) and not (kernels and compiled(versions)):
        why = "a version of this bundle has none" if kernels else LACKING
        raise InputError(f"policy {policy}: kernels of Triton read pinned memory: {why}")


def check_host(bundle: Bundle, plan: Plan, host_memory: int | None, on_gpu: bool) -> None:
    """Raise TooSmallError unless host memory holds all experts at the largest placement there.

    Where the host runs some, which come and go, it must hold one block more. Pinned memory is never
    swapped: where a GPU is to read it, the default is what the system lets a process pin.
    """
    on_host = [v for v, placement in enumerate(plan.ladder) if placement.where in ON_HOST]
    one_more = [row[v] for row in plan.blocks for v in on_host if plan.ladder[v].where is Where.HOST]
    pinned = plan.on_host(*READ_THERE)
    least = plan.on_host(Where.HOST) + pinned + max(one_more, default=0)
    if host_memory is None and pinned and on_gpu:
        host_memory = host_limits()["pinnable_bytes"]
    if host_memory is not None and host_memory < least:
        names = "any of " + ", ".join(str(plan.ladder[v]) for v in on_host)
        raise TooSmallError(
            f"{bundle.path}: a host_memory of {host_memory} bytes does not hold every expert at {names}: the "
            f"least that would do is {least} bytes",
            least,
        )


def make_pools(
    plan: Plan, device: Device, tracker: BudgetTracker, host: BudgetTracker, can_shrink: bool
) -> dict[tuple[int, int], Pool]:
    """Make a pool for each block size of each placement that takes memory; return them by (index in the ladder, size).

    Where memory can be given back, it is taken only when used, so a pool is as large as it may ever need to be. Other
    memory is divided among pools once, as the plan says, with spare base blocks for demotions: then it is one range, as
    torch's allocator rounds up whatever it is asked for.
    """
    pools = {}
    whole = dict[tuple[int, int], tuple[str, int]]()
    for number, placement in enumerate(plan.ladder):
        on_host = placement.where in ON_HOST
        of, returnable = (host, True) if on_host else (tracker, can_shrink)
        for size in sorted({row[number] for row in plan.blocks} - {0}):
            mine = [p for p, row in enumerate(plan.blocks) if row[number] == size]
            blocks = sum(plan.experts[p] for p in mine)
            if returnable:
                blocks = min(blocks, of.budget // size)
            elif number < plan.base or not plan.keep:
                assert plan.most is not None
                spare = plan.spare_blocks if number == plan.base else 0
                blocks = sum(plan.most[p][number] for p in mine) + spare
            if not returnable:
                whole[number, size] = f"{placement}/{size}", blocks
                continue
            if placement.where in READ_THERE:
                memory = device.pinned_memory(size, blocks)
            else:
                memory = (device.host_memory if on_host else device.memory)(size * blocks)
            pools[number, size] = Pool(f"{placement}/{size}", size, blocks, of, memory, on_host)
    if whole:
        sizes = [size * blocks for (_, size), (_, blocks) in whole.items()]
        parts = device.memory(sum(sizes)).tensor[: sum(sizes)].split(sizes)
        for (key, (name, blocks)), part in zip(whole.items(), parts, strict=True):
            pools[key] = Pool(name, key[1], blocks, tracker, Memory(part))
    return pools


def open_stage(plan: Plan, layers: Sequence[LayerExperts], device: Device, residency: Residency) -> None:
    """Let passes of many tokens bring experts of pinned memory to the device, once all are loaded."""
    from moepack.runtime.devices.cuda import CudaDevice
    from moepack.runtime.experts.staged import Stage, StagedLayer

    assert isinstance(device, CudaDevice)
    stage = Stage(device.gpu, device.gpu.memory(plan.stage), plan.largest_pinned)
    for p, layer in enumerate(layers):
        base = [residency.entries[p, e].complete[plan.base].handle for e in range(plan.experts[p])]
        layer.of.staged = StagedLayer(stage, layer.of, base)


def open_in_place(plan: Plan, layers: Sequence[LayerExperts], device: Device) -> PagesInPlace:
    """Open the slots in which a GPU decodes experts while their layer runs."""
    from moepack.runtime.devices.cuda import CudaDevice
    from moepack.runtime.paging.in_place import PagesInPlace

    version = coded_version(plan.ladder)
    assert isinstance(device, CudaDevice) and version is not None
    size = in_place_size([layer.of.layer for layer in layers], version, plan.staging)
    return PagesInPlace(device, layers, version, size)
