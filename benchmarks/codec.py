"""The exponent codec beside its peers: size against the entropy, and speed, in one run on the same data.

    python -m benchmarks.codec [--checkpoint MODEL] [--fp8]

CPU: ours (with AVX2, and with the best instruction set that there is), ZipNN, zstd and a memory copy on generated
weights of an expert's shapes, one thread each, then all cores; FP8 codes with every instruction set; sizes also on a
trained checkpoint's experts, with DFloat11's layout (its encoder is slow: its rate is taken on fewer weights). GPU,
where there is one: ours and DFloat11's kernel against the byte floor. Peers come with the extra `bench`; one that is
not installed is left out and said so. Rates are medians, of one thread in its processor time, which others on the
machine do not lengthen; a ratio is the median of rounds in which all take turns.

--fp8 measures FP8 codes alone: seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import EXAMPLES, Target, arguments, finish
from moepack.pack.codec import exponent_fast, fp8

SHAPES = {"Qwen3-30B-A3B gate and up": (1536, 2048), "Qwen3-30B-A3B down": (2048, 768), "Mixtral down": (4096, 14336)}
SMALL = 1 << 24  # weights: matrices up to this are measured in ten times as many rounds
DF11_WEIGHTS = 1 << 18  # its encoder is a Python loop


def gaussian(shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """BF16 bits of N(0, 0.02) weights, uint16."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)
    rounded = values.view(np.uint32) + 0x7FFF + (values.view(np.uint32) >> 16 & 1)
    return (rounded >> 16).astype(np.uint16).reshape(-1)


def trained(checkpoint: Path) -> list[np.ndarray[Any, Any]]:
    """The expert matrices of a checkpoint, BF16 bits."""
    from safetensors import safe_open

    out = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                if ".experts." in name and name.endswith("weight"):
                    import torch

                    out.append(f.get_tensor(name).view(torch.uint16).numpy().reshape(-1))
    return out


def entropy(bits: np.ndarray[Any, Any]) -> float:
    """Bits of entropy of the exponents."""
    p = np.bincount(bits >> 7 & 255, minlength=256) / bits.size
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


class Codec:
    """One codec on one array: `encode` returns what `decode` takes; `size` its bytes."""

    def __init__(
        self, name: str, encode: Callable[[], Any], decode: Callable[[Any], Any], size: Callable[[Any], int]
    ) -> None:
        self.name = name
        self.encode = encode
        self.decode = decode
        self.size = size


def codecs(bits: np.ndarray[Any, Any], threads: int) -> list[Codec]:
    """Those that are installed, on the same bytes and as many threads."""
    out = np.empty_like(bits)

    def decode(coded: Any) -> Any:
        exponent_fast.decode_into(coded, out, threads)
        return out

    made = [Codec("moepack (NumPy)", lambda: exponent_fast.encode(bits, threads), decode, len)]
    if native := exponent_fast.engine():

        def at(level: int) -> Codec:
            """Ours, which sets the level first: others may have run between."""

            def encode() -> Any:
                native.use_level(level)
                return exponent_fast.encode(bits, threads)

            def decode_at(coded: Any) -> Any:
                native.use_level(level)
                return decode(coded)

            return Codec(f"moepack ({native.LEVELS[level]})", encode, decode_at, len)

        made = [at(level) for level in range(min(1, native.BEST), native.BEST + 1)]
    data = bits.tobytes()
    with contextlib.suppress(ImportError):
        import zipnn

        z = zipnn.ZipNN(method="HUFFMAN", input_format="byte", bytearray_dtype="bfloat16", threads=threads)
        made.append(Codec("ZipNN", lambda: z.compress(bytearray(data)), z.decompress, len))
    with contextlib.suppress(ImportError):
        import zstandard

        c = zstandard.ZstdCompressor(level=3, threads=threads if threads > 1 else 0)
        d = zstandard.ZstdDecompressor()
        made.append(Codec("zstd -3", lambda: c.compress(data), d.decompress, len))
    return made


