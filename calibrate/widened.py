"""A model's BF16 products on a processor that has no instructions for them: in float32, rounded to BF16 once.

torch emulates the instructions there. A Linear of 4,096 by 14,336 on 4,096 tokens, two cores of a Xeon with AVX-512 but
not BF16: 46 GFLOP/s emulated, 175 in float32 with all that is converted; held to AVX2, 13 and 180. Both ways sum in
float32 and round the sum, in another order. torch's fused attention is no slower in BF16, and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from moepack.pack.isa import emulated

MOST = 1 << 23  # values that are converted at once, of tokens and of weights
FEWEST = 128  # tokens; below, converting the weights takes what the product gains
_PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__)


def widened(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Within it, a model that computes with `dtype` on `device` multiplies as said above, where that is faster."""
    return _Widened() if emulated(device, dtype) else nullcontext()


def widened_bytes(device: torch.device, dtype: torch.dtype, values: int) -> int:
    """The most bytes that it takes beside what the model takes, whose tensors have up to so many values: converted
    tokens, converted weights, and their product."""
    return 3 * 4 * min(MOST, values) if emulated(device, dtype) else 0


class _Widened(TorchFunctionMode):
    """Takes products of BF16 tensors of enough rows over from torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if all(isinstance(a, Tensor) and a.dtype == torch.bfloat16 and a.numel() for a in args):
            if func is linear and not kwargs and args[0].ndim >= 2 == args[1].ndim and _rows(args[0]) >= FEWEST:
                return product(*args)
            if func is torch._grouped_mm and is_grouped(args, kwargs) and len(args[0]) >= FEWEST:
                return _grouped(args[0], args[1], kwargs["offs"])
            if func in _PRODUCTS and not kwargs and _are_alike(*args) and args[0].shape[-2] >= FEWEST:
                return _matmul(*args)
        return func(*args, **kwargs)


def _rows(x: Tensor) -> int:
    return x.shape[:-1].numel()


def is_grouped(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether these are arguments of torch's grouped_mm of tokens sorted by group, and nothing else is asked for."""
    plain = all(value is None for name, value in kwargs.items() if name != "offs")
    return [a.ndim for a in args] == [2, 3] and kwargs.get("offs") is not None and plain


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Whether each matrix of one tensor is multiplied by one of the other."""
    return x.ndim == y.ndim >= 2 and x.shape[-1] == y.shape[-2] and x.shape[:-2] == y.shape[:-2]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of BF16 tensors: x [..., columns], weight [rows, columns] and bias [rows] to [..., rows]."""
    columns, rows = x.shape[-1], len(weight)
    tokens = x.reshape(-1, columns)
    out = torch.empty(len(tokens), rows, dtype=x.dtype)
    some, wide = max(FEWEST, MOST // max(columns, 1)), max(1, MOST // max(columns, FEWEST))
    some = min(some, max(FEWEST, MOST // max(1, min(wide, rows))))
    for a in range(0, len(tokens), some):
        part = tokens[a : a + some].float()
        for b in range(0, rows, wide):
            sums = part @ weight[b : b + wide].float().T
            if bias is not None:
                sums += bias[b : b + wide]
            out[a : a + some, b : b + wide] = sums
    return out.reshape(*x.shape[:-1], rows)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped_mm: x [tokens, columns] sorted by group, weight [groups, columns, rows]."""
    out = torch.empty(len(x), weight.shape[2], dtype=x.dtype)  # as in torch's, rows behind the last group are anything
    start = 0
    for group, end in enumerate(ends.tolist()):
        few = x[start:end]
        out[start:end] = product(few, weight[group].T) if len(few) >= FEWEST else few @ weight[group]
        start = end
    return out


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [..., n, k] by y [..., k, m], leading axes alike."""
    if x.ndim == 2:
        return product(x, y.T)
    out = torch.empty(*x.shape[:-1], y.shape[-1], dtype=x.dtype)
    xs, ys, outs = (t.reshape(-1, *t.shape[-2:]) for t in (x, y, out))
    for i in range(len(outs)):
        outs[i] = product(xs[i], ys[i].T)
    return out
