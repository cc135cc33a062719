"""Matrices as blocks of ggml's types: codes and scales are put in their places, and no value is rounded.

Q8_0: FP16 d, 32 signed bytes q; d * q. Q4_0: FP16 d, 16 bytes; d * (q - 8), code j in the low and j + 16 in the high
half of byte j. MXFP4: an E8M0 scale, 16 bytes of E2M1 codes in the same order. (ggml-common.h, ggml-quants.c)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from moepack.pack.codec.affine import section_array
from moepack.pack.codec.bits import bf16_to_float32
from moepack.pack.encodings.affine import Affine
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version

from ..values import Values
from ..zeros import extents, zero_points
from .file import BF16, F32, MXFP4, Q4_0, Q8_0, Type

Bytes = npt.NDArray[np.uint8]
BLOCK = 32
_TINY = 0x0080  # BF16 bits of the scale of a group of zeros (quantize.grid.fix_scale): any scale gives its values


def type_of(version: Version) -> Type | None:
    """The type that holds a version's values; None if no type does."""
    if version.plain:
        return BF16
    if isinstance(version, Affine) and version.stores_zeros and not version.by_matrix:
        return {8: Q8_0, 4: Q4_0}.get(version.bits)
    return MXFP4 if version.name == "mxfp4" else None


def refusal(bundle: Bundle, version: Version, dense: bool) -> str | None:
    """Why a version's matrices are not exported; None if they are."""
    kind = type_of(version)
    if kind is None:
        return "no type of GGUF holds its values: there are bf16, w8 (Q8_0), w4 (Q4_0) and mxfp4"
    matrices = [(f"layer {x.index}, {m.name}", m) for x in bundle.layers for m in x.matrices]
    for where, m in [(d.module, d.matrix) for d in bundle.manifest.dense] if dense else matrices:
        if m.cols % kind.block:
            return f"{where} has {m.cols} columns, not whole blocks of {kind.block}"
    if kind not in (Q8_0, Q4_0):
        return None
    found = zero_points(bundle, version, dense)
    if not found.symmetric:
        return (
            f"{found.apart:,} of its {found.total:,} zero points are not the middle code, the only one of {kind.name}: "
            "quantise with zeros: symmetric in the recipe, or take --bits bf16 or --to checkpoint"
        )
    if small := _beyond_fp16(bundle, version, dense):
        return f"{small:,} of its scales are beyond FP16, in which {kind.name} has them: take --to compressed-tensors"
    return None


@lru_cache(maxsize=32)
def _beyond_fp16(bundle: Bundle, version: Version, dense: bool) -> int:
    """The number of scales that FP16 does not hold."""
    if version.scale_dtype == "F16":
        return 0
    count = 0
    for matrices, extent in extents(bundle, version, dense):
        for section in version.sections(matrices):
            if section.kind == "scale":
                bits = section_array(extent, section).astype(np.uint16)
                exact = bf16_to_float32(bits)
                with np.errstate(over="ignore"):
                    lost = exact.astype(np.float16).astype(np.float32) != exact
                count += int(np.count_nonzero(lost & (bits != _TINY)))
    return count


def blocks(values: Values, rows: slice) -> Bytes:
    """The bytes of some rows of a matrix, in the type of its version."""
    kind, decoded = type_of(values.version), values.decoded
    if kind is BF16:
        bits: npt.NDArray[np.uint16] = values.version.dequantise(decoded)[rows]  # type: ignore[assignment]
        return np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    codes = decoded.codes[rows]
    each = codes.reshape(-1, BLOCK)
    scale = np.repeat(decoded.scale[rows], values.version.group_size // BLOCK, axis=1)[:, : codes.shape[1] // BLOCK]
    if kind is MXFP4:
        return np.concatenate([scale.reshape(-1, 1), _halves(each)], axis=1).reshape(-1)
    if values.version.scale_dtype == "F16":
        half = np.ascontiguousarray(scale).reshape(-1, 1).view(np.uint8)
    else:
        half = bf16_to_float32(scale).astype(np.float16).reshape(-1, 1).view(np.uint8)
    own = each ^ np.uint8(0x80) if kind is Q8_0 else _halves(each)  # less 128, as a signed byte
    return np.concatenate([half, own], axis=1).reshape(-1)


def _halves(codes: Bytes) -> Bytes:
    """Codes of 4 bits [n, 32] as bytes [n, 16]: the first 16 low, the others high."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


def plain(values: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> Bytes:
    """The bytes of a tensor in F32, or in BF16 if its bits are given."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


__all__ = ["BF16", "F32", "blocks", "plain", "refusal", "type_of"]
