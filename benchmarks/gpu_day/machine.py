"""What the machine is, and its rates: copies from host to device and inside the device, and a launch."""

import time

import torch

from benchmarks.kernels.gpu import seconds

from .rows import Entry, Measured, Rows, Setting


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    return {
        "copy from pinned memory": Entry(lambda: from_host(setting)),
        "copy inside the device": Entry(lambda: inside(setting), on_cpu=True),
        "launch": Entry(lambda: launch(setting), on_cpu=True),
    }


def from_host(setting: Setting) -> Measured:
    """Bytes a second of one copy from pinned memory."""
    size = 1 << (20 if setting.small else 30)
    there = torch.empty(size, dtype=torch.uint8, device=setting.torch)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=setting.on_gpu)
    took = seconds(lambda: there.copy_(host, non_blocking=True), 5)
    return Measured(size / took / 1e9, "GB/s")


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
