"""The rates at which experts reach a GPU's kernels, measured on extents of the bundle (fluxmoe, section 4.2).

Packed extents are decoded on the device. Stored ones come through the host and the bus first, here from the page cache.
It has not run on a GPU yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from moepack.pack.reader import Bundle
from moepack.runtime.devices import torch_cuda
from moepack.runtime.devices.torch_cuda import LOADS, TorchGpu
from moepack.runtime.experts.packed import GpuPackedExtent, parts_of
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.planning.paging import BRIEFLY, LOADERS
from moepack.runtime.policies.contract import Ladder
from moepack.runtime.policies.placements import PAGED, Where
from moepack.runtime.store.files import BackingStore


def measure_rates(bundle: Bundle, ladder: Ladder, gpu: TorchGpu, experts: int = 8) -> tuple[float, ...]:
    """Measure the bytes of weights a second that each placement of a ladder gives; infinity for resident ones.

    Takes memory for as many extents and one expert, and frees it.

    Args:
        bundle: its first layer's extents are read.
        ladder: with placements that are paged.
        gpu: where.
        experts: decoded in one launch, as a token's are.

    Raises:
        BundleError: when one of the extents is damaged.
    """
    version = next(p.version for p in ladder if p.where in PAGED)
    assert version is not None
    store = BackingStore(bundle)
    try:
        layer = bundle.layers[0]
        forms, size = make_forms(layer.matrices, version), version.resident_size(layer.matrices)
        stored = [store.stored(version.name, 0, e % layer.experts) for e in range(max(experts, LOADERS))]
        pinned = [gpu.pinned(s.size) for s in stored]
        there = [gpu.memory(s.size) for s in stored]
        outs = [gpu.memory(size) for _ in stored]

        def bring(number: int, loader: int) -> None:
            source = stored[number]
            with gpu.loading(loader % LOADS):
                source.read_into(pinned[number].numpy())
                gpu.copy(there[number], pinned[number])

        def decode(number: int) -> list[object]:
            parts = parts_of(layer, pinned[number].numpy())
            packed = GpuPackedExtent(there[number], layer, forms, outs[number], stored[number].where, parts)
            return [packed.job(m, gpu.copy) for m in range(len(layer.matrices))]

        def all_of_them() -> None:
            with gpu.loading(0):
                gpu.decode([job for number in range(experts) for job in decode(number)])
                gpu.record().synchronize()

        def one_each(pool: ThreadPoolExecutor) -> None:
            def both(loader: int) -> None:
                bring(loader, loader)
                with gpu.loading(loader % LOADS):
                    gpu.decode(decode(loader))
                    gpu.record().synchronize()

            list(pool.map(both, range(LOADERS)))

        for number in range(len(stored)):
            bring(number, 0)
        packed = size * experts * _rate(all_of_them)
        with ThreadPoolExecutor(LOADERS) as pool:
            read = size * LOADERS * _rate(partial(one_each, pool))
    finally:
        store.close()
    return tuple({Where.PACKED: packed, Where.STORED: read}.get(p.where, float("inf")) for p in ladder)


def _rate(work: Callable[[], object]) -> float:
    """Return how often a second `work` is done at its fastest, kernels compiled."""
    work()
    best, began, times = float("inf"), time.perf_counter(), 0
    while time.perf_counter() - began < BRIEFLY or times < 3:
        at = time.perf_counter()
        work()
        best, times = min(best, time.perf_counter() - at), times + 1
    return 1 / best


def gpu_rates(bundle: Bundle, ladder: Ladder, device: torch.device) -> tuple[float, ...]:
    """Measure the rates on a device, and return torch's free memory to it: it is not part of the budget."""
    rates = measure_rates(bundle, ladder, torch_cuda.TorchGpu(device))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rates
