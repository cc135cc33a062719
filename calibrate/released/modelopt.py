"""NVIDIA's ModelOpt: NVFP4, MXFP8 and FP8, told apart by the tensors' dtypes where a checkpoint mixes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moepack.pack.errors import InputError

from . import fp8
from .encoded import Encoded
from .parts import Document, Scheme, Tensors, option, part, there

_ALGORITHMS = {"NVFP4": ("nvfp4",), "MXFP8": ("mxfp8",), "FP8": ("fp8",), "MIXED_PRECISION": ("nvfp4", "mxfp8", "fp8")}


def read(document: Document, quantization: Document) -> Scheme:
    """The reader, by `quant_algo`."""
    algorithm = option(quantization, "quant_algo", tuple(_ALGORITHMS))
    if algorithm == "NVFP4":
        option(quantization, "group_size", (fp8.NV, None))
    return partial(find, algorithm)


def find(algorithm: str, tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights that have a `weight_scale`; others are stored as they are."""
    for name, entry in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or (entry.dtype not in ("U8", "F8_E4M3") and f"{name}_scale" not in tensors):
            continue
        if there(tensors, module, ("pre_quant_scale",)):
            raise InputError(f"{module}.pre_quant_scale scales the inputs of {name}: not supported")
        codes = part(tensors, name)
        scale = f"{name}_scale"
        if entry.dtype == "U8":
            made = fp8.fp4(tensors, codes, scale, f"{name}_scale_2")
        elif entry.dtype == "F8_E4M3":
            mx = scale in tensors and tensors[scale].dtype in fp8.E8M0
            made = fp8.fp8(tensors, codes, scale, (1, fp8.MX) if mx else None)
        else:
            raise InputError(f"{name} is {entry.dtype} and has {scale}: not a form of {algorithm}")
        if made.version not in _ALGORITHMS[algorithm]:
            raise InputError(f"{name} is stored as {made.version}, but config.json says quant_algo {algorithm}")
        yield name, made
