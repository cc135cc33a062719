"""Weights that a checkpoint stores as codes and scales (block FP8 and MXFP4), and how to decode them to BF16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError
from moepack.pack.safetensors_file import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

FP8, MXFP4 = "F8_E4M3", "MXFP4"
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A checkpoint's quantisation: FP8 in blocks of (rows, columns), or MXFP4 in groups of 32 columns."""

    name: str
    block: tuple[int, int] = (1, 32)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight that two tensors hold: its scheme, and the names of the codes and the scales."""

    scheme: Scheme
    codes: str
    scales: str

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Decode the weight to BF16."""
        return decode_fp8(codes, scales, self.scheme.block) if self.scheme.name == FP8 else decode_mxfp4(codes, scales)


def read_scheme(where: object, document: Any) -> Scheme | None:
    """The scheme that a config's `quantization_config` names; None if the config has none.

    Raises InputError for a scheme that moepack does not read.
    """
    if not document:
        return None
    method = document.get("quant_method") if isinstance(document, dict) else document
    if method == "mxfp4":
        return Scheme(MXFP4)
    if method == "fp8" and isinstance(document, dict) and document.get("expert_dtype", "fp8") == "fp8":
        block = document.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
            return Scheme(FP8, (block[0], block[1]))
        method = "fp8 without weight_block_size"
    known = "moepack reads fp8 with weight_block_size, and mxfp4"
    raise InputError(f"{where}: is already quantised ({method}); {known}: give it the checkpoint this was made from")


def find_encoded(where: object, scheme: Scheme | None, tensors: Mapping[str, TensorEntry]) -> dict[str, Encoded]:
    """The encoded weights among a checkpoint's tensors, by the names that they would have in BF16.

    Raises InputError for codes without scales, or with scales of the wrong shape.
    """
    out: dict[str, Encoded] = {}
    for name, entry in tensors.items():
        if scheme is not None and scheme.name == MXFP4 and name.endswith("_blocks") and entry.dtype == "U8":
            base = name.removesuffix("_blocks")
            pair = Encoded(scheme, name, f"{base}_scales")
            out[base] = _checked(where, pair, entry, tensors.get(pair.scales), entry.shape[:-1], ("U8",))
            if len(entry.shape) < 3 or entry.shape[-1] != 16:
                raise InputError(f"{where}: {name} has shape {entry.shape}, not [..., rows, groups, 16]")
        elif scheme is not None and scheme.name == FP8 and entry.dtype == FP8:
            pair = Encoded(scheme, name, f"{name}_scale_inv")
            *batch, rows, cols = entry.shape if len(entry.shape) > 1 else (0, 0)
            grid = (*batch, -(-rows // scheme.block[0]), -(-cols // scheme.block[1]))
            out[name] = _checked(where, pair, entry, tensors.get(pair.scales), grid, _SCALE_DTYPES)
    return out


def _checked(
    where: object,
    pair: Encoded,
    codes: TensorEntry,
    scales: TensorEntry | None,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> Encoded:
    if scales is None:
        raise InputError(f"{where}: {pair.codes} has no {pair.scales}: the checkpoint is not complete")
    if scales.shape != shape or scales.dtype not in dtypes:
        got = f"{scales.dtype} {list(scales.shape)}"
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise InputError(f"{where}: {pair.scales} is {got}; {pair.codes} {list(codes.shape)} needs {wanted}")
    return pair


def decode_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Decode block FP8 as in DeepSeek-V3: code times its block's scale, in float32, rounded to BF16.

    `codes` are float8_e4m3fn [..., rows, cols], `scales` [..., ceil(rows / block[0]), ceil(cols / block[1])] of any
    floating point. `block` are the rows and columns that share a scale. Returns BF16 [..., rows, cols].
    """
    rows, cols = codes.shape[-2:]
    import torch

    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    scales = scales.to(torch.float32)
    for i in range(scales.shape[-2]):  # one row of blocks at a time bounds the float32 copy
        part = slice(i * block[0], min((i + 1) * block[0], rows))
        wide = scales[..., i, :].repeat_interleave(block[1], dim=-1)[..., None, :cols]
        out[..., part, :] = (codes[..., part, :].to(torch.float32) * wide).to(torch.bfloat16)
    return out


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode MXFP4 as in gpt-oss: 4-bit values (E2M1), 32 of a row sharing an exponent. Exact except for subnormals.

    A byte of `blocks`, uint8 [..., rows, groups, 16], holds two values, the first in its low bits. `scales`, uint8
    [..., rows, groups], are exponents plus 127. Returns BF16 [..., groups * 32, rows], transposed as in transformers.
    """
    import torch

    values = torch.tensor(_FP4_VALUES, dtype=torch.float32)
    flat_blocks, flat_scales = blocks.reshape(-1, *blocks.shape[-3:]), scales.reshape(-1, *scales.shape[-2:])
    count, rows, groups, _ = flat_blocks.shape
    out = torch.empty(count, groups * 32, rows, dtype=torch.bfloat16)
    for i in range(count):  # one expert at a time bounds the float32 copy
        codes = torch.stack([flat_blocks[i] & 15, flat_blocks[i] >> 4], dim=-1).reshape(rows, groups, 32)
        exponents = flat_scales[i].to(torch.int32)[..., None] - 127
        exact = torch.ldexp(values[codes.to(torch.int32)], exponents)
        out[i] = exact.to(torch.bfloat16).reshape(rows, groups * 32).T
    return out.reshape(*blocks.shape[:-3], groups * 32, rows)