def same(decoded: Any, bits: np.ndarray[Any, Any]) -> bool:
    """Whether what came back is what went in."""
    return bytes(decoded.tobytes() if hasattr(decoded, "tobytes") else decoded) == bits.tobytes()


def dfloat11() -> types.ModuleType | None:
    """DFloat11's encoder, without the package's face, which needs a GPU to be imported; None where it is not there."""
    found = importlib.util.find_spec("dfloat11")
    if found is None or found.origin is None:
        return None
    spec = importlib.util.spec_from_file_location("dfloat11_utils", Path(found.origin).with_name("dfloat11_utils.py"))
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module


def encode_dfloat11(module: types.ModuleType, bits: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Encoded exponents, the other bytes, output positions, gaps, the look-up tables."""
    import torch

    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, counter = module.get_codec(weight)
        codec, _, table = module.get_32bit_codec(counter)
        luts = module.get_luts(table)
        encoded, other, positions, gaps, _ = module.encode_weights([weight], codec, 8, 512)
    return encoded, other, positions, gaps, luts


def speed(name: str, bits: np.ndarray[Any, Any], threads: int, runs: int) -> list[dict[str, Any]]:
    """A row a codec, and one for a memory copy."""
    rows: list[dict[str, Any]] = []
    amount = bits.nbytes / 1e9
    out = np.empty_like(bits)
    floor = 8 + entropy(bits)
    work: list[Callable[[], object]] = []
    for codec in codecs(bits, threads):
        coded = codec.encode()
        if not same(codec.decode(coded), bits):
            raise SystemExit(f"{codec.name} did not give back {name}")
        size = 8 * codec.size(coded) / bits.size
        row: dict[str, Any] = {"matrix": name, "codec": codec.name, "threads": threads, "exponent entropy": floor - 8}
        rows.append({**row, "bits/weight": size, "over floor": f"{100 * (size / floor - 1):+.2f} %"})
        work += [codec.encode, functools.partial(codec.decode, coded)]
    rows.append({"matrix": name, "codec": "memory copy", "threads": 1})
    copy = functools.partial(np.copyto, out, bits)
    clock = time.process_time if threads == 1 else time.perf_counter
    times = turns([*work, copy, copy], runs if bits.size > SMALL else 10 * runs, clock)
    seconds = [statistics.median(t) for t in times]
    theirs = next((i for i, row in enumerate(rows) if row["codec"] == "ZipNN"), None)
    for i, row in enumerate(rows):
        for k, what in enumerate(("encode", "decode")):
            row[f"{what} GB/s"] = amount / seconds[2 * i + k]
            if theirs is not None and row["codec"].startswith("moepack"):
                pairs = zip(times[2 * theirs + k], times[2 * i + k], strict=True)
                row[f"{what} over ZipNN"] = statistics.median(z / o for z, o in pairs)
    return rows


def turns(
    work: Sequence[Callable[[], object]], runs: int, clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """The seconds of each in every round, all taking turns, so that what disturbs the machine disturbs all alike."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(runs + 1):
        for i, one in enumerate(work):
            began = clock()
            one()
            times[i].append(clock() - began)
    return [t[1:] for t in times]


def ratios(rows: list[dict[str, Any]], what: str) -> dict[str, float]:
    """Ours over ZipNN's, by engine, each the least of the matrices."""
    found: dict[str, float] = {}
    for r in rows:
        if (over := r.get(f"{what} over ZipNN")) is not None:
            found[r["codec"]] = min(over, found.get(r["codec"], over))
    return found


def sizes(name: str, matrices: list[np.ndarray[Any, Any]], utils: types.ModuleType | None) -> dict[str, Any]:
    """Bits a weight over many matrices, each coded on its own, and DFloat11's on the same."""
    weights = sum(m.size for m in matrices)
    floor = sum(m.size * (8 + entropy(m)) for m in matrices) / weights
    ours = 8 * sum(len(exponent_fast.encode(m)) for m in matrices) / weights
    row: dict[str, Any] = {
        "matrix": name,
        "codec": "moepack, sizes only",
        "exponent entropy": floor - 8,
        "bits/weight": ours,
        "over floor": f"{100 * (ours / floor - 1):+.2f} %",
        "overhead": ours / floor,
    }
    if utils is not None:
        few = []
        n = 0
        for m in matrices:
            few.append(m)
            n += m.size
            if n >= DF11_WEIGHTS:
                break
        theirs = 0
        began = time.process_time()
        for m in few:
            encoded, other, positions, gaps, _ = encode_dfloat11(utils, m)
            theirs += encoded.numel() + other.numel() + 4 * positions.numel() + gaps.numel()
        row["dfloat11 GB/s"] = 2 * n / 1e9 / (time.process_time() - began)
        row["dfloat11 bits/weight"] = 8 * theirs / n
        row["ours there"] = 8 * sum(len(exponent_fast.encode(m)) for m in few) / n
    return row


def fp8_codes(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """E4M3 codes of BF16 bits, the greatest of 16,384 in a row, as many as in a block of 128 by 128, scaled to 448."""
    import torch

    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    blocks = torch.nn.functional.pad(weight, (0, -len(weight) % 16384)).reshape(-1, 16384)
    codes = (blocks * (448 / blocks.abs().amax(1, keepdim=True).clamp(min=1e-30))).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).reshape(-1)[: len(weight)].numpy().copy()


def fp8_sizes(name: str, matrices: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Bits a code over many matrices of codes, each coded on its own, beside four bits and the exponents' entropy."""
    codes = sum(m.size for m in matrices)
    floor = sum(m.size * (4 + entropy(m.astype(np.uint16) << 4 & 0x780)) for m in matrices) / codes
    ours = sum(m.size if (c := fp8.encode(m)) is None else len(c) for m in matrices) * 8 / codes
    over = f"{100 * (ours / floor - 1):+.2f} %"
    row = {"matrix": f"FP8 codes of {name}", "codec": "moepack, sizes only", "exponent entropy": floor - 4}
    return {**row, "bits/weight": ours, "over floor": over}


def fp8_speed(name: str, codes: np.ndarray[Any, Any], runs: int) -> list[dict[str, Any]]:
    """Coding and decoding FP8 codes: a row for every level of the compiled loops."""
    native = exponent_fast.engine()
    out = np.empty_like(codes)
    rows: list[dict[str, Any]] = []
    for level in range(native.BEST + 1) if native else [None]:
        if native:
            native.use_level(level)
        coded = fp8.encode(codes, 1)
        if coded is None:
            raise SystemExit(f"coding the FP8 codes of {name} gains nothing")
        fp8.decode_into(coded, out, 1)
        if not same(out, codes):
            raise SystemExit(f"coding the FP8 codes of {name} did not give them back")
        work: list[Callable[[], object]] = [
            functools.partial(fp8.encode, codes, 1),
            functools.partial(fp8.decode_into, coded, out, 1),
        ]
        speeds = [codes.nbytes / 1e9 / statistics.median(t) for t in turns(work, runs)]
        engine = native.LEVELS[level] if native else "NumPy"
        row = {"matrix": f"FP8 codes of {name}", "codec": f"moepack ({engine})", "threads": 1}
        row |= {"bits/weight": 8 * len(coded) / codes.size, "encode GB/s": speeds[0], "decode GB/s": speeds[1]}
        rows.append(row)
    if native:
        native.use_level()
    return rows


def fp8_report(checkpoint: Path, runs: int) -> tuple[list[dict[str, Any]], list[Target]]:
    """Sizes and speeds of FP8; wanted: at most 6.9 bits a code, and 2 GB/s a thread with AVX2."""
    name = "Qwen3-30B-A3B down"
    bits = gaussian(SHAPES["Qwen3-30B-A3B down"], 1)
    totals = [fp8_sizes(name, [fp8_codes(bits)])]
    totals.append(fp8_sizes(f"experts of {checkpoint.name}", [fp8_codes(m) for m in trained(checkpoint)]))
    rows = fp8_speed(name, fp8_codes(bits), 10 * runs)
    targets = [Target(f"size, {totals[0]['matrix']}: bits a code", totals[0]["bits/weight"], 6.9, "lower")]
    by = {r["codec"]: r["decode GB/s"] for r in rows}
    if "moepack (C, AVX2)" in by:
        targets.append(Target("decode, one thread, AVX2: GB/s of FP8", by["moepack (C, AVX2)"], 2.0, "higher"))
    return totals + rows, targets


def gpu(runs: int, utils: types.ModuleType | None) -> tuple[list[dict[str, Any]], list[Target]]:
    """Decoding 32 experts of Qwen3-30B-A3B in one launch; DFloat11's kernel on one of their matrices."""
    import torch

    from moepack.pack.codec.exponent import HEADER
    from moepack.runtime.kernels.exponent_triton import DecodeJob, decode

    def timed(work: Callable[[], object]) -> float:
        """Seconds of the device: the host is let ahead, because it takes longer to describe matrices."""
        times: list[float] = []
        for _ in range(runs + 1):
            torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times[1:])[runs // 2]

    jobs = []
    for i in range(32):
        for shape in list(SHAPES.values())[:2]:
            bits = gaussian(shape, i)
            coded = exponent_fast.encode(bits)
            room = torch.zeros(-(-len(coded) // 64) * 64, dtype=torch.uint8, device="cuda")
            room[: len(coded)] = torch.from_numpy(coded)
            out = torch.empty(bits.size, dtype=torch.bfloat16, device="cuda")
            jobs.append((DecodeJob(room[: len(coded)], coded[:HEADER].copy(), out), bits))
    status = decode([j for j, _ in jobs])
    right = all(np.array_equal(j.out.view(torch.int16).cpu().numpy().view(np.uint16), b) for j, b in jobs)
    if not right or status.any():
        raise SystemExit("the GPU decoder did not give back the weights")
    read = sum(j.coded.numel() for j, _ in jobs)
    written = sum(b.nbytes for _, b in jobs)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / timed(lambda: target.copy_(source))
    seconds = timed(lambda: decode([j for j, _ in jobs]))
    began = time.perf_counter()
    for _ in range(runs):
        decode([j for j, _ in jobs])
    host = (time.perf_counter() - began) / runs
    floor = (read + written) / copy
    rows = [
        {
            "matrix": "32 Qwen3-30B-A3B experts",
            "codec": "moepack (Triton)",
            "decode GB/s": written / 1e9 / seconds,
            "host us": host * 1e6,
        },
        {"matrix": "32 Qwen3-30B-A3B experts", "codec": "byte floor", "decode GB/s": written / 1e9 / floor},
    ]
    targets = [Target("GPU decode, of the byte floor", floor / seconds, 0.4, "higher")]
    with contextlib.suppress(ImportError):
        import cupy

        if utils is not None:
            bits = gaussian(SHAPES["Qwen3-30B-A3B down"], 0)
            encoded, other, positions, gaps, luts = (t.cuda() for t in encode_dfloat11(utils, bits))
            package = importlib.util.find_spec("dfloat11")
            assert package is not None and package.origin is not None
            kernel = cupy.RawModule(path=str(Path(package.origin).with_name("decode.ptx"))).get_function("decode")
            spans = positions.cpu().numpy().astype(np.int64)
            shared = 512 * 4 + 4 + int((spans[1:] - spans[:-1]).max()) * 2
            out = torch.empty(bits.size, dtype=torch.bfloat16, device="cuda")
            blocks = -(-encoded.numel() // (512 * 8))
            given = [t.data_ptr() for t in (luts, encoded, other, positions, gaps, out)]
            given += [luts.shape[0], encoded.numel(), bits.size]
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                theirs = timed(lambda: kernel(grid=(blocks,), block=(512,), shared_mem=shared, args=given))
            ours = timed(lambda: decode([next(j for j, b in jobs if b.size == bits.size)]))
            rate = bits.nbytes / 1e9 / theirs
            rows.append({"matrix": "Qwen3-30B-A3B down", "codec": "DFloat11", "decode GB/s": rate})
            rows.append({"matrix": "Qwen3-30B-A3B down", "codec": "moepack", "decode GB/s": bits.nbytes / 1e9 / ours})
            targets.append(Target("GPU decode, ours over DFloat11", theirs / ours, 2.0, "higher"))
    return rows, targets


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe", help="for sizes on trained weights"
    )
    parser.add_argument("--fp8", action="store_true", help="FP8 codes alone")
    args = parser.parse_args()
    import torch

    runs = 3 if args.quick else 9
    speeds_of = ["encode GB/s", "decode GB/s"]
    columns = ["matrix", "codec", "threads", "exponent entropy", "bits/weight", "over floor", *speeds_of]
    if args.fp8:
        finish("coded FP8 codes, GB/s of FP8", columns, *fp8_report(args.checkpoint, runs), args.json)
        return
    utils = dfloat11()
    shapes = dict(list(SHAPES.items())[:2]) if args.quick else SHAPES
    one: list[dict[str, Any]] = []
    for i, (name, shape) in enumerate(shapes.items()):
        one += speed(name, gaussian(shape, i), 1, runs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = next(reversed(shapes))
    every = speed(name, gaussian(shapes[name], 0), cores, runs)[:-1] if cores > 1 else []
    totals = [
        sizes("Qwen3-30B-A3B down", [gaussian(SHAPES["Qwen3-30B-A3B down"], 1)], utils),
        sizes(f"experts of {args.checkpoint.name}", trained(args.checkpoint), utils),
    ]
    targets = [
        Target(f"size, {t['matrix']}: bits a weight over 8 + entropy", t["overhead"], 1.02, "lower") for t in totals
    ]
    for what in ("encode", "decode"):
        over = ratios(one, what)
        if not over:
            print("ZipNN is not installed (pip install 'moepack[bench]'): no ratio to it", file=sys.stderr)
        for engine, value in over.items():
            name = f"{what}, one thread: {engine} over ZipNN, least of the matrices"
            targets += [Target(name, value, 1.5, "higher"), Target(f"{name}: ambition", value, 3.0, "higher")]
    coded, reached = fp8_report(args.checkpoint, runs)
    rows = one + every + totals + coded
    targets += reached
    if utils is None:
        print("DFloat11 is not installed (pip install 'moepack[bench]'): left out", file=sys.stderr)
    for t in totals if utils is not None else []:
        theirs = t.pop("dfloat11 bits/weight")
        rate = t.pop("dfloat11 GB/s")
        rows.append({"matrix": t["matrix"], "codec": "DFloat11", "bits/weight": theirs, "encode GB/s": rate})
        targets.append(Target(f"size, {t['matrix']}: ours over DFloat11", t.pop("ours there") / theirs, 1.0, "lower"))
        ours = min(r["encode GB/s"] for r in one if r["codec"].startswith("moepack"))
        targets.append(Target(f"encode, {t['matrix']}: ours over DFloat11", ours / rate, 150, "higher"))
    if torch.cuda.is_available():
        more, reached = gpu(runs, utils)
        rows += more
        targets += reached
    else:
        print("no CUDA device: the GPU decoder was not timed; the same command does it where there is one")
    finish("exponent codec, GB/s of BF16 or of FP8", columns, rows, targets, args.json)


if __name__ == "__main__":
    main()
