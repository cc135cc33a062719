"""Matrices as blocks of ggml's types: codes and scales are put in their places, and no value is rounded.

The gguf package quantises values anew, which would choose other codes and scales; so blocks are made here.

Q8_0: FP16 d, 32 signed bytes q; d * q. Q4_0: FP16 d, 16 bytes; d * (q - 8), code j in the low and j + 16 in the high
half of byte j. MXFP4: an E8M0 scale, 16 bytes of E2M1 codes in the same order. Q1_0: FP16 d, 16 bytes of bits; d where
a bit is 1, -d where it is 0, the lowest first. (ggml-common.h, ggml-quants.c)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from moepack.pack.codec.affine import section_array, wide_scales
from moepack.pack.codec.bits import bf16_to_float32, from_blocks
from moepack.pack.encodings.affine import Affine
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version

from ..compressed import matrices_of
from ..targets import MIXED
from ..values import Values
from ..zeros import extents, zero_points
from .file import Type, block_of

Bytes = npt.NDArray[np.uint8]
BLOCK_1 = block_of(Type.Q1_0)
_TINY = 0x0080  # BF16 bits of the scale of a group of zeros (quantize.grid.fix_scale): any scale gives its values


def type_of(version: Version) -> Type | None:
    """Return the GGUF type that holds a version's values, or None if no type does."""
    if version.plain:
        return Type.BF16
    if isinstance(version, Affine) and not version.by_matrix:
        return {8: Type.Q8_0, 4: Type.Q4_0, 1: Type.Q1_0}.get(version.bits)
    return Type.MXFP4 if version.name == "mxfp4" else None


def refusal(bundle: Bundle, version: Version, dense: bool) -> str | None:
    """Return why a version's matrices cannot be exported, or None if they can."""
    if version.by_matrix:
        return MIXED
    kind = type_of(version)
    if kind is None:
        return "no type of GGUF holds its values: there are bf16, w8 (Q8_0), w4 (Q4_0), w1 (Q1_0) and mxfp4"
    for where, m in matrices_of(bundle, dense):
        if m.cols % block_of(kind):
            return f"{where} has {m.cols} columns, not whole blocks of {block_of(kind)}"
    if kind is Type.Q1_0 and version.group_size % BLOCK_1:
        return (
            f"Q1_0 has a scale for {BLOCK_1} weights, and this one for {version.group_size}: build it with "
            "group_size: {w1: 128} in the recipe, or take --to checkpoint"
        )
    if kind not in (Type.Q8_0, Type.Q4_0, Type.Q1_0):
        return None
    found = zero_points(bundle, version, dense)
    if not found.symmetric:
        return (
            f"{found.apart:,} of its {found.total:,} zero points are not the middle code, the only one of {kind.name}: "
            "quantise with zeros: symmetric in the recipe, or take --bits bf16 or --to checkpoint"
        )
    if small := _beyond_fp16(bundle, version, dense):
        other = "checkpoint" if kind is Type.Q1_0 else "compressed-tensors"
        return f"{small:,} of its scales are beyond FP16, in which {kind.name} has them: take --to {other}"
    return None


@lru_cache(maxsize=32)
def _beyond_fp16(bundle: Bundle, version: Version, dense: bool) -> int:
    if version.scale_dtype == "F16":
        return 0
    # levels of one bit are half a scale
    count = 0
    half = np.float32(0.5 if version.bits == 1 else 1)
    for matrices, extent in extents(bundle, version, dense):
        parts = {(s.matrix, s.kind): section_array(extent, s) for s in version.sections(matrices)}
        for matrix in range(len(matrices)):
            scale = wide_scales(parts[matrix, "scale"], parts.get((matrix, "outer")))
            bits = from_blocks(scale, matrices[matrix].rows)
            exact = bf16_to_float32(bits) * half
            with np.errstate(over="ignore"):
                lost = exact.astype(np.float16).astype(np.float32) != exact
            count += int(np.count_nonzero(lost & ((bits != _TINY) | (version.bits == 1))))
    return count


def blocks(values: Values, rows: slice, kind: Type) -> Bytes:
    """The bytes of some rows of a matrix, in a type: its version's, or rounded to BF16."""
    version = values.version
    decoded = values.decoded
    if kind is Type.BF16:
        return values.weight[rows].contiguous().view(torch.uint8).numpy().reshape(-1)
    codes = decoded.codes[rows]
    block = block_of(kind)
    each = codes.reshape(-1, block)
    repeat = version.group_size // block
    per_row = codes.shape[1] // block
    scale = np.repeat(decoded.scale[rows], repeat, axis=1)[:, :per_row]
    if kind is Type.MXFP4:
        return np.concatenate([scale.reshape(-1, 1), _halves(each)], axis=1).reshape(-1)
    if version.scale_dtype == "F16":
        half = np.ascontiguousarray(scale).view(np.float16)
    else:
        half = (bf16_to_float32(scale) * np.float32(0.5 if kind is Type.Q1_0 else 1)).astype(np.float16)
    if kind is Type.Q8_0:
        own = each ^ np.uint8(0x80)  # less 128, as a signed byte
    else:
        own = _halves(each) if kind is Type.Q4_0 else np.packbits(each, axis=1, bitorder="little")
    return np.concatenate([half.reshape(-1, 1).view(np.uint8), own], axis=1).reshape(-1)


def _halves(codes: Bytes) -> Bytes:
    """Codes of 4 bits [n, 32] as bytes [n, 16]: the first 16 low, the others high."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


def plain(values: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> Bytes:
    """The bytes of a tensor in F32, or in BF16 if its bits are given."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
