"""Products of a calibration pass that torch computes slowly, or cannot hold in memory.

- BF16 products on a processor without BF16 instructions, where torch emulates them: in float32, rounded to BF16 once.
  A Linear of 4,096 by 14,336 on 4,096 tokens, two cores of a Xeon with AVX-512 but not BF16: 46 GFLOP/s emulated, 175
  in float32 with all conversions; limited to AVX2, 13 and 180. Both ways sum in float32, in different orders, and round
  the sum. torch's fused attention is as fast in BF16, and is left alone.
- Products with experts that are mapped from a file (held.py): transformers multiplies with all experts of a layer in
  one call. Here each expert is read, moved to the tokens' device and released before the next. On a CPU no bit changes.
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

from .held import expect, is_mapped, release

MOST = 1 << 23  # values that are converted at once, of tokens and of weights
FEWEST = 128  # tokens; with fewer, converting the weights costs what it gains
_PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__)


def widened(device: torch.device, dtype: torch.dtype, mapped: bool = False) -> AbstractContextManager[object]:
    """Multiply as described above inside the context where that is faster; with `mapped` also from files."""
    wide = emulated(device, dtype)
    return CalibrationProducts(wide, mapped) if wide or mapped else nullcontext()


def widened_bytes(device: torch.device, dtype: torch.dtype, values: int) -> int:
    """Upper bound of the additional bytes: converted tokens, converted weights and their product.

    `values` is the number of values of the model's largest tensor.
    """
    return 3 * 4 * min(MOST, values) if emulated(device, dtype) else 0


class CalibrationProducts(TorchFunctionMode):
    """Torch mode that replaces products of BF16 tensors with enough rows, and grouped products with mapped experts."""

    def __init__(self, wide: bool, mapped: bool) -> None:
        super().__init__()
        self._wide = wide
        self._mapped = mapped

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        wide = self._wide and all(isinstance(a, Tensor) and a.dtype == torch.bfloat16 and a.numel() for a in args)
        if func is torch._grouped_mm and _is_grouped(args, kwargs):
            if (self._mapped and is_mapped(args[1])) or (wide and len(args[0]) >= FEWEST):
                return _grouped(args[0], args[1], kwargs["offs"], wide)
        elif wide and not kwargs:
            if func is linear and args[0].ndim >= 2 == args[1].ndim and args[0].shape[:-1].numel() >= FEWEST:
                return product(*args)
            if func in _PRODUCTS and _are_alike(*args) and args[0].shape[-2] >= FEWEST:
                return _matmul(*args)
        return func(*args, **kwargs)


def _is_grouped(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's grouped_mm has tokens sorted by group (`offs`), and no further option."""
    plain = all(value is None for name, value in kwargs.items() if name != "offs")
    return [a.ndim for a in args] == [2, 3] and kwargs.get("offs") is not None and plain


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return x.ndim == y.ndim >= 2 and x.shape[-1] == y.shape[-2] and x.shape[:-2] == y.shape[:-2]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of BF16 tensors: x [..., columns], weight [rows, columns] and bias [rows] to [..., rows]."""
    columns = x.shape[-1]
    rows = len(weight)
    tokens = x.reshape(-1, columns)
    out = torch.empty(len(tokens), rows, dtype=x.dtype)
    some = max(FEWEST, MOST // max(columns, 1))
    wide = max(1, MOST // max(columns, FEWEST))
    some = min(some, max(FEWEST, MOST // max(1, min(wide, rows))))
    for a in range(0, len(tokens), some):
        part = tokens[a : a + some].float()
        for b in range(0, rows, wide):
            sums = part @ weight[b : b + wide].float().T
            if bias is not None:
                sums += bias[b : b + wide]
            out[a : a + some, b : b + wide] = sums
    return out.reshape(*x.shape[:-1], rows)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, wide: bool) -> Tensor:
    """torch's grouped_mm: x [tokens, columns] sorted by expert, weight [experts, columns, rows], ends [experts]."""
    out = x.new_empty(len(x), weight.shape[2])  # as in torch's, rows behind the last group are undefined
    starts = [0, *ends.tolist()]
    called = [e for e in range(len(weight)) if starts[e] < starts[e + 1]]
    for i, e in enumerate(called):
        if i + 1 < len(called):
            expect(weight[called[i + 1]])
        here = slice(starts[e], starts[e + 1])
        own = weight[e].to(x.device)
        out[here] = product(x[here], own.T) if wide and len(x[here]) >= FEWEST else x[here] @ own
        release(weight)
    return out


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.ndim == 2:
        return product(x, y.T)
    out = torch.empty(*x.shape[:-1], y.shape[-1], dtype=x.dtype)
    xs, ys, outs = (t.reshape(-1, *t.shape[-2:]) for t in (x, y, out))
    for i in range(len(outs)):
        outs[i] = product(xs[i], ys[i].T)
    return out
