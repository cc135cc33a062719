"""The best version of every expert in pinned host memory, beside the base: passes choose which experts run at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moepack.runtime.devices.contract import Completion, Device
from moepack.runtime.experts.critical import Critical
from moepack.runtime.experts.handles import Handle, LayerExperts
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.plan import Plan
from moepack.runtime.policies.contract import Key
from moepack.runtime.policies.placements import Where
from moepack.runtime.policies.reducers import Reducer
from moepack.runtime.store.files import BackingStore
from moepack.runtime.store.loading import AHEAD, in_order, loading

from .opening import version_of
from .pools import Block, Pool


def pin_best(
    plan: Plan,
    layers: Sequence[LayerExperts],
    devices: tuple[Device, Device],
    host: BudgetTracker,
    store: BackingStore,
    by: Callable[[bool], tuple[Reducer, ...]],
) -> None:
    """Load them, and let the layers choose, if the plan has shares of critical experts (`Plan.critical`).

    Args:
        plan: of the model.
        layers: the model's layers; set are `ServedLayer.critical` and `second`.
        devices: whose kernels read the memory, and what reads files into it.
        host: the budget of host memory.
        store: where the extents are.
        by: `LiveOptions.critical_by`.

    Raises:
        BundleError: if one of them is damaged.
        InputError: where the system does not pin so much memory.
    """
    if not plan.critical:
        return
    (device, reader), version, count = devices, version_of(plan, 0), loading()
    pools = dict[int, Pool]()
    for size in {row[0] for row in plan.blocks}:
        blocks = sum(n for n, row in zip(plan.experts, plan.blocks, strict=True) if row[0] == size)
        memory = device.pinned_memory(size, blocks)
        pools[size] = Pool(f"{version}@{Where.PINNED.value}/{size}", size, blocks, host, memory, on_host=True)
    taken: list[tuple[Key, Block]] = []
    for p, experts in enumerate(plan.experts):
        for e in range(experts):
            block = pools[plan.blocks[p][0]].allocate()
            assert block is not None, "host memory was checked"
            taken.append(((p, e), block))

    def start(item: tuple[Key, Block]) -> Completion:
        (p, e), block = item
        found = layers[p].of.layer
        return reader.fetch(lambda: store.stored(version.name, p, e), block.tensor, found, version)

    for ((p, e), block), fetch in in_order(taken, start, AHEAD):
        if fetch is not None and fetch.error is not None:
            raise fetch.error
        block.filled()
        count.add(store.stored(version.name, p, e).size)
    best: list[list[Handle]] = [[] for _ in layers]
    for (p, _), block in taken:  # all is pinned by now, where it stays
        of = layers[p].of
        bytes_of: Tensor = block.tensor[: version.resident_size(of.layer.matrices)]
        best[p].append(of.over(version, bytes_of, Where.PINNED))
    for layer, share, handles in zip(layers, plan.critical, best, strict=True):
        layer.of.critical = made = Critical(layer.of, share, tuple(handles), by)
        layer.of.second = made.seconds
