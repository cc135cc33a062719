"""Compile the Triton kernels for GPUs this machine need not have: `python tests/helpers/compile_kernels.py`."""

from __future__ import annotations

import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels import affine_triton, exponent_triton
from moepack.runtime.kernels.forms import make_forms

# What differs in code: plain BF16, one plane, two planes, one bit without zeros, and each way to read codes and scales.
VERSIONS = [
    ("bf16", 0), ("w8", 64), ("w4", 64), ("w3", 64), ("w2", 64), ("w1", 64), ("int8fp16", 128), ("int4fp16", 32),
    ("mxfp4", 32), ("nvfp4", 16), ("mxfp8", 32), ("fp8", 128), ("fp8", 32), ("fp8row", 0),
]  # fmt: skip


def products(capability: int) -> None:
    """Every encoding at decode's and prefill's tiling, gated with biases, and plain."""
    pointers = {"handles": "*i64", "order": "*i32", "x": "*bf16", "out": "*bf16"}
    pointers |= {f"block_{name}": "*i32" for name in ("expert", "first", "count")}
    numbers = ("rows", "cols", "share", "version", "low", "high", "scale", "zero", "bias", "outer")
    signature = {**pointers, **dict.fromkeys(numbers, "i32")}
    matrix = Matrix("m", 64, 256)
    for name, group in VERSIONS if capability == 90 else VERSIONS[-6:]:
        (form,) = make_forms((matrix,), Version.of(name, group))
        for tiling, gated in ((affine_triton.DECODE, True), (affine_triton.PREFILL, False)):
            chosen = affine_triton._cases(form, tiling) | {"OUTER": form.outer >= 0, "BIAS": gated, "GATED": gated}
            chosen |= {"TOKENS": tiling.tokens, "ROWS": tiling.rows, "WIDEN": False}
            full = {n: signature.get(n, "constexpr") for n in affine_triton._product.arg_names}
            source = ASTSource(affine_triton._product, full, chosen)
            options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
            built = compile(source, GPUTarget("cuda", capability, 32), options)
            dots = len(re.findall(r"mma\.sync|wgmma\.mma_async", built.asm["ptx"]))
            assert dots, "the product does not use tensor cores"
            size = len(built.asm["cubin"])
            print(
                f"product, {name} {group}, {tiling.tokens} x {tiling.rows}, sm_{capability}: {size} bytes, {dots} mma"
            )


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
