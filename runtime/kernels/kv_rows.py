"""Rows of a KV cache in 8 or 4 bits a number.

A row holds the codes of one token's key or value of one head, and then a BF16 scale for each group of numbers: of 64 in 8
bits, of 32 in 4 bits; a last group may be shorter. A number is its code times the scale, rounded to the model's dtype.
Codes of 8 bits are from -127 to 127. Those of 4 bits are from -8 to 7, and the group's greatest number is coded as -8. In
a group's bytes of 4 bits, its first half has the low bits. A group with a number that is not finite reads as not a number.

So a row is written once, when its token is computed, and takes 8.25 or 4.5 bits a number (65 or 36 bytes of 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .affine_native import POINTER, WORD, library

GROUPS = {8: 64, 4: 32}  # numbers that share a scale, by bits
PLAIN = 16  # bits of a row that is not coded

_code = library.moepack_kv_code
_code.argtypes = [POINTER, *[WORD] * 4, POINTER]
_code.restype = None
_open = library.moepack_kv_open
_open.argtypes = [POINTER, *[WORD] * 3, POINTER]
_open.restype = None


def row_bytes(cols: int, bits: int) -> int:
    """Return the bytes of a row of `cols` numbers."""
    return cols * bits // 8 + 2 * -(-cols // GROUPS[bits])


def coded(x: Tensor, bits: int) -> Tensor:
    """Code floats [..., cols]; return uint8 [..., row_bytes(cols, bits)]. `cols` is even."""
    cols = x.shape[-1]
    if type(x) is not Tensor or x.device.type != "cpu":
        return coded_by_torch(x, bits)
    if x.dtype not in (torch.bfloat16, torch.float32):
        x = x.float()
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], row_bytes(cols, bits), dtype=torch.uint8)
    _code(x.data_ptr(), x.dtype == torch.bfloat16, x.numel() // max(1, cols), cols, bits, out.data_ptr())
    return out


def coded_by_torch(x: Tensor, bits: int) -> Tensor:
    """Return what `coded` does, by torch's operations."""
    cols = x.shape[-1]
    size = GROUPS[bits]
    groups = -(-cols // size)
    padded = torch.nn.functional.pad(x.float(), (0, groups * size - cols)).unflatten(-1, (groups, size))
    far = padded.amax(-1, keepdim=True)
    low = padded.amin(-1, keepdim=True)
    far = torch.where(far > -low, far, low)
    scale = (far.abs() / 127 if bits == 8 else far / -8).bfloat16()
    by = scale.float()
    limits = (-127, 127) if bits == 8 else (-8, 7)
    codes = torch.where(by == 0, 0.0, padded / by).round().clamp(*limits).nan_to_num().to(torch.int8)
    scale = torch.where(padded.isfinite().all(-1, keepdim=True), scale, torch.nan).squeeze(-1).contiguous()
    if bits == 8:
        packed = codes.flatten(-2)[..., :cols].view(torch.uint8)
    else:
        shifted = (codes + 8).view(torch.uint8)
        halves = [(shifted[..., g, : n // 2], shifted[..., g, n // 2 : n]) for g, n in _sizes(cols, size)]
        packed = torch.cat([first | second << 4 for first, second in halves], dim=-1)
    return torch.cat([packed, scale.view(torch.uint8)], dim=-1)


def opened(rows: Tensor, cols: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of coded rows uint8 [..., row_bytes(cols, bits)], [..., cols] of a floating dtype."""
    if type(rows) is not Tensor or rows.device.type != "cpu" or dtype != torch.bfloat16:
        return opened_by_torch(rows, cols, bits, dtype)
    rows = rows.contiguous()
    out = torch.empty(*rows.shape[:-1], cols, dtype=dtype)
    _open(rows.data_ptr(), out.numel() // max(1, cols), cols, bits, out.data_ptr())
    return out


def opened_by_torch(rows: Tensor, cols: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return what `opened` does, by torch's operations."""
    size = GROUPS[bits]
    width = cols * bits // 8
    scale = rows[..., width:].contiguous().view(torch.bfloat16).float()
    if bits == 8:
        codes = rows[..., :width].contiguous().view(torch.int8).float()
    else:
        parts = []
        for g, n in _sizes(cols, size):
            some = rows[..., g * size // 2 : (g * size + n) // 2]
            parts += [some & 15, some >> 4]
        codes = torch.cat(parts, dim=-1).float() - 8
    return (codes * scale.repeat_interleave(size, dim=-1)[..., :cols]).to(dtype)


def _sizes(cols: int, size: int) -> list[tuple[int, int]]:
    """Return each group's place and numbers."""
    return [(g, min(size, cols - g * size)) for g in range(-(-cols // size))]


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
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)  # type: ignore[attr-defined]
        made.rows = rows
        made.bits = bits
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"CodedRows({tuple(self.shape)}, bits={self.bits}, dtype={self.dtype})"

    def numbers(self) -> Tensor:
        """Return the numbers, a plain tensor."""
        return opened(self.rows, self.shape[-1], self.bits, self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation on the numbers."""
        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def plain(x: Any) -> Any:
    """Return the numbers of coded rows; anything else as it is."""
    return x.numbers() if isinstance(x, CodedRows) else x
