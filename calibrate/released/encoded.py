"""A weight held by several tensors of a checkpoint: read as codes and scales, decoded, and restored byte for byte.

Which tensors belong together, the formats' modules decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError, NotFiniteError
from moepack.pack.safetensors_file import DTYPES

from . import values
from .packing import awq_order, pack, unpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROW_GROUP = 128  # columns of a group of integers whose scale is for the whole row: the most that an encoding has
DAMAGED = "the checkpoint is damaged: download it again, or ask its maker"
Get = Callable[[str], "Tensor"]  # reads a tensor of the checkpoint by its name, or a range of its first axis


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor: its name, its dtype by the name in safetensors, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype][1])
        return found


def _refuse(part: StoredPart, wrong: Tensor, what: str) -> None:
    """Raise NotFiniteError if a number of a tensor is `wrong`: a mask, with the part's first axes in their places."""
    if bool(wrong.any()):
        index = tuple(int(at) for at in wrong.nonzero()[0])
        raise NotFiniteError(part.name, f"{what}: {DAMAGED}", index)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight as a native encoding of moepack, and where its parts are."""

    version: str  # the native encoding: mxfp4, nvfp4, mxfp8, fp8, int4, int8, int4fp16 or int8fp16
    stored_group: int  # columns that share a scale in the checkpoint; 0: the whole row
    shape: tuple[int, ...]  # of the codes, [..., rows, cols]
    # How the codes lie in their tensor: "plain" [..., rows, cols], "blocks" [..., rows, groups, 16], "gptq" and "awq"
    # transposed in words, "signed" int8.
    packing: str
    codes_in: StoredPart
    scale_in: StoredPart
    zeros_in: StoredPart | None = None
    outer_in: StoredPart | None = None
    g_idx: str | None = None  # the name of the columns' groups, which must be in order
    # Rows that share a scale; 0: all of them.
    block_rows: int = 1
    divides: bool = False  # `outer` is stored as its inverse, in a leftover
    zero_offset: int = 0  # what is added to a stored zero point
    transposed: bool = False  # the weight as an unquantised checkpoint has it is [..., cols, rows]
    leftovers: tuple[str, ...] = ()  # tensors that serving does not need and `restore` does not make

    @property
    def group(self) -> int:
        """Columns that share a scale as an encoding has it: a scale of a row of integers stands once for each group."""
        return ROW_GROUP if self.version.startswith("int") and not self.stored_group else self.stored_group

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if "4" in self.version else 8

    @property
    def stored_dtype(self) -> str:
        """The encoding's name in EXPERT_DTYPES."""
        return "F8_E4M3" if self.version == "fp8" else self.version.removesuffix("fp16").upper()

    @property
    def decoded_shape(self) -> tuple[int, ...]:
        """The shape of the weight in an unquantised checkpoint."""
        *batch, rows, cols = self.shape
        return (*batch, cols, rows) if self.transposed else self.shape

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors that `restore` makes."""
        outer = None if self.divides else self.outer_in
        return tuple(p.name for p in (self.codes_in, self.scale_in, self.zeros_in, outer) if p is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of the checkpoint's tensors that belong to the weight."""
        return (*self.stored, *self.leftovers)

    def codes(self, get: Get) -> Tensor:
        """The codes, uint8 [..., rows, cols], one a byte. Raises InputError for a NaN, or groups out of order."""
        import torch

        raw, (rows, cols) = get(self.codes_in.name), self.shape[-2:]
        if self.g_idx is not None:
            self._check_order(get(self.g_idx))
        if self.packing == "gptq":
            out = self._unpacked(self.codes_in, raw.mT, cols)
        elif self.packing == "awq":
            out = awq_order(self._unpacked(self.codes_in, raw, rows)).mT.contiguous()
        elif self.packing == "signed":
            out = raw.view(torch.uint8) ^ 0x80
        else:
            out = self._unpacked(self.codes_in, raw.flatten(-2) if self.packing == "blocks" else raw, cols)
        if self.version in ("fp8", "mxfp8"):
            _refuse(self.codes_in, values.nan_e4m3(out), "is a code that is NaN")
        return out

    def _unpacked(self, part: StoredPart, raw: Tensor, count: int) -> Tensor:
        """The `count` codes of each row of words. Raises InputError for more, which `restore` would not give back."""
        codes = unpack(raw, self.bits)
        if bool(codes[..., count:].any()):
            raise InputError(f"{part.name} has bits behind its last code or zero point: the checkpoint is damaged")
        return codes[..., :count]

    def _check_order(self, g_idx: Tensor) -> None:
        import torch

        cols = self.shape[-1]
        if not torch.equal(g_idx.to(torch.int64), torch.arange(cols) // (self.stored_group or cols)):
            raise InputError(
                f"{self.g_idx} orders columns by activation, so that groups are not contiguous: not supported"
            )

    def scale(self, get: Get) -> Tensor:
        """The scales [..., rows, groups], in a dtype by the encoding. Raises InputError for NaN or infinity.

        They are uint8 bits of E8M0 (mxfp4, mxfp8) or E4M3 (nvfp4), uint16 bits of BF16 or FP16 (int*), or float32 (fp8,
        each of a block's rows having its block's).
        """
        import torch

        raw, (rows, cols) = get(self.scale_in.name), self.shape[-2:]
        groups = math.ceil(cols / self.group) if self.group else 1
        if self.version in ("mxfp4", "mxfp8", "nvfp4"):
            out = raw.contiguous().view(torch.uint8)
            bad = values.nan_e4m3(out) if self.version == "nvfp4" else values.nan_e8m0(out)
            if self.version == "mxfp4" and not bad.any() and int(out.max()) >= values.LARGEST:
                raise InputError(
                    f"{self.scale_in.name} has a scale of 2^100 or more, which could overflow a product: not supported"
                )
        elif self.version == "fp8":
            wide = raw.view(torch.float8_e8m0fnu) if raw.dtype == torch.uint8 else raw
            wide = wide.to(torch.float32).reshape(*self._batch(raw), -1, groups)
            bad = ~torch.isfinite(wide)
            out = (
                wide.repeat_interleave(min(self.block_rows, rows), dim=-2)[..., :rows, :]
                if self.block_rows
                else wide.expand(*wide.shape[:-2], rows, groups)
            )
        else:
            own = raw.mT if self.packing in ("gptq", "awq") else raw.reshape(*self._batch(raw), rows, -1)
            bad = ~torch.isfinite(own)
            out = own.expand(*own.shape[:-1], groups).contiguous().view(torch.uint16)
        _refuse(self.scale_in, bad, "is a scale that is NaN or infinite")
        return out

    def _batch(self, raw: Tensor) -> tuple[int, ...]:
        return tuple(raw.shape[: len(self.shape) - 2])

    def outer(self, get: Get) -> Tensor | None:
        """Return the factor of each row, float32 [..., rows, 1], or None if the encoding has none."""
        import torch

        if self.outer_in is None:
            return None
        raw = get(self.outer_in.name).to(torch.float32)
        one = raw.reshape(*self._batch(raw), 1, 1)
        one = 1 / one if self.divides else one
        _refuse(self.outer_in, ~torch.isfinite(one), "is NaN, infinite or no divisor")
        return one.expand(*one.shape[:-2], self.shape[-2], 1)

    def zeros(self, get: Get) -> Tensor | None:
        """The zero points of int*, uint8 [..., rows, groups] in steps of 2^(bits - 8) of a code; None of others.

        Raises InputError for one that does not fit."""
        import torch

        if not self.version.startswith("int"):
            return None
        (rows, cols), step = self.shape[-2:], 1 << (8 - self.bits)
        groups = math.ceil(cols / self.group) if self.group else 1
        if self.zeros_in is None:
            batch = self._batch(get(self.scale_in.name))  # perhaps a range of the experts
            return torch.full((*batch, rows, groups), 128, dtype=torch.uint8)
        raw = get(self.zeros_in.name)
        if self.packing in ("gptq", "awq"):
            own = self._unpacked(self.zeros_in, raw, rows)
            own = (awq_order(own) if self.packing == "awq" else own).mT
        elif self.packing == "signed":
            own = raw.reshape(*self._batch(raw), rows, -1).view(torch.uint8) ^ 0x80
        else:
            own = self._unpacked(self.zeros_in, raw.mT, rows).mT
        if self.zero_offset and bool((own >= (1 << self.bits) - self.zero_offset).any()):
            raise InputError(
                f"{self.zeros_in.name} has a zero point of {1 << self.bits}, beyond {self.bits} bits: not supported"
            )
        return ((own + self.zero_offset) * step).expand(*own.shape[:-1], groups).contiguous()

    def decode(self, get: Get) -> Tensor:
        """The weight in BF16, as an unquantised checkpoint has it; see values.decode."""
        out = values.decode(
            self.version, self.group, self.codes(get), self.scale(get), self.outer(get), self.zeros(get)
        )
        return out.mT if self.transposed else out

    def restore(
        self, codes: Tensor, scale: Tensor, outer: Tensor | None = None, zeros: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The tensors named in `stored` from what `codes`, `scale`, `outer` and `zeros` gave, byte for byte.

        Of a range of the first axis, it makes that range of them.
        """
        batch = tuple(codes.shape[: len(self.shape) - 2])
        out = {self.codes_in.name: self._like(self._packed(codes), self.codes_in, batch)}
        out[self.scale_in.name] = self._like(self._stored_scale(scale), self.scale_in, batch)
        if self.zeros_in is not None:
            assert zeros is not None
            out[self.zeros_in.name] = self._like(self._stored_zeros(zeros), self.zeros_in, batch)
        if self.outer_in is not None and not self.divides:
            assert outer is not None
            part = self.outer_in
            out[part.name] = self._like(outer[..., :1, :].to(part.torch_dtype), part, batch)
        return out

    def _like(self, tensor: Tensor, part: StoredPart, batch: tuple[int, ...]) -> Tensor:
        """A tensor's bits in a part's dtype and shape."""
        shape = (*batch, *part.shape[len(batch) :])
        return tensor.contiguous().view(part.torch_dtype).reshape(shape).contiguous()

    def _packed(self, codes: Tensor) -> Tensor:
        dtype = self.codes_in.torch_dtype
        if self.packing == "gptq":
            return pack(codes, self.bits, dtype).mT
        if self.packing == "awq":
            return pack(awq_order(codes.mT, inverse=True), self.bits, dtype)
        if self.packing == "signed":
            return codes ^ 0x80
        return pack(codes, self.bits, dtype)

    def _stored_scale(self, scale: Tensor) -> Tensor:
        import torch

        if self.version == "fp8":
            few = scale[..., :: self.block_rows, :] if self.block_rows else scale[..., :1, :]
            part = self.scale_in.torch_dtype
            return few.to(torch.float8_e8m0fnu if part == torch.uint8 else part)
        scale = scale if self.stored_group or not self.version.startswith("int") else scale[..., :1]
        return scale.mT if self.packing in ("gptq", "awq") else scale

    def _stored_zeros(self, zeros: Tensor) -> Tensor:
        import torch

        own = (zeros if self.stored_group else zeros[..., :1]) // (1 << (8 - self.bits)) - self.zero_offset
        if self.packing == "signed":
            return own ^ 0x80
        if self.packing == "awq":
            return pack(awq_order(own.mT, inverse=True), self.bits, torch.int32)
        if self.packing == "gptq":
            return pack(own.mT, self.bits, torch.int32)
        return pack(own.mT, self.bits, torch.int32).mT
