"""One matrix in one version, as writers take it: its weights in BF16 or exact, its codes, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.codec.affine import AffineMatrix, section_array, unpacked, wide_scales
from moepack.pack.codec.bits import from_blocks, pack_rows
from moepack.pack.encodings.affine import Affine
from moepack.pack.spec import BLOCK_ROWS, Version
from moepack.pack.values import Expert

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


_FEW = 1 << 18  # weights that are unpacked at once: they stay in the processor's cache


class _Packed:
    """An expert or a dense matrix, decoded once where that is asked for."""

    def __init__(self, one: Expert) -> None:
        self.one = one

    @cached_property
    def decoded(self) -> Any:
        return Expert.decode(self.one)


@dataclass(frozen=True)
class Values:
    """A matrix of a version."""

    version: Version
    packed: _Packed
    number: int  # of the matrix in it

    @staticmethod
    def of_expert(bundle: Bundle, version: str, position: int, expert: int) -> list[Values]:
        """The matrices of one expert; its digest is checked. Raises BundleError when it is damaged."""
        layer = bundle.layers[position]
        packed = _Packed(bundle.expert(version, layer.index, expert))
        return [Values(packed.one.version.at(i), packed, i) for i in range(len(layer.matrices))]

    @staticmethod
    def of_dense(bundle: Bundle, version: str, module: str) -> Values:
        """One dense matrix; its digest is checked. Raises BundleError when it is damaged."""
        one = bundle.dense_matrix(version, module)
        return Values(one.version, _Packed(one), 0)

    @property
    def decoded(self) -> Any:
        """Return the result of the version's `decode`. Raises BundleError if that fails."""
        return self.packed.decoded[self.number]

    @property
    def _rows(self) -> int:
        return self.packed.one.matrices[self.number].rows

    @cached_property
    def _sections(self) -> dict[str, npt.NDArray[Any]]:
        """The sections of an affine version by kind: [blocks, n, 16], but for outer scales [blocks] and a bias."""
        one = self.packed.one
        sections = one.version.sections(one.matrices)
        return {s.kind: section_array(one.extent, s) for s in sections if s.matrix == self.number}

    @cached_property
    def words(self) -> Tensor:
        """The codes of an affine version in 32-bit words along a row (see `words`), int32 [rows, n].

        Versions of one plane keep them so; no code is unpacked.
        """
        if self._whole_words:
            return torch.from_numpy(from_blocks(self._sections["plane0"], self._rows).view(np.int32))
        return words(self.codes, self.version.bits)

    @cached_property
    def turned_words(self) -> Tensor:
        """Return `words` transposed, int32 [n, rows]. A bundle stores sixteen rows of a word together."""
        if not self._whole_words:
            return words(self.codes, self.version.bits).T.contiguous()
        blocks = self._sections["plane0"].view(np.int32)
        turned = np.ascontiguousarray(blocks.transpose(1, 0, 2)).reshape(blocks.shape[1], -1)
        return torch.from_numpy(turned[:, : self._rows])

    @property
    def _whole_words(self) -> bool:
        bits = self.version.bits
        cols = self.packed.one.matrices[self.number].cols
        return isinstance(self.version, Affine) and self.version.planes == (bits,) and cols * bits % 32 == 0

    @cached_property
    def exact(self) -> Tensor:
        """The weights [rows, cols], float32; bfloat16 where that holds them."""
        made = self.version.dequantise(self.decoded)
        return _bf16(made) if made.dtype == np.uint16 else torch.from_numpy(made)

    @cached_property
    def weight(self) -> Tensor:
        """The weights [rows, cols] rounded to bfloat16."""
        if not isinstance(self.version, Affine):
            return self.exact.to(torch.bfloat16)
        one = self.packed.one
        planes = self.version.planes
        m = one.matrices[self.number]
        parts = {kind: part for kind, part in self._sections.items() if kind != "bias"}
        out = torch.empty(m.rows, m.cols, dtype=torch.bfloat16)
        step = max(1, _FEW // m.cols // BLOCK_ROWS)
        for at in range(0, -(-m.rows // BLOCK_ROWS), step):
            some = out[at * BLOCK_ROWS : (at + step) * BLOCK_ROWS]
            few = unpacked({kind: p[at : at + step] for kind, p in parts.items()}, planes, len(some), m.cols)
            some.copy_(self._dequantised(few))
        return out

    def _dequantised(self, few: AffineMatrix) -> Tensor:
        """Return the values of `Version.dequantise`, computed by torch: four times as fast as NumPy."""
        if few.codes.shape[1] % self.version.group_size:
            return torch.from_numpy(self.version.dequantise(few))
        zero, scale = (torch.from_numpy(a)[..., None] for a in few.grid(self.version))
        values: Tensor = torch.from_numpy(few.codes).float().unflatten(1, (-1, self.version.group_size))
        values.sub_(zero).mul_(scale)
        return values.flatten(1)

    @property
    def bias(self) -> Tensor:
        """The bias [rows], bfloat16."""
        return _bf16(self._sections["bias"] if isinstance(self.version, Affine) else self.decoded.bias)

    @cached_property
    def codes(self) -> Tensor:
        """The codes of an affine version, uint8 [rows, cols]."""
        return torch.from_numpy(self.decoded.codes)

    @cached_property
    def scale(self) -> Tensor:
        """The scales of an affine version [rows, groups], bfloat16 or float16 as stored."""
        dtype = torch.float16 if self.version.scale_dtype == "F16" else torch.bfloat16
        scale = wide_scales(self._sections["scale"], self._sections.get("outer"))
        return torch.from_numpy(from_blocks(scale, self._rows).copy()).view(dtype)  # read-only

    @cached_property
    def zero(self) -> Tensor:
        """The whole zero points of an affine version, uint8 [rows, groups], in codes."""
        if self.version.zero == "symmetric":
            return torch.full(self.scale.shape, 1 << (self.version.bits - 1), dtype=torch.uint8)
        return torch.from_numpy(from_blocks(self._sections["zero"], self._rows) >> (8 - self.version.bits))


def _bf16(bits: npt.ArrayLike) -> Tensor:
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16)


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [rows, n], each below 2**bits, as compressed-tensors and GPTQ do: int32 [rows, ceil(n*bits/32)].

    A row is one little-endian string of bits, the first code lowest; a code of 3 bits may lie in two words.
    """
    if 8 % bits == 0:
        return torch.from_numpy(pack_rows(codes.numpy(), bits).view("<i4"))
    rows, n = codes.shape
    padded = np.zeros((rows, -(-n // 32) * 32), np.uint8)  # 3 bits: 32 codes in 3 words
    padded[:, :n] = codes.numpy()
    each = np.unpackbits(padded.reshape(rows, -1, 1), axis=-1, count=bits, bitorder="little")
    packed = np.packbits(each.reshape(rows, -1), axis=-1, bitorder="little")
    return torch.from_numpy(packed.view("<i4")[:, : -(-n * bits // 32)].copy())
