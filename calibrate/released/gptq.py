"""GPTQ and AWQ: integers of 4 or 8 bits in 32-bit words of transposed matrices, with zero points and FP16 scales."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moepack.pack.errors import InputError

from .compressed import SCALES
from .encoded import Encoded, StoredPart
from .parts import Document, Scheme, Shape, Tensors, group_size, need, option, part, there

_SUFFIX = ".qweight"


def read(document: Document, quantization: Document) -> Scheme:
    """GPTQ's reader, by `bits`, `group_size` and `checkpoint_format`."""
    bits = option(quantization, "bits", (4, 8))
    form = option(quantization, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    option(quantization, "pack_dtype", ("int32",), "int32")
    return partial(find, bits, group_size(quantization), int(form == "gptq"), quantization.get("desc_act") is True)


def find(bits: int, group: int, offset: int, by_activation: bool, tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights whose `qweight` is I32 [cols * bits / 32, rows]. `offset` is 1 where zero points are stored less one."""
    for module, codes in _modules(tensors):
        words, rows = codes.shape
        shape: Shape = (rows, words * 32 // bits)
        scale, zeros = _beside(tensors, module, codes, shape, group, bits)
        g_idx = there(tensors, module, ("g_idx",))
        if by_activation and not g_idx:
            raise InputError(f"{codes.name} has no {module}.g_idx, which desc_act needs")
        if g_idx:
            need(tensors, g_idx[0], ("I32", "I64"), [(shape[1],)], codes)
        version = f"int{bits}{SCALES[scale.dtype]}"
        own = g_idx[0] if g_idx else None
        made = Encoded(
            version, group, shape, "gptq", codes, scale, zeros, g_idx=own, zero_offset=offset, leftovers=g_idx
        )
        yield f"{module}.weight", made


def read_awq(document: Document, quantization: Document) -> Scheme:
    """AWQ's reader, by `bits`, `group_size` and `version`."""
    option(quantization, "bits", (4,))
    option({"version": str(quantization.get("version", "gemm")).lower()}, "version", ("gemm",))
    option(quantization, "zero_point", (True,), True)
    return partial(find_awq, group_size(quantization))


def find_awq(group: int, tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights whose `qweight` is I32 [cols, rows / 8]."""
    for module, codes in _modules(tensors):
        cols, words = codes.shape
        shape: Shape = (words * 8, cols)
        scale, zeros = _beside(tensors, module, codes, shape, group, 4)
        yield f"{module}.weight", Encoded(f"int4{SCALES[scale.dtype]}", group, shape, "awq", codes, scale, zeros)


def _modules(tensors: Tensors) -> Iterator[tuple[str, StoredPart]]:
    for name in tensors:
        if name.endswith(_SUFFIX):
            codes = part(tensors, name, (2,))
            if codes.dtype != "I32":
                raise InputError(f"{name} is {codes.dtype}, not I32")
            yield name.removesuffix(_SUFFIX), codes


def _beside(
    tensors: Tensors, module: str, codes: StoredPart, shape: Shape, group: int, bits: int
) -> tuple[StoredPart, StoredPart]:
    rows, cols = shape
    groups = -(-cols // group) if group else 1
    scale = need(tensors, f"{module}.scales", tuple(SCALES), [(groups, rows)], codes)
    return scale, need(tensors, f"{module}.qzeros", ("I32",), [(groups, -(-rows * bits // 32))], codes)
