"""Capture what a function asks of a GPU in a CUDA graph. The module is small, so that tests can replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Issue the work on the current stream, with the addresses that it was captured with."""


def capture(run: Callable[[], None], device: torch.device) -> Graph:
    """Capture what `run` issues, which does not take place; other threads may go on with work of their own.

    Raises RuntimeError for what no graph holds, such as a wait for the device.
    """
    made = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(made, capture_error_mode="thread_local"):
        run()
    return made
