"""A CUDA graph without a GPU: what a pass asks for is kept, with its addresses, and asked for again by a replay.

No host code of the pass runs again, and a capture leaves memory as it was. So a replay that needs a value from the
host, or an address of another step, gives other bits than the pass.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


def _tensors(value) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


class FakeGraph(TorchDispatchMode):
    """Keeps what is asked for while it is entered."""

    def __init__(self):
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self._before: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what is written to, and its numbers before
        self.replays = 0

    def _keep(self, tensors: list[Tensor]):
        for t in tensors:
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())  # of an expanded one
            t = t[once]
            if (key := (t.data_ptr(), t.numel())) not in self._before:
                self._before[key] = t, t.detach().clone()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        if any(written):
            self._keep([t for t, w in zip(args, written, strict=False) if w and isinstance(t, Tensor)])
        out = func(*args, **named)
        if any(written):
            self.work.append(lambda: func(*args, **named))
        elif not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            held = {t.untyped_storage().data_ptr() for t in _tensors((args, named))}
            made = [t.untyped_storage().data_ptr() in held for t in _tensors(out)]
            if not all(made):  # else a view

                def again():
                    for to, new in zip(_tensors(out), _tensors(func(*args, **named)), strict=True):
                        to.copy_(new)

                self.work.append(again)
        return out

    def launched(self, run):
        """What stands where Triton launches."""

        def launch(executor, *args, **kwargs):
            with _disable_current_modes():
                self._keep(_tensors((args, kwargs)))
                run(executor, *args, **kwargs)
            self.work.append(lambda: run(executor, *args, **kwargs))

        return launch

    def replay(self):
        self.replays += 1
        with torch.inference_mode():
            for work in self.work:
                work()

    def undo(self):
        with torch.inference_mode():
            for tensor, before in self._before.values():
                tensor.copy_(before)
        self._before.clear()


def capture(run: Callable[[], None], device: torch.device) -> FakeGraph:
    """Stands for `graphs.capture`."""
    made = FakeGraph()
    with patch.object(GridExecutor, "__call__", made.launched(GridExecutor.__call__)), made:
        run()
    made.undo()
    return made
