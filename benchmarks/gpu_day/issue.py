"""Thread-instructions a weight of the GPU kernels, counted in their machine code, and what a launch needs of an SM.

A kernel of experts spends its time in one loop, whose instructions are counted between a branch backward and its
target; each warp issues each once, predicated or not. Needs no GPU: what the runtime would launch is compiled for GPUs
that need not be there. Registers and shared memory are those of results/gpu-resources.csv, from the same compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from triton import knobs

from benchmarks.kernels.launches import experts, products
from benchmarks.resources import Taken, compiled, taken, variants
from moepack.runtime.kernels import exponent_triton

from .model import DECODER, Kernel

CAPABILITIES = (86, 89, 90, 120)  # of the GPUs in devices.py
FORMS = (("bf16", 0), ("w8", 128), ("w4", 128), ("w3", 128), ("w2", 64), ("w1", 64), ("nvfp4", 16))
BIASED = (("mxfp4", 32), ("w2", 64), ("w1", 64))  # gpt-oss's
TOKENS = {"decode": 1, "prefill": 2048}
ROW = 128  # weights that a warp of the decoder takes in a turn of its loop (exponent_triton._ROW)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a launch's constants say of a program."""

    tokens: int
    rows: int
    weights: int  # of a turn of the loop
    gated: bool

    @staticmethod
    def of(named: Mapping[str, Any]) -> Tile:
        """Of the kernel for many tokens, or of that for few, whose threads keep what they load."""
        gated = bool(named["GATED"])
        if "S" in named:
            return Tile(8, 32, 32 * named["GROUP"] * named["S"] * (1 + gated), gated)
        rows = 8 * named["W"] * named["E"]
        columns = max(named["GROUP"], 4 * named["U"] * named["COLUMNS"])
        return Tile(named["TOKENS"], rows, rows * columns * (1 + gated), gated)


def loop(kernel: Any) -> int:
    """Instructions of the longest loop of a compiled kernel that has no loop inside."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return longest(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def longest(sass: str) -> int:
    """The same, of machine code as cuobjdump shows it."""
    lines = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    number = {address: i for i, (address, _) in enumerate(lines)}
    found = []
    for i, (address, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target is not None and int(target[1], 16) < address:
            found.append((number[int(target[1], 16)], i))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in found)]
    return max((b - a + 1 for a, b in inner), default=0)


def counted() -> dict[str, dict[str, dict[str, Any]]]:
    """Every kernel that a prediction needs, by "FORM KIND PHASE" and compute capability."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    cases = [(n, g, False) for n, g in FORMS] + [(n, g, True) for n, g in BIASED]
    for name, group, bias in cases:
        for phase, tokens in TOKENS.items():
            for kernel, args, named in products(experts(name, group, torch.bfloat16, tokens, bias)):
                kind = f"{'gated' if named['GATED'] else 'plain'}{' bias' * bias}"
                of = out.setdefault(f"{name} {kind} {phase}", {})
                if not of:
                    of.update(_compiled(compiled(kernel, args, named), Tile.of(named)))
    out[DECODER] = _compiled(variants()[DECODER], Tile(0, 1, ROW * exponent_triton.TILES, False))
    return out


def _compiled(make: Any, tile: Tile) -> dict[str, dict[str, Any]]:
    out = {}
    for capability in CAPABILITIES:
        made = make(capability)
        takes: Taken = taken(made)
        warps = made.metadata.num_warps
        out[str(capability)] = asdict(
            Kernel(
                tile.tokens,
                tile.rows,
                tile.weights,
                tile.gated,
                warps,
                made.metadata.num_stages,
                takes.registers,
                takes.shared,
                loop(made) * 32 * warps / tile.weights,
            )
        )
    return out
