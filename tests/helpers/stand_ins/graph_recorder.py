"""What a forward pass asks of a device: torch's operations and Triton's launches, in order, and what no graph may hold.

A stand-in's memory is the host's, so what would wait for a GPU is known by the call: a value read (`item`, `tolist`,
`numpy`, `cpu`, a size that depends on values), and host data handed to the device but by a copy that does not block.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from triton.runtime.interpreter import GridExecutor

# Operations that make no node: views, and memory.
FREE = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "t",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "empty", "empty_like", "new_empty",
    "empty_strided", "_reshape_alias", "unfold", "diagonal", "narrow", "chunk", "_to_copy_view", "lift_fresh",
}  # fmt: skip
READS = {
    "_local_scalar_dense", "nonzero", "unique_consecutive", "_unique2", "masked_select", "bincount", "equal",
    "repeat_interleave", "is_nonzero",
}  # fmt: skip
METHODS = ("tolist", "numpy", "cpu", "item", "__array__", "nonzero", "pin_memory")


class GraphRecorder(TorchDispatchMode):
    """Records while it is entered; `broken` names what a captured graph cannot hold."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []  # of nodes, in order
        self.broken: list[str] = []
        self._from_host: set[int] = set()  # addresses of memory that the host wrote

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in READS or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.broken.append(name)
        if name == "lift_fresh":
            self.broken.append("host data given to the device")
        if name in ("copy_", "_to_copy"):
            source, blocks = args[-1] if name == "_to_copy" else args[1], True
            blocks = not ((kwargs or {}).get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if source.data_ptr() in self._from_host and blocks:
                self.broken.append(f"{name} from the host that blocks")
        if name.rstrip("_") not in FREE and name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def count(self) -> Counter[str]:
        """The nodes, by name."""
        return Counter(self.names)


@contextlib.contextmanager
def recording() -> Iterator[GraphRecorder]:
    """Record what this thread asks for."""
    made = GraphRecorder()
    run, from_numpy = GridExecutor.__call__, torch.from_numpy

    def launched(self, *args, **kwargs):
        made.names.append(f"triton:{self.fn.__name__}")
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    def host(array):
        with _disable_current_modes():
            out = from_numpy(array)
        made._from_host.add(out.data_ptr())
        return out

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", launched))
        stack.enter_context(patch.object(torch, "from_numpy", host))
        for name in METHODS:
            stack.enter_context(patch.object(torch.Tensor, name, _watched(made, name)))
        stack.enter_context(made)
        yield made


def _watched(recorder: GraphRecorder, name: str):
    real = getattr(torch.Tensor, name)

    def method(self, *args, **kwargs):
        if _get_current_dispatch_mode() is recorder:  # else a stand-in looks, or Triton's interpreter
            recorder.broken.append(name)
        return real(self, *args, **kwargs)

    return method
