"""The rates at which experts reach a GPU's kernels, measured on extents of the bundle (fluxmoe, section 4.2).

Packed extents are decoded on the device. Stored ones first come from the host, here from its page cache,
over the bus.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from moepack.pack.reader import Bundle
from moepack.runtime.devices import torch_cuda
from moepack.runtime.devices.torch_cuda import LOADS
from moepack.runtime.experts.packed import GpuPackedExtent, parts_of
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.planning.paging import LOADERS, by_placement, paged_version, rate
from moepack.runtime.policies.contract import Ladder
from moepack.runtime.store.files import BackingStore

EXPERTS = 8  # experts decoded in one launch, as those of one token are


def gpu_rates(bundle: Bundle, ladder: Ladder, device: torch.device) -> tuple[float, ...]:
    """Measure the bytes of weights a second that each placement of a ladder gives; infinity for resident ones.

    It reads extents of the bundle's first layer. Their memory goes back to the device, as it is not part of the budget.
    Raises BundleError when one of the extents is damaged.
    """
    version = paged_version(ladder)
    assert version is not None
    gpu = torch_cuda.TorchGpu(device)
    store = BackingStore(bundle)
    layer = bundle.layers[0]
    forms = make_forms(layer.matrices, version)
    size = version.resident_size(layer.matrices)
    try:
        stored = [store.stored(version.name, 0, e % layer.experts) for e in range(max(EXPERTS, LOADERS))]
        pinned = [gpu.pinned(s.size) for s in stored]
        there = [gpu.memory(s.size) for s in stored]
        outs = [gpu.memory(size) for _ in stored]

        def bring(number: int, stream: int) -> None:
            with gpu.loading(stream):
                stored[number].read_into(pinned[number].numpy())
                gpu.copy(there[number], pinned[number])

        def decode(numbers: Iterable[int], stream: int) -> None:
            jobs = []
            with gpu.loading(stream):
                for i in numbers:
                    parts = parts_of(layer, pinned[i].numpy())
                    packed = GpuPackedExtent(there[i], layer, forms, stored[i].where, parts)
                    jobs += [packed.job(m, outs[i], gpu.copy) for m in range(len(layer.matrices))]
                gpu.decode(jobs)
                gpu.record().synchronize()

        def both(number: int) -> None:
            bring(number, number % LOADS)
            decode([number], number % LOADS)

        for number in range(len(stored)):
            bring(number, 0)
        packed = size * EXPERTS * rate(lambda _: decode(range(EXPERTS), 0))
        with ThreadPoolExecutor(LOADERS) as pool:
            read = size * LOADERS * rate(lambda _: list(pool.map(both, range(LOADERS))))
    finally:
        store.close()
    for tensors in (pinned, there, outs):  # the functions above still hold the lists
        tensors.clear()
    torch.cuda.empty_cache()  # does nothing before CUDA is used
    return by_placement(ladder, packed, read)
