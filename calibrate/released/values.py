"""The values of codes and scales, and checks for codes and scales that have no value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.pack.codec.released import E2M1

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 227  # bits of an E8M0 scale of 2^100; of MXFP4, sums of products before their scales leave room below it
_AT_ONCE = 1 << 20  # weights that are decoded at once, which bounds the float32 copies


def nan_e4m3(codes: Tensor) -> Tensor:
    """Return a mask of the E4M3 codes (uint8) that are NaN: 0x7F or 0xFF."""
    return (codes & 0x7F) == 0x7F


def nan_e8m0(scale: Tensor) -> Tensor:
    """Return a mask of the E8M0 codes (uint8) that are NaN: 0xFF."""
    return scale == 0xFF


def widen(version: str, scale: Tensor) -> Tensor:
    """A native encoding's scales in float32, exactly."""
    import torch

    if scale.dtype == torch.uint8:
        return scale.view(torch.float8_e4m3fn if version == "nvfp4" else torch.float8_e8m0fnu).to(torch.float32)
    if scale.dtype == torch.uint16:
        return scale.view(torch.float16 if version.endswith("fp16") else torch.bfloat16).to(torch.float32)
    return scale


def decode(
    version: str, group: int, codes: Tensor, scale: Tensor, outer: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor:
    """Decode to BF16 [..., rows, cols]: a product in float32, rounded once.

    `codes` are uint8 [..., rows, cols]; `scale` [..., rows, groups] as `Encoded.scale` has it, `group` the columns of a
    scale (0: all of them); `outer` float32 [..., rows, 1]; `zeros` uint8 [..., rows, groups] in steps of 2^(bits - 8).
    """
    import torch

    cols = codes.shape[-1]
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    flat = codes.reshape(-1, cols)
    to = out.view(-1, cols)
    scales = widen(version, scale).reshape(len(flat), -1)
    step = max(1, _AT_ONCE // max(1, cols))
    own = None if outer is None else outer.reshape(-1, 1)
    zero = None
    if zeros is not None:
        unit = 16 if "int4" in version else 1
        zero = zeros.reshape(len(flat), -1).to(torch.float32) / unit
    table = torch.from_numpy(E2M1)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        if version.startswith("int"):
            value = flat[part].to(torch.float32) - (0 if zero is None else _wide(zero[part], group, cols))
        elif version.endswith("fp4"):
            value = table[flat[part].to(torch.int32)]
        else:
            value = flat[part].view(torch.float8_e4m3fn).to(torch.float32)
        value = value * _wide(scales[part], group, cols)
        to[part] = (value if own is None else value * own[part]).to(torch.bfloat16)
    return out


def _wide(scale: Tensor, group: int, cols: int) -> Tensor:
    return scale.repeat_interleave(min(group, cols), dim=-1)[:, :cols] if group else scale
