"""What each GPU kernel that the runtime can launch takes: registers, stack, shared memory, and the width of its loads.

    python -m benchmarks.resources [--quick] [--write]
    python -m benchmarks.resources --loops
    python -m benchmarks.resources --rocm [--write]

Needs no GPU: kernels are compiled for six architectures, with what is known of a launch's numbers when it is launched.
A cell is registers a thread / bytes of stack a thread / bytes of shared memory / bytes of the least load of weights.
Compared with the committed table (results/gpu-resources.csv), which `--write` writes anew: more stack than 16 bytes,
more shared memory than there is, and with the table's Triton more registers or narrower loads are missed targets.
`--quick` compiles the worst variants of each architecture. Triton keeps what it compiled. `--loops` counts
the instructions that a thread takes for a weight in the loop of the kernel for few tokens, and its barriers, on sm_90.
`--rocm` compiles those for BF16 activations for AMD's CDNA 3 and RDNA 3. A cell of its table is vector registers of a
thread / of those kept in memory / bytes of shared memory, or why it is not compiled; nothing is held to it.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
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
    exponent_triton,
    gemv_triton,
    many_triton,
    routing_triton,
    step_triton,
    switch_triton,
)

TABLE = Path(__file__).parent / "results" / "gpu-resources.csv"
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a program may have, by compute capability
ROCM = {"gfx942": 64, "gfx1100": 32}  # threads of a wavefront
ROCMS_TABLE = TABLE.with_name("gpu-resources-rocm.csv")
ROCMS_SHARED = 64  # KiB
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

    @staticmethod
    def of(cell: str) -> Taken:
        """The reverse of `str`."""
        return Taken(*map(int, cell.split("/")))

    def __str__(self) -> str:
        return "/".join(map(str, astuple(self)))


Compile = Callable[[int | str], Any]  # from a compute capability, or AMD's architecture, to Triton's compiled kernel


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

    def compile_for(of: int | str) -> Any:
        pairs = not isinstance(of, str) and of // 10 in affine_triton.PAIRS
        source = ASTSource(
            kernel, signature, {**constants, **({"PAIRS": pairs} if "PAIRS" in constants else {})}, known
        )
        target = GPUTarget("hip", of, ROCM[of]) if isinstance(of, str) else GPUTarget("cuda", of, 32)
        return triton.compile(source, target, options)

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
                if dtype == DTYPES[0] or kernel is attend_triton._attend:
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


def digest() -> str:
    """Of what the kernels do, without docstrings and comments, so that a table of other kernels is known."""
    of_experts = gemv_triton, many_triton, exponent_triton, switch_triton
    modules = *of_experts, routing_triton, attend_triton, step_triton
    found = [v.src for m in modules for v in vars(m).values() if isinstance(v, JITFunction)]
    trees = [ast.parse(source) for source in found]
    for function in (f for tree in trees for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)):
        function.body = function.body[ast.get_docstring(function) is not None :]
    return hashlib.sha256("".join(map(ast.dump, trees)).encode()).hexdigest()[:16]


def committed() -> tuple[dict[tuple[str, int], Taken], str, str]:
    """The committed table, the version of Triton that made it, and the digest of the kernels."""
    head, *rows = csv.reader(TABLE.read_text().splitlines())
    made, of, *names = head
    table = {(" ".join(row[:2]), int(n)): Taken.of(c) for row in rows for n, c in zip(names, row[2:], strict=True)}
    return table, made, of


def worst(table: Mapping[tuple[str, int], Taken]) -> list[tuple[str, int]]:
    """Of each architecture, the variants that take the most registers and the most shared memory."""
    out = []
    for capability in SHARED:
        mine = [(astuple(taken), taken.shared, key) for key, taken in table.items() if key[1] == capability]
        out += [max(mine)[-1], max((shared, key) for _, shared, key in mine)[-1]]
    return list(dict.fromkeys(out))


def judged(now: Mapping[tuple[str, int], Taken]) -> list[Target]:
    """What the kernels are held to."""
    table, made, _ = committed()
    same = made == triton.__version__
    wide = [k for k, t in now.items() if same and k in table and t.load < table[k].load]
    more = [k for k, t in now.items() if same and k in table and t.registers > table[k].registers]
    counts: Iterable[tuple[str, int]] = (
        (f"variants with more stack than {STACK} bytes", sum(t.stack > STACK for t in now.values())),
        ("variants that pass the shared memory", sum(t.shared > SHARED[k[1]] << 10 for k, t in now.items())),
        (f"variants with more registers than in the table: {more[:3]}", len(more)),
        (f"variants with narrower loads than in the table: {wide[:3]}", len(wide)),
    )
    return [Target(name, n, 0, "lower") for name, n in counts]


def write(now: Mapping[tuple[str, int], Taken]) -> None:
    """Write the table."""
    with TABLE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([triton.__version__, digest(), *SHARED])
        for name in variants():
            out.writerow([*name.split(" ", 1), *(now[name, capability] for capability in SHARED)])


def show_loops(json: Path | None) -> None:
    """Print what `loops` counts, and exit by whether it is within its ceilings."""
    made = loops()
    targets = [Target(f"{w}, instructions a weight", n, CEILINGS[re.split("[- ]", w)[0]], "lower") for w, n, _ in made]
    targets.append(Target("loops with barriers", sum(barriers > 0 for _, _, barriers in made), 0, "lower"))
    rows: list[Row] = [{"kernel": w, "instructions": f"{n:.2f}", "barriers": barriers} for w, n, barriers in made]
    finish("instructions of a thread for a weight, sm_90", rows, targets, json)
    raise SystemExit(not all(t.met for t in targets))


def on_rocm(compiles: Compile, of: str) -> str:
    """A cell of ROCm's table."""
    try:
        kernel = compiles(of)
    except Exception as error:  # of any kind, from Triton's passes
        return f"not compiled: {next(iter(str(error).splitlines()), type(error).__name__)[:80]}"
    code = kernel.asm["amdgcn"]
    registers, spilled, shared = (
        int(max(re.findall(rf"\.{name}:\s+(\d+)", code), key=int))
        for name in ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size")
    )
    return f"{registers}/{spilled}/{max(shared, kernel.metadata.shared)}"


