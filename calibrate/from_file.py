"""Products with experts whose weights lie in a file, one expert after another.

Where a layer's experts are more than memory holds, they are mapped from a file (held.py). transformers multiplies with
all of a layer's experts in one call; here each is read, brought to where the tokens are, and let go of before the next:
of the file one matrix is in memory. A product is the one that it is in a call for all: no bit changes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .held import expect, is_mapped, release
from .widened import is_grouped


class FromFile(TorchFunctionMode):
    """Takes grouped products with a mapped tensor over from torch; all else is left alone. To be entered last: what it
    multiplies goes through the modes that were entered before."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch._grouped_mm and is_grouped(args, kwargs) and is_mapped(args[1]):
            return _grouped(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped_mm: x [tokens, columns] sorted by expert, weight [experts, columns, rows], ends [experts]."""
    out = x.new_empty(len(x), weight.shape[2])  # as in torch's, rows behind the last expert's are anything
    starts = [0, *ends.tolist()]
    called = [e for e in range(len(weight)) if starts[e] < starts[e + 1]]
    for i, e in enumerate(called):
        if i + 1 < len(called):
            expect(weight[called[i + 1]])
        here = slice(starts[e], starts[e + 1])
        out[here] = x[here] @ weight[e].to(x.device)
        release(weight)
    return out
