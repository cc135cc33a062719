"""Measure the rate at which a device reads its memory: no kernel reads weights faster."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np
import torch

from .cpu import CpuMemory

READ = 128 << 20  # bytes read: more than a core's caches hold


def read_rate(device: torch.device) -> float | None:
    """Return bytes a second, the best of five, or `None` if the machine lacks the device.

    On a CPU the compiled kernels read as they read weights: with all their threads, from huge pages.
    """
    try:
        run = _by_kernels() if device.type == "cpu" else _by_sum(device)
    except (RuntimeError, AssertionError):
        return None
    return READ / min(timeit.repeat(run, number=1, repeat=5))


def _by_sum(device: torch.device) -> Callable[[], object]:
    block = torch.ones(READ // 4, dtype=torch.float32, device=device)
    return lambda: float(block.sum())


def _by_kernels() -> Callable[[], object]:
    try:
        from moepack.runtime.kernels.affine_native import read
    except (ImportError, OSError):
        return _by_sum(torch.device("cpu"))
    memory = CpuMemory(READ)
    memory.take(0, READ)
    memory.tensor.fill_(1)
    return lambda: read(np.array([memory.tensor.data_ptr()], np.uint64), READ)