def show_rocm(written: bool, json: Path | None) -> None:
    """Compile every variant for ROCm's architectures; print, and write or compare the table."""
    served = {name: made for name, made in variants().items() if not re.search(r"\bfp(16|32) ", f"{name} ")}
    now = [[*name.split(" ", 1), *(on_rocm(made, of) for of in ROCM)] for name, made in served.items()]
    if written:
        with ROCMS_TABLE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([[triton.__version__, digest(), *ROCM], *now])
    rows: list[Row] = []
    for at, of in enumerate(ROCM, 2):
        cells = [[int(n) for n in row[at].split("/")] for row in now if not row[at].startswith("not")]
        row: Row = {"architecture": of, "variants": len(now), "not compiled": len(now) - len(cells)}
        row["with registers in memory"] = sum(spilled > 0 for _, spilled, _ in cells)
        row["past its shared memory"] = sum(shared > ROCMS_SHARED << 10 for *_, shared in cells)
        rows.append(row)
    other = next(csv.reader(ROCMS_TABLE.read_text().splitlines()))[1] != digest()
    targets = [Target("tables of other kernels: --write", int(other), 0, "lower")]
    finish("kernels on AMD's GPUs", rows, targets, json)
    raise SystemExit(other)


def main() -> None:
    """Compile, compare, print."""
    parser = arguments(__doc__)
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--loops", action="store_true", help="count instructions a weight instead")
    parser.add_argument("--rocm", action="store_true", help="compile for AMD's architectures instead")
    args = parser.parse_args()
    if args.loops:
        show_loops(args.json)
    if args.rocm:
        show_rocm(args.write, args.json)
    of = variants()
    keys = worst(committed()[0]) if args.quick else [(name, c) for name in of for c in SHARED]
    now = {(name, c): taken(of[name](c)) for name, c in keys}
    if args.write and not args.quick:
        write(now)
    targets = judged(now)
    table, _, made_of = committed()
    others = len({n for n, _ in table} ^ of.keys())
    targets.append(Target("variants that the table has in vain or lacks", others, 0, "lower"))
    targets.append(Target("tables of other kernels: --write", int(made_of != digest()), 0, "lower"))
    rows: list[Row] = [
        {"kernel": n, **{f"sm_{c}": str(now[n, c]) for c in SHARED if (n, c) in now}}
        for n in dict.fromkeys(n for n, _ in keys)
    ]
    finish("registers / stack / shared / load", rows, targets, args.json)
    raise SystemExit(not all(t.met for t in targets))


if __name__ == "__main__":
    main()
