"""Compile the Triton kernels for GPUs this machine need not have: `python tests/helpers/compile_kernels.py`."""

from __future__ import annotations

import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from moepack.runtime.kernels import affine_triton, exponent_triton


def products(capability: int) -> None:
    """Every width at decode's and prefill's tiling, gated with stored zeros and biases, and plain."""
    pointers = {"handles": "*i64", "order": "*i32", "x": "*bf16", "out": "*bf16"}
    pointers |= {f"block_{name}": "*i32" for name in ("expert", "first", "count")}
    numbers = ("rows", "cols", "share", "version", "low", "high", "scale", "zero", "bias")
    signature = {**pointers, **dict.fromkeys(numbers, "i32")}
    # What differs in code: plain BF16, one plane, two planes, one bit without zeros; all of them on the newer.
    for bits in (16, 8, 4, 3, 2, 1) if capability == 90 else (3,):
        for tiling, gated in ((affine_triton.DECODE, True), (affine_triton.PREFILL, False)):
            chosen = {"BITS": bits, "GROUP": 64, "STORED": 1 < bits < 16, "BIAS": gated, "GATED": gated, "WIDEN": False}
            chosen |= {"TOKENS": tiling.tokens, "ROWS": tiling.rows}
            full = {n: signature.get(n, "constexpr") for n in affine_triton._product.arg_names}
            source = ASTSource(affine_triton._product, full, chosen)
            options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
            built = compile(source, GPUTarget("cuda", capability, 32), options)
            dots = len(re.findall(r"mma\.sync|wgmma\.mma_async", built.asm["ptx"]))
            assert dots, "the product does not use tensor cores"
            size = len(built.asm["cubin"])
            print(f"product, {bits} bits, {tiling.tokens} x {tiling.rows}, sm_{capability}: {size} bytes, {dots} mma")


def main() -> None:
    for capability in (80, 90):
        source = ASTSource(
            exponent_triton._decode,
            {"descriptors": "*i64", "tables": "*i32", "status": "*i32", "K": "constexpr"},
            {"K": exponent_triton.TILES},
        )
        built = compile(source, GPUTarget("cuda", capability, 32), {"num_warps": exponent_triton.TILES})
        loads = len(re.findall("ld.global", built.asm["ptx"]))
        products(capability)
        print(f"exponent decode sm_{capability}: {len(built.asm['cubin'])} bytes, {loads} loads")


if __name__ == "__main__":
    main()
