"""Measure what speed.py needs of this machine, in a second: memory, kernels, the disk, and calls.

`memory_rate` and `rates` import torch only to measure what the user's cache does not have.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moepack.pack.reader import Bundle
from moepack.pack.spec import Matrix, Version
from moepack.runtime.planning.measured import rate
from moepack.runtime.store.page_file import READERS

from .speed import Rates, TokenBytes

if TYPE_CHECKING:
    from moepack.runtime.store.files import BackingStore, Stored

READ = 64 << 20  # bytes that a rate is measured on: more than a core's caches hold
# A rate is the best of so many: other programs, and a processor that has just woken, slow some. A tenth of the first
# 40 small operations took twice as long for up to 50 ms.
RUNS = 20
CALL_RUNS = 200
DISK_RUNS = 3
# A layer's time beside reading weights, in small operations of torch: a token of Qwen3-30B-A3B's 48 layers took 89 ms
# at w4 in memory and 87 ms at w2, on two threads of an EPYC that need 40 to 50 of them for reading (docs/limited.md).
CALLS = 450


def memory_rate(device: str) -> float | None:
    """Return the bytes a second that a device reads (devices/reading.py); None for one that is not here."""
    if device == "cpu":
        return rate("memory", lambda: _read_rate(device))
    return _read_rate(device)


def _read_rate(device: str) -> float | None:
    import torch

    from moepack.runtime.devices.reading import read_rate

    return read_rate(torch.device(device))


def rates(bundle: Bundle, token: TokenBytes, memory: float) -> Rates:
    """Measure this machine for a token; `memory` is the rate at which all threads read.

    It stands for the disk's where the bundle's files are not here.
    """
    version = bundle.manifest.version(token.version)
    here = (bundle.path / bundle.layers[0].file(version.name)).exists()
    place = str(bundle.path.resolve()), version.name
    readers = max(1, min(READERS, round(token.in_flight)))
    kernels = rate(("kernels", version, bundle.layers[0].matrices), partial(kernel_rate, bundle, version))
    disk = moves = None
    if token.fetched and here:
        disk = rate(("disk", place, readers), partial(disk_rate, bundle, version, readers))
    if token.moved != 0 and here:
        moves = rate(("moves", place), partial(move_rate, bundle, version))
    calls = rate("calls", call_seconds)
    assert calls is not None
    return Rates(memory, kernels or memory, disk or memory, calls, moves or memory)


def kernel_rate(bundle: Bundle, version: Version) -> float | None:
    """Return the bytes a second that the kernels multiply by, one token and many experts; `None` without kernels."""
    import torch

    from moepack.runtime.devices.cpu import CpuMemory
    from moepack.runtime.experts import backends
    from moepack.runtime.kernels.forms import handle

    if backends.library() is None:
        return None
    from moepack.runtime.kernels.affine_native import DTYPES, LayerForms, product

    matrices = tuple(Matrix(m.name, m.rows, m.cols) for m in bundle.layers[0].matrices)
    size = version.resident_size(matrices)
    count = max(1, READ // size)
    step = -(-size // 64) * 64
    memory = CpuMemory(count * step)
    memory.take(0, count * step)
    memory.tensor.fill_(0x3C)  # small scales, and no NaN
    forms = LayerForms(matrices, (version,))
    at = memory.tensor.data_ptr()
    handles = np.array([handle(at + i * step, 0) for i in range(count)], np.uint64)
    index = torch.arange(count)[:, None]
    seconds = 0.0
    for n, m in enumerate(matrices):  # a version's matrices may differ in bits
        x = torch.ones(count, m.cols, dtype=DTYPES[-1])
        out = torch.empty(count, m.rows, dtype=DTYPES[-1])
        best = float("inf")
        for _ in range(RUNS):
            began = time.perf_counter()
            product(forms, n, handles, x, index, out, None, torch.get_num_threads())
            best = min(best, time.perf_counter() - began)
        seconds += best
    return count * size / seconds


def disk_rate(bundle: Bundle, version: Version, readers: int) -> float:
    """Return the bytes a second that extents are fetched at, from where they are, by `readers` threads.

    Extents of all layers are read, past the page cache or from it, as serving would, and not digested: serving digests
    each once.
    """
    from moepack.runtime.devices.cpu import CpuMemory
    from moepack.runtime.store.files import BackingStore

    store = BackingStore(bundle, direct=True)
    with contextlib.closing(store), ThreadPoolExecutor(readers) as pool:
        chosen, size = _drawn(store, version, DISK_RUNS * readers, DISK_RUNS * READ)
        rooms = CpuMemory(readers * size)
        rooms.take(0, readers * size)
        rooms.tensor.fill_(0)
        free = list(rooms.tensor.numpy().reshape(readers, size))

        def read(i: int) -> None:
            room = free.pop()
            stored = chosen[i]
            got = 0
            while got < stored.size:
                got += stored.read_some(room.data[got : stored.size], got)
            free.append(room)

        def read_all(run: range) -> float:
            began = time.perf_counter()
            list(pool.map(read, run))
            return sum(chosen[i].size for i in run) / (time.perf_counter() - began)

        return max(read_all(range(n, len(chosen), DISK_RUNS)) for n in range(min(DISK_RUNS, len(chosen))))


def move_rate(bundle: Bundle, version: Version) -> float:
    """Return the bytes a second at which one thread fetches extents as moves do: digested, into fresh memory."""
    from moepack.runtime.devices.cpu import CpuMemory
    from moepack.runtime.store.files import BackingStore

    store = BackingStore(bundle, direct=True)
    with contextlib.closing(store):
        chosen, size = _drawn(store, version, 1, READ)
        room = CpuMemory(len(chosen) * size)
        began = time.perf_counter()
        for i, stored in enumerate(chosen):
            room.take(i * size, size)
            stored.read_into(room.tensor.numpy()[i * size : (i + 1) * size])
        return sum(stored.size for stored in chosen) / (time.perf_counter() - began)


def _drawn(store: BackingStore, version: Version, least: int, total: int) -> tuple[list[Stored], int]:
    """Draw extents of all layers: `total` bytes of them, and at least `least`; return the largest's size too."""
    rng = np.random.default_rng(0)
    layers = store.bundle.layers
    drawn = [(version.name, p, int(rng.integers(x.experts))) for _ in range(8) for p, x in enumerate(layers)]
    chosen = [store.stored(*place) for place in dict.fromkeys(drawn)]
    size = max(stored.size for stored in chosen)
    return chosen[: max(least, total // size)], size


def call_seconds() -> float:
    """Return the seconds that a layer's calls take beside reading weights: CALLS small operations."""
    import torch

    x = torch.ones(1)
    best = float("inf")
    for _ in range(CALL_RUNS):
        began = time.perf_counter()
        for _ in range(100):
            x = x + 0.0
        best = min(best, (time.perf_counter() - began) / 100)
    return CALLS * best
