"""What the machine is, and its rates: host to device, by copies and by kernels; inside the device; a launch."""

from __future__ import annotations

import time
from functools import partial
from itertools import product

import numpy as np
import torch

from benchmarks.kernels.gpu import replayed, seconds
from moepack.pack.codec.bits import Buffer
from moepack.pack.spec import Matrix
from moepack.runtime.devices import cuda
from moepack.runtime.kernels import affine_triton
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.store import pinning
from moepack.runtime.store.cudart import Cudart

from .bundles import VERSIONS
from .rows import Entry, Measured, Rows, Setting

PROGRAMS = (24, 192)


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    return {
        "doctor: problems": Entry(lambda: doctor(setting), on_cpu=True),
        "copy from pinned memory": Entry(lambda: from_host(setting)),
        "copy inside the device": Entry(lambda: inside(setting), on_cpu=True),
        "launch": Entry(lambda: launch(setting), on_cpu=True),
    } | {
        f"kernel, {way} memory, {version}, {programs} programs": Entry(partial(reads, setting, way, version, programs))
        for way, version, programs in product(WAYS, ("w4", "w8"), PROGRAMS)
    }


def doctor(setting: Setting) -> Measured:
    """What `moepack doctor` finds."""
    from moepack.reports import doctor as report

    found = report.doctor(setting.work)
    return Measured(len(found["problems"]), "problems", limit=0, more=found)


def from_host(setting: Setting) -> Measured:
    """Bytes a second of one copy from pinned memory."""
    size = 1 << (20 if setting.small else 30)
    there = torch.empty(size, dtype=torch.uint8, device=setting.torch)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=setting.on_gpu)
    took = seconds(lambda: there.copy_(host, non_blocking=True), 5)
    return Measured(size / took / 1e9, "GB/s")


def reads(setting: Setting, way: str, version: str, programs: int) -> Measured:
    """Gigabytes a second at which products of one token read matrices in pinned memory, launch after launch in a graph.

    Matrices have 32 rows for each program, and together take over four times the L2. The first one's product is
    compared with that of a copy in device memory. Beside the rate stands that of one copy of the same memory to the
    device.

    Args:
        setting: where it is measured.
        way: "registered" or "allocated": how the memory was pinned.
        version: of the matrices: the layout that kernels read.
        programs: of a launch: 24 have the rows of one expert of Qwen3-30B-A3B, 192 those of eight.
    """
    matrix = Matrix("weight", affine_triton.DECODE.rows * programs, 128 if setting.small else 2048)
    encoding = VERSIONS[version]
    (form,), each = make_forms((matrix,), encoding), encoding.resident_size((matrix,))
    count = 2 if setting.small else 4 * setting.cache // each + 1
    calls = cuda.Cudart(torch.cuda.current_device() if setting.on_gpu else 0)  # type: ignore[attr-defined]  # replaced
    pinned = WAYS[way](calls, count * each)
    try:
        host = torch.from_numpy(pinned.bytes)
        x = torch.ones(1, matrix.cols, dtype=torch.bfloat16, device=setting.torch)
        out, right = (torch.empty(1, matrix.rows, dtype=x.dtype, device=setting.torch) for _ in range(2))
        there = host.to(setting.torch, copy=True)
        affine_triton.dense(matrix, form, there[:each], x, right)
        affine_triton.dense(matrix, form, host[:each], x, out)
        if not torch.equal(out, right):
            raise ValueError("a product from pinned memory is not that from device memory")

        def multiply() -> None:
            for extent in host.split(each):
                affine_triton.dense(matrix, form, extent, x, out)

        took, copied = seconds(replayed(multiply), 5), seconds(lambda: there.copy_(host, non_blocking=True), 5)
    finally:
        pinned.close()
    more = {"us a launch": took / count * 1e6, "copy GB/s": len(host) / copied / 1e9, "of the copy": copied / took}
    return Measured(len(host) / took / 1e9, "GB/s", more=more)


def _registered(calls: Cudart, size: int) -> pinning.Pinned:
    memory = pinning.anonymous(size)
    _fill(memory)
    return pinning.pin_filled(calls, memory)


def _allocated(calls: Cudart, size: int) -> pinning.Pinned:
    pinned = pinning.allocate(calls, size)
    _fill(pinned.bytes)
    return pinned


def _fill(memory: Buffer) -> None:
    """Put random numbers near 0.01 there, in BF16: scales are finite, whatever the codes are."""
    drawn = np.random.default_rng(0).integers(0x3C00, 0x4000, len(memory) // 2, np.uint16)
    memory.view(np.uint16)[:] = drawn


WAYS = {"registered": _registered, "allocated": _allocated}


def inside(setting: Setting) -> Measured:
    """Bytes a second that a copy reads and writes."""
    size = 1 << (20 if setting.small else 31)
    room = torch.empty(size, dtype=torch.uint8, device=setting.torch)
    took = seconds(lambda: room[: size // 2].copy_(room[size // 2 :]), 20)
    return Measured(size / took / 1e9, "GB/s")


def launch(setting: Setting) -> Measured:
    """Host time of a small operation, one after another, as a pass launches them."""
    x = torch.ones(16, device=setting.torch)
    count = 1000 if setting.small else 20_000
    for _ in range(100):
        x = x + 0.0
    if setting.on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        x = x + 0.0
    took = (time.perf_counter() - began) / count
    return Measured(took * 1e6, "us")
