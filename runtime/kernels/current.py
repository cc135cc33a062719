"""The current device of a thread, which Triton launches on and events are recorded on, whatever tensors they are given.

PyTorch's own operations choose the device of their tensors themselves.
"""

from __future__ import annotations

import contextlib

import torch


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the thread's current device inside the context; do nothing for another device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
