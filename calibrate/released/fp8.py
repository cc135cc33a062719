"""FP8 as transformers has it: in blocks, a scale a tensor or a row, MXFP8, and DeepSeek-V4's experts in MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moepack.pack.errors import InputError

from .encoded import Encoded, StoredPart
from .parts import ACTIVATIONS, FLOATS, Document, Scheme, Shape, Tensors, block_size, need, option, part, there

MX = 32  # columns of a scale of MXFP8 and MXFP4
NV = 16  # columns of a scale of NVFP4
E8M0 = ("U8", "F8_E8M0")
BLOCK_DTYPES = (*FLOATS, "F8_E8M0")


def read(document: Document, quantization: Document) -> Scheme:
    """The reader, by `weight_block_size` (absent for a scale a tensor or row), `scale_fmt` and `expert_dtype`."""
    block = (1, MX) if quantization["quant_method"] == "mxfp8" else None
    if quantization.get("weight_block_size") is not None:
        block = block_size(quantization, "weight_block_size")
    expert = option(document, "expert_dtype", ("fp8", "fp4"), quantization.get("expert_dtype", "fp8"))
    option(quantization, "expert_dtype", ("fp8", "fp4"), expert)
    return partial(find, block, expert == "fp4")


def find(block: tuple[int, int] | None, fp4_experts: bool, tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights whose codes are F8_E4M3, and with `fp4_experts` those in I8, two codes a byte."""
    experts = 0
    for name, entry in tensors.items():
        if entry.dtype == "F8_E4M3" and not name.endswith(("scale", "scale_inv", "scales")):
            codes = part(tensors, name)
            made = fp8(tensors, codes, _scale_name(tensors, name), block)
        elif fp4_experts and entry.dtype in ("I8", "U8") and name.endswith(".weight") and ".experts." in name:
            experts += 1
            codes = part(tensors, name)
            made = fp4(tensors, codes, _scale_name(tensors, name))
        else:
            continue
        yield name, made
    if fp4_experts and not experts:
        raise InputError("config.json says expert_dtype fp4, but no tensor of an expert is stored so")


def _scale_name(tensors: Tensors, name: str) -> str:
    """The name of a weight's scales; the families use several."""
    module = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale"]
    if module != name:
        names += [f"{module}.scale", f"{module}.qscale_weight"]
    found = [n for n in names if n in tensors]
    if len(found) > 1:
        raise InputError(f"{name} has both {found[0]} and {found[1]}")
    return found[0] if found else names[0]


def leftovers(tensors: Tensors, name: str) -> tuple[str, ...]:
    """Scales of activations beside a weight."""
    return there(tensors, name.removesuffix(".weight"), ACTIVATIONS) if name.endswith(".weight") else ()


def fp8(tensors: Tensors, codes: StoredPart, scale: str, block: tuple[int, int] | None) -> Encoded:
    """A weight in FP8 with scales in blocks of (rows, columns), or without `block` a scale a tensor or row."""
    *batch, rows, cols = codes.shape
    rest = leftovers(tensors, codes.name)
    if block is None:
        lead = tuple(batch)
        tensor = [(*lead,), (*lead, 1), (*lead, 1, 1)]
        row = [(*lead, rows), (*lead, rows, 1)]
        found = need(tensors, scale, FLOATS, dict.fromkeys([*tensor, *row]), codes)
        per_row = 1 if found.shape in row else 0
        return Encoded("fp8", 0, codes.shape, "plain", codes, found, block_rows=per_row, leftovers=rest)
    grid: Shape = (*batch, -(-rows // block[0]), -(-cols // block[1]))
    mx = block == (1, MX) and scale in tensors and tensors[scale].dtype in E8M0
    found = need(tensors, scale, E8M0 if mx else BLOCK_DTYPES, [grid], codes)
    version = "mxfp8" if mx else "fp8"
    return Encoded(version, block[1], codes.shape, "plain", codes, found, block_rows=block[0], leftovers=rest)


def fp4(tensors: Tensors, codes: StoredPart, scale: str, outer: str = "", divides: bool = False) -> Encoded:
    """A weight of 4-bit floats, two a byte: in NVFP4 if `outer` names its second scale, else in MXFP4.

    `divides`: the second scale is stored as its inverse.
    """
    *lead, half = codes.shape
    shape = (*lead, 2 * half)
    group = NV if outer else MX
    found = need(tensors, scale, ("F8_E4M3",) if outer else E8M0, [(*lead, -(-2 * half // group))], codes)
    rest = there(tensors, codes.name.rpartition(".")[0], ACTIVATIONS)
    if not outer:
        return Encoded("mxfp4", group, shape, "plain", codes, found, leftovers=rest)
    batch = tuple(lead[:-1])
    second = need(tensors, outer, ("F32",), [batch, (*batch, 1), (*batch, 1, 1)], codes)
    rest = (second.name, *rest) if divides else rest
    return Encoded("nvfp4", group, shape, "plain", codes, found, outer_in=second, divides=divides, leftovers=rest)
