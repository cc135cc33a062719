"""Capture what a function asks of a GPU in a CUDA graph, unless MOEPACK_CUDA_GRAPH=off forbids it.

The module is small, so that tests can replace it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from moepack.pack.errors import InputError

VARIABLE = "MOEPACK_CUDA_GRAPH"
MEMORY = 64 << 20  # bytes that the graphs of a model are held to take: cuBLAS's workspace, and a step's activations


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Issue the work on the current stream, with the addresses that it was captured with."""


def wanted() -> bool:
    """Whether passes may be captured. Raises InputError where the environment has another value than on or off."""
    found = os.environ.get(VARIABLE, "on")
    if found not in ("on", "off", ""):
        raise InputError(f"{VARIABLE}={found}: it may be `on` or `off`")
    return found != "off"


def stream(device: torch.device) -> int:
    """The current stream of a GPU, by its number."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def reserved(device: torch.device, emptied: bool = False) -> int:
    """Bytes that torch's allocator has taken of a GPU; if `emptied`, after it has given back what it kept for later."""
    if emptied and device.type == "cuda":
        torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def capture(run: Callable[[], None], device: torch.device, beside: Any = None) -> Graph:
    """Capture what `run` issues, which does not take place; other threads may go on with work of their own.

    `beside` is a graph that never runs at the same time, nor is its output needed any more when this one runs: their
    activations then share memory.

    Raises RuntimeError for what no graph holds, such as a wait for the device.
    """
    made, pool = torch.cuda.CUDAGraph(), None if beside is None else beside.pool()
    with torch.cuda.device(device), torch.cuda.graph(made, pool, capture_error_mode="thread_local"):
        run()
    return made
