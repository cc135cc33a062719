"""Compile the Triton kernels for GPUs this machine need not have: `python tests/compile_kernels.py`."""

from __future__ import annotations

import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from moepack.runtime.kernels import exponent_triton


def main() -> None:
    for capability in (80, 90):
        source = ASTSource(
            exponent_triton._decode,
            {"descriptors": "*i64", "tables": "*i32", "status": "*i32", "K": "constexpr"},
            {"K": exponent_triton.TILES},
        )
        built = compile(source, GPUTarget("cuda", capability, 32), {"num_warps": exponent_triton.TILES})
        loads = len(re.findall("ld.global", built.asm["ptx"]))
        print(f"exponent decode sm_{capability}: {len(built.asm['cubin'])} bytes, {loads} loads")


if __name__ == "__main__":
    main()
