"""Codes packed in 32-bit words, as compressed-tensors and GPTQ have them. Bits only, no values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n], each below 2**bits, as int32 [rows, ceil(n * bits / 32)].

    A row is one little-endian string of bits, the first code lowest; a code of 3 bits may lie in two words.
    """
    rows, n = codes.shape
    per_word = 32 if 8 % bits else 32 // bits  # 3 bits: 32 codes in 3 words
    padded = np.zeros((rows, -(-n // per_word) * per_word), np.uint8)
    padded[:, :n] = codes.numpy()
    if 8 % bits:
        each = np.unpackbits(padded.reshape(rows, -1, 1), axis=-1, count=bits, bitorder="little")
        packed = np.packbits(each.reshape(rows, -1), axis=-1, bitorder="little")
    else:
        per_byte = 8 // bits
        packed = padded[:, 0::per_byte].copy()
        for i in range(1, per_byte):
            packed |= padded[:, i::per_byte] << np.uint8(i * bits)
    return torch.from_numpy(packed.view("<i4")[:, : -(-n * bits // 32)].copy())
