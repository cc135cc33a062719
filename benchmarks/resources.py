"""What each GPU kernel that the runtime can launch takes: registers, stack, shared memory, and the width of its loads.

    python -m benchmarks.resources [--quick]
    python -m benchmarks.resources --loops

Needs no GPU: kernels are compiled for six architectures, with what is known of a launch's numbers when it is launched.
A cell is registers a thread / bytes of stack a thread / bytes of shared memory / bytes of the least load of weights.
More stack than 16 bytes, more shared memory than there is, and loads of weights narrower than 2 bytes are missed
targets. All variants take hours on two cores; `--quick` compiles those that took the most registers and shared memory.
Triton keeps what it compiled. `--loops` counts the instructions that a thread takes for a weight in the loop of the
kernel for few tokens, and its barriers, on sm_90.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.common import Row, Target, arguments, finish
from benchmarks.kernels import launches
from moepack.runtime.kernels import (
    affine_triton,
    attend_triton,
    gemv_triton,
    latent_triton,
)

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a program may have, by compute capability
STACK = 16  # bytes of a thread that a variant may keep on its stack: 63 of 2,520 keep 8 or 16
FORMS = (  # what shipped recipes make or keep, and what the kernels read in a way of its own
    ("bf16", 0), ("w8", 128), ("w4", 128), ("w4", 64), ("w3", 128), ("w3", 64), ("w2", 64), ("w1", 64), ("mxfp4", 32),
    ("nvfp4", 16), ("mxfp8", 32), ("fp8", 128), ("fp8row", 0), ("int4fp16", 32), ("int8fp16", 128), ("t3", 128),
    ("t2", 128),
)  # fmt: skip
SMALL = (  # with scales of a byte, for BF16 activations
    ("w4/8", 64), ("w3/8", 64), ("w2/8", 64), ("w1/8", 64), ("w4d5/8", 128), ("w3d4/8", 128), ("w2d3/8", 128),
    ("w1d2/8", 128), ("t2d3/8", 128),
)  # fmt: skip
BIASED = (("mxfp4", 32), ("w3", 64), ("w2", 64), ("w1", 64))  # gpt-oss's, whose gate is its own
DENSE = (("w8", 128), ("w4", 128), ("mxfp4", 32), ("fp8", 128))  # in which matrices outside the experts are served
# The most instructions for a weight of BF16 activations' products, so that an H100 waits for bytes at 3.35 TB/s; for
# trellis codes it waits for these.
CEILINGS = {"w8": 3.0, "w4": 4.5, "w3": 5.0, "w2": 2.5, "w1": 2.5, "mxfp4": 4.5, "bf16": 1.5, "t3": 17.0, "t2": 13.5}
CEILINGS |= {f"{name}/8": CEILINGS[name] for name in ("w4", "w3", "w2", "w1")}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LADDERS = (  # of shipped recipes: one launch for all their versions; the first with every dtype of activations
    (("bf16", 0), ("w4", 128), ("w3", 128), ("w2", 64), ("w1", 64)),
    (("w8", 128), ("w4", 64), ("w2", 64)),
    (("mxfp4", 32), ("w3", 64), ("w2", 64), ("w1", 64)),
    (("fp8", 128), ("w4", 128), ("w3", 128), ("w2", 64)),
    (("bf16", 0), ("t3", 128), ("t2d3", 128), ("t2", 128)),
    (("bf16", 0), ("w4d5", 128), ("w3d4", 128), ("w2d3", 128), ("w1d2", 128)),
    (("bf16", 0), *SMALL[4:8]),
)
QUICK = (  # what took the most registers, stack and shared memory of all variants, on one architecture or another
    "w2d3-128 bf16 gated 8x32x1024",
    "w3-64 fp32 gated 32x64x64",
    "w4-64 fp32 plain 32x128x64",
    "fp8row fp32 plain 32x128x128",
    "fp8row fp32 gated 32x64x128",
    "switch bf16+w4-128+w3-128+w2-64+w1-64 fp32 gated 1536x2048, 8 warps",
    "step routing many 16x512 bf16",
    "step attend 128 masked fp32",
    "step over_latents latents of 128 masked bf16",
    "step over_latents latents of 128 masked fp32",
)
TYPES = {
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Taken:
    """What one kernel takes."""

    registers: int
    stack: int
    shared: int
    load: int  # 0 where no weights are read by a kernel of experts

    def __str__(self) -> str:
        return "/".join(map(str, astuple(self)))


Compile = Callable[[int], Any]  # from a compute capability to Triton's compiled kernel


def compiled(kernel: JITFunction[Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Compile:
    """The kernel of a launch, specialised as Triton does: numbers that are 1, numbers and addresses divisible by 16."""
    options = {k: v for k, v in named.items() if k in ("num_warps", "num_stages", "maxnreg")}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    constants: dict[str, Any] = {k: v for k, v in named.items() if k not in options}
    known: dict[tuple[int, ...], Any] = {}
    for at, (parameter, value) in enumerate(zip(kernel.params, args, strict=False)):
        special = not parameter.do_not_specialize
        if value is None or (isinstance(value, int) and value == 1 and special):
            constants[parameter.name] = value
            continue
        kind = {int: "i32", float: "fp32"}.get(type(value))
        signature[parameter.name] = kind or f"*{TYPES[value.dtype]}"
        if special and (kind is None or (kind == "i32" and value % 16 == 0)):
            known[(at,)] = [["tt.divisibility", 16]]

    def compile_for(of: int) -> Any:
        pairs = of // 10 in affine_triton.PAIRS
        source = ASTSource(
            kernel, signature, {**constants, **({"PAIRS": pairs} if "PAIRS" in constants else {})}, known
        )
        return triton.compile(source, GPUTarget("cuda", of, 32), options)

    return compile_for


@lru_cache(1)
def variants() -> dict[str, Compile]:
    """Every kernel that the runtime can launch, by its name in the table."""
    out: dict[str, Compile] = {}
    cases = [(n, g, d, t, False) for n, g in FORMS for d in DTYPES for t in (1, 2048)]
    cases += [(n, g, torch.bfloat16, t, True) for n, g in BIASED for t in (1, 2048)]
    cases += [(n, g, torch.bfloat16, t, False) for n, g in (*LADDERS[-2][1:], *SMALL) for t in (1, 2048)]
    for name, group, dtype, tokens, bias in cases:
        made = launches.experts(name, group, dtype, tokens, bias)
        for kernel, args, named in launches.products(made):
            what = f"{'gated' if named['GATED'] else 'plain'}{' bias' if bias else ''}"
            out[_name(name, group, dtype, what, named)] = compiled(kernel, args, named)
        for kernel, args, named in made:
            if kernel.fn.__name__ == "arrange":
                out[f"arrange {_form(name, group)} {TYPES[dtype]}"] = compiled(kernel, args, named)
            elif kernel.fn.__name__ in ("_rank", "_place"):
                tile = f" for {named['TOKENS']} slots" if "TOKENS" in named else ""
                out[f"sort {kernel.fn.__name__.strip('_')}{tile}"] = compiled(kernel, args, named)
    for name, group, tokens in ((n, g, t) for n, g in DENSE for t in (1, 2048)):
        for kernel, args, named in launches.dense(name, group, tokens):
            few = kernel.fn.__name__ == "few"
            what = _name(name, group, DTYPES[0], "dense", named) if few else f"unpack {_form(name, group)}"
            out[what] = compiled(kernel, args, named)
    for name, (kernel, args, named) in launches.decoders().items():
        out[f"exponents' {name}"] = compiled(kernel, args, named)
    for ladder, dtype in ((of, d) for of in LADDERS for d in (DTYPES if of == LADDERS[0] else DTYPES[:1])):
        bias = ladder[0] in BIASED
        for kernel, args, named in launches.switches(ladder, dtype, bias):
            what = f"{TYPES[dtype]} {'gated' if named['GATED'] else 'plain'}{' bias' * bias}"
            names = "+".join(f"{n}-{g}" if g else n for n, g in ladder)
            shape = f"{args[7]}x{args[8]}, {named['num_warps']} warps"
            out[f"switch {names} {what} {shape}"] = compiled(kernel, args, named)
    for dtype in DTYPES:
        for name, made in launches.beside(dtype):
            for kernel, args, named in made:
                if dtype == DTYPES[0] or kernel in (attend_triton._attend, latent_triton._over_latents):
                    out[f"step {kernel.__name__.strip('_')} {name} {TYPES[dtype]}"] = compiled(kernel, args, named)
    return out


def _name(name: str, group: int, dtype: torch.dtype, what: str, named: Mapping[str, Any]) -> str:
    """A variant's name in the table: encoding, activations, what is computed, tile."""
    few = (gemv_triton.SLOTS.value, gemv_triton.ROWS.value, named["GROUP"] * named.get("S", 1))
    tile = few if "S" in named else (named["TOKENS"], 8 * named["W"] * named["E"], named["GROUP"])
    return f"{_form(name, group)} {TYPES[dtype]} {what} {'x'.join(map(str, tile))}"


