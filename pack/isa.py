"""Choose the instruction sets of the compiled loops, and tell where torch has instructions for products in BF16.

Each compiled library's module applies MOEPACK_ISA (`bound`) when imported. isa.h and torch detect the processor's sets.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    import torch

VARIABLE = "MOEPACK_ISA"
ONEDNN = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")  # its names of sets without BF16
ONEDNN_BOUND = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # read once a process, as oneDNN itself reads it
LEVELS = ("plain", "avx2", "avx512", "avx512-vnni", "avx512-bf16", "amx")  # each includes those before; as in isa.h


def bound(best: int) -> int:
    """The highest index into LEVELS to use: that of MOEPACK_ISA if it is set, else `best`, the processor's own.

    Raises InputError if MOEPACK_ISA names an unknown level, or a level above `best`.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return best
    here = ", ".join(LEVELS[: best + 1])
    if asked not in LEVELS:
        raise InputError(f"{VARIABLE}={asked}: unknown level: the levels of this processor are {here}")
    if LEVELS.index(asked) > best:
        raise InputError(f"{VARIABLE}={asked}: this processor does not have it: its levels are {here}")
    return LEVELS.index(asked)


def has_bf16(device: torch.device) -> bool:
    """Whether torch multiplies in BF16 faster than in float32: on GPUs since Ampere, and CPUs with AVX-512 BF16.

    On a CPU oneDNN multiplies, which ONEDNN_MAX_CPU_ISA may bound: torch then emulates BF16, at a tenth of the rate.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and ONEDNN_BOUND not in ONEDNN and torch.cpu._is_avx512_bf16_supported()


def emulated(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch emulates products in `dtype` on a CPU without instructions for them."""
    import torch

    return dtype == torch.bfloat16 and device.type == "cpu" and not has_bf16(device)
