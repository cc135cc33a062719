"""Codes packed in checkpoints' tensors, taken apart into one byte a code and put together again. Bits only, no values.

Words are little-endian with the first code in the low bits, so that codes of 4 and 8 bits never cross a byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

# Place in a word of AWQ's eight 4-bit codes: the code in the i-th nibble is number AWQ_ORDER[i].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of each row: uint8 [..., codes] from words or bytes [..., words] of any integer dtype."""
    import torch

    codes = recast(packed, torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes


def pack(codes: Tensor, bits: int, words: dtype) -> Tensor:
    """The inverse of `unpack`: of dtype `words` [..., words], the last one filled up with zero bits."""
    import torch

    per_word = words.itemsize * 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return recast(codes, words)


def recast(tensor: Tensor, dtype: dtype) -> Tensor:
    """Return a view of a tensor as another dtype; the last dimension changes so that a row keeps its bytes."""
    tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))  # an axis of one element may have a stride that `view` refuses
    return flat.view(dtype).view(*tensor.shape[:-1], -1)


def awq_order(codes: Tensor, inverse: bool = False) -> Tensor:
    """Put codes [..., a multiple of 8] from AWQ's order in a word in the order of the rows; `inverse` undoes it."""
    import torch

    order = torch.tensor(AWQ_ORDER)
    at = order if inverse else torch.argsort(order)
    return codes.reshape(*codes.shape[:-1], -1, len(AWQ_ORDER))[..., at].flatten(-2)