def _form(name: str, group: int) -> str:
    return f"{name}-{group}" if group else name


def _shown(kernel: Any, option: str) -> str:
    """What cuobjdump says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops() -> list[tuple[str, float, int]]:
    """Of the kernel for few tokens: a variant's name, instructions a weight in its loop, barriers there."""
    out = []
    cases = [(name, next(g for n, g in (*FORMS, *SMALL) if n == name)) for name in CEILINGS]
    for name, group in cases:
        for kernel, args, named in launches.products(launches.experts(name, group, torch.bfloat16, 1, False)):
            found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _shown(compiled(kernel, args, named)(90), "-sass"))
            code = [(int(at, 16), text) for at, text in found]
            back = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.* 0x(\w+)", text))]
            body = max(([text for at, text in code if a <= at <= b] for a, b in back), key=len)
            weights = (1 + named["GATED"]) * gemv_triton.ROWS.value * named["GROUP"] * named["S"]
            barriers = sum("BAR" in text for text in body)
            what = _name(name, group, torch.bfloat16, "gated" if named["GATED"] else "plain", named)
            out.append((what, len(body) * 32 * named["num_warps"] / weights, barriers))
    return out


def taken(kernel: Any) -> Taken:
    """Read what a compiled kernel takes from its machine code and its PTX."""
    shown = _shown(kernel, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
    assert found is not None, shown
    registers, stack, local = map(int, found.groups())
    product = kernel.metadata.name in ("few", "many", "_switch")
    assert not product or "mma" in kernel.asm["ptx"], "a product does not use tensor cores"
    return Taken(registers, stack + local, int(kernel.metadata.shared), _least_load(kernel.asm["ptx"]))


def _least_load(ptx: str) -> int:
    """The bytes of the least load at the lines that load weights; 0 if there is none."""
    weights = set()
    ours = Path(affine_triton.__file__).parent
    for number, path in re.findall(r'\.file\s+(\d+) "(.*)"', ptx):
        # Triton's cache may hold what another checkout compiled: the same source, under that checkout's path.
        source = ours / Path(path).name if Path(path).parts[-3:-1] == ours.parts[-2:] else None
        lines = source.read_text().split("\n") if source and source.exists() else []
        named = (i for i, line in enumerate(lines, 1) if "tl.load(plane +" in line or "tl.load(weights +" in line)
        weights |= {(int(number), i + n) for i in named for n in range(5)}  # PTX counts the lines of Triton's assembly
    here = False
    sizes = []
    for line in ptx.split("\n"):
        if place := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            here = (int(place[1]), int(place[2])) in weights
        elif here and (copy := re.search(r"cp\.async\S+ .*, (0x\w+)(?:, |;)", line)):
            sizes.append(int(copy[1], 16))
        elif here and (load := re.search(r"ld\.global\S*?(?:\.v(\d))?\.[bu](\d+) ", line)):
            sizes.append(int(load[1] or 1) * int(load[2]) // 8)
    return min(sizes, default=0)


def judged(now: Mapping[tuple[str, int], Taken]) -> list[Target]:
    """What the kernels are held to."""
    stacked = [key for key, taken in now.items() if taken.stack > STACK]
    large = [key for key, taken in now.items() if taken.shared > SHARED[key[1]] << 10]
    narrow = [key for key, taken in now.items() if taken.load == 1]
    counts = {
        f"variants with more stack than {STACK} bytes": stacked,
        "variants that pass the shared memory": large,
        "variants that load weights byte by byte": narrow,
    }
    return [Target(f"{name}: {keys[:3]}" if keys else name, len(keys), 0, "lower") for name, keys in counts.items()]


def show_loops(json: Path | None) -> None:
    """Print what `loops` counts, and exit by whether it is within its ceilings."""
    made = loops()
    targets = [Target(f"{w}, instructions a weight", n, CEILINGS[re.split("[- ]", w)[0]], "lower") for w, n, _ in made]
    targets.append(Target("loops with barriers", sum(barriers > 0 for _, _, barriers in made), 0, "lower"))
    rows: list[Row] = [{"kernel": w, "instructions": f"{n:.2f}", "barriers": barriers} for w, n, barriers in made]
    finish("instructions of a thread for a weight, sm_90", rows, targets, json)
    raise SystemExit(not all(t.met for t in targets))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--loops", action="store_true", help="count instructions a weight instead")
    args = parser.parse_args()
    if args.loops:
        show_loops(args.json)
    every = variants()
    names = QUICK if args.quick else tuple(every)
    now = {(name, capability): taken(every[name](capability)) for name in names for capability in SHARED}
    targets = judged(now)
    rows: list[Row] = [{"kernel": name, **{f"sm_{c}": str(now[name, c]) for c in SHARED}} for name in names]
    finish("registers / stack / shared / load", rows, targets, args.json)
    raise SystemExit(not all(target.met for target in targets))


if __name__ == "__main__":
    main()
