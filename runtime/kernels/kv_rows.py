"""Rows of a KV cache in 8 or 4 bits a number.

A row holds the codes of one token's key or value of one head, and then a BF16 scale for each group of numbers: of 64 in
8 bits, of 32 in 4 bits; a last group may be shorter. A number is its code times the scale, rounded to the dtype. Codes
of 8 bits are from -127 to 127. Those of 4 bits are from -8 to 7, and the group's greatest number is coded as -8. In a
group's bytes of 4 bits, its first half has the low bits. A group with a number that is not finite reads as NaN.

Rows of 4 bits are rotated by a Hadamard matrix before they are coded, which spreads numbers that stand out over all
others (QuaRot, arXiv 2404.00456). Attention rotates queries and results instead of the rows.

So a row is written once, when its token is computed, and takes 8.25 or 4.5 bits a number (132 or 72 bytes of 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from moepack.pack.errors import InputError

from .affine_native import POINTER, WORD, library

GROUPS = {8: 64, 4: 32}  # numbers that share a scale, by bits
PLAIN = 16  # bits of a row that is not coded
ROTATED = (4,)

_code = library.moepack_kv_code
_code.argtypes = [POINTER, *[WORD] * 4, POINTER]
_open = library.moepack_kv_open
_open.argtypes = [POINTER, *[WORD] * 4, POINTER]
_rotate = library.moepack_kv_rotate
_rotate.argtypes = [POINTER, *[WORD] * 3]
_rotate.restype = None


def row_bytes(cols: int, bits: int) -> int:
    """Return the bytes of a row of `cols` numbers."""
    return cols * bits // 8 + 2 * -(-cols // GROUPS[bits])


def coded(x: Tensor, bits: int) -> Tensor:
    """Code floats [..., cols] on the CPU; return uint8 [..., row_bytes(cols, bits)]. `cols` is even."""
    cols = x.shape[-1]
    if cols % 2:
        raise InputError(f"keys or values of {cols} numbers are coded in no fewer bits: leave kv out")
    x = (x if x.dtype in (torch.bfloat16, torch.float32) else x.float()).contiguous()
    out = x.new_empty(*x.shape[:-1], row_bytes(cols, bits), dtype=torch.uint8)
    if not isinstance(x, FakeTensor):  # of a skeleton, which has shapes alone
        _check(_code(x.data_ptr(), x.dtype == torch.bfloat16, _count(x), cols, bits, out.data_ptr()), cols)
    return out


def opened(rows: Tensor, cols: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of coded rows uint8 [..., row_bytes(cols, bits)], [..., cols] of a floating dtype."""
    rows = rows.contiguous()
    short = dtype == torch.bfloat16
    out = rows.new_empty(*rows.shape[:-1], cols, dtype=torch.bfloat16 if short else torch.float32)
    if not isinstance(rows, FakeTensor):
        _check(_open(rows.data_ptr(), _count(out), cols, bits, short, out.data_ptr()), cols)
    return out.to(dtype)


def rotated(x: Tensor) -> Tensor:
    """Return rows [..., cols], BF16 or float32, rotated as those of 4 bits are; twice, they are as before."""
    out = x.clone(memory_format=torch.contiguous_format)
    _rotate(out.data_ptr(), out.dtype == torch.bfloat16, _count(out), out.shape[-1])
    return out


def _count(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _check(failed: int, cols: int) -> None:
    if failed:
        raise InputError(f"keys or values of {cols} numbers are too wide to be coded: leave kv out")


class CodedRows(Tensor):
    """Keys or values of a cache in coded rows, [batch, heads, tokens, cols], as a tensor of the model's dtype.

    Kernels that know this class read the rows. Whatever else a family's code does to it is done to the numbers.
    """

    rows: Tensor  # uint8 [batch, heads, tokens, row_bytes(cols, bits)]
    bits: int

    @staticmethod
    def __new__(cls, rows: Tensor, cols: int, bits: int, dtype: torch.dtype) -> CodedRows:
        """Make the tensor that stands for these rows."""
        shape = (*rows.shape[:-1], cols)
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        made.rows = rows
        made.bits = bits
        return made  # type: ignore[no-any-return]

    def numbers(self) -> Tensor:
        """Return the numbers, a plain tensor."""
        return opened(self.rows, self.shape[-1], self.bits, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it so
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation on the numbers."""
        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def plain(x: Any) -> Any:
    """Return the numbers of coded rows; anything else as it is."""
    return x.numbers() if isinstance(x, CodedRows) else x
