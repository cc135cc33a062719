"""Capture what a function asks of a GPU in a CUDA graph, unless MOEPACK_CUDA_GRAPH=off forbids it.

The module is small, so that tests can replace it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import torch

from moepack.pack.errors import InputError

VARIABLE = "MOEPACK_CUDA_GRAPH"
MEMORY = 64 << 20  # bytes that a model's graphs may take: cuBLAS's workspace, a step's activations, executable graphs


def wanted() -> bool:
    """Whether passes may be captured. Raises InputError where the environment has another value than on or off."""
    found = os.environ.get(VARIABLE, "on")
    if found not in ("on", "off", ""):
        raise InputError(f"{VARIABLE}={found}: it may be `on` or `off`")
    return found != "off"


def memory(model: torch.nn.Module) -> int:
    """Return the bytes that a model's graphs may take: MEMORY, and beside it the largest map that a step unpacks."""
    maps = (getattr(module, "_moepack_latent", None) for module in model.modules())
    return MEMORY + max((getattr(found, "unpacks", 0) for found in maps), default=0)


_locks: dict[torch.device, threading.RLock] = {}
_streams: dict[torch.device, torch.cuda.Stream] = {}


def alone(device: torch.device) -> threading.RLock:
    """The lock of a device's captures, those of all models: its owner's captures and replays are measured alone."""
    return _locks.setdefault(device, threading.RLock())


def current_stream(device: torch.device) -> int:
    """The current stream of a GPU, by its number."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def reserved(device: torch.device, emptied: bool = False) -> int:
    """Return the GPU bytes that torch's allocator has reserved; with `emptied`, first release its unused blocks."""
    if emptied and device.type == "cuda":
        torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def outside(device: torch.device) -> int:
    """Bytes of a GPU that something other than torch's allocator has taken, executable graphs for example."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def capture(
    run: Callable[[], None], device: torch.device, beside: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Capture what `run` issues, which does not take place; other threads may go on with work of their own.

    Each device has one stream for captures, which take turns there. torch's own context has one stream a process, that
    of the first device, and leaves the thread on this stream if a capture cannot begin.

    `beside` is a graph that never runs at the same time, nor is its output needed any more when this one runs: their
    activations then share memory.

    Raises RuntimeError for what no graph holds, such as a wait for the device.
    """
    with alone(device), torch.cuda.device(device):
        stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            made = torch.cuda.CUDAGraph()
            pool = None if beside is None else beside.pool()
            try:
                made.capture_begin(pool, "thread_local")
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture's failure would hide its cause
                    made.capture_end()  # torch's allocator else goes on as in a capture
                raise
            made.capture_end()
    return made
