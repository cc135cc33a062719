"""The exponent codec beside its peers: size against the entropy, and speed, in one run on the same data.

    python -m benchmarks.codec [--checkpoint MODEL]

Ours (with AVX2, and with the best instruction set that there is), ZipNN, zstd and a memory copy on generated weights of
an expert's shapes, one thread each; FP8 codes with every instruction set; sizes also on a trained checkpoint's experts.
Peers come with the extra `bench`; one that is not installed is left out and said so. Rates are medians in the thread's
processor time, which others on the machine do not lengthen; a ratio is the median of rounds in which all take turns.
"""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import EXAMPLES, Row, Target, arguments, finish, in_turns
from benchmarks.limited.weights import to_bf16
from moepack.pack.codec import exponent_fast, fp8
from moepack.pack.codec.bits import Bf16Bits, Codes

SHAPES = {"Qwen3-30B-A3B gate and up": (1536, 2048), "Qwen3-30B-A3B down": (2048, 768), "Mixtral down": (4096, 14336)}
Coded = Any  # what a codec makes or gives back: bytes or an array
Coder = Callable[..., Coded]
SMALL = 1 << 24  # weights: matrices up to this are measured in ten times as many rounds


def gaussian(shape: tuple[int, int], seed: int) -> Bf16Bits:
    """BF16 bits of N(0, 0.02) weights, uint16."""
    return to_bf16(np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)).reshape(-1)


def trained(checkpoint: Path) -> list[Bf16Bits]:
    """The expert matrices of a checkpoint, BF16 bits."""
    import torch
    from safetensors import safe_open

    out = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                if ".experts." in name and name.endswith("weight"):
                    out.append(f.get_tensor(name).view(torch.uint16).numpy().reshape(-1))
    return out


def floor(data: Bf16Bits | Codes) -> float:
    """Bits a weight: the entropy of exponents, and the other 8 bits of BF16 or 4 of FP8, which no codec shortens."""
    if data.itemsize == 1:
        return 4 + entropy(data >> 3 & 15)
    return 8 + entropy(data >> 7 & 255)


def entropy(exponents: npt.NDArray[np.integer[Any]]) -> float:
    """Bits of entropy of the exponents."""
    p = np.bincount(exponents) / exponents.size
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


@dataclass(frozen=True)
class Codec:
    """One codec on one array: `encode` returns what `decode` takes, which has as many bytes as `len` says."""

    name: str
    encode: Callable[[], Coded]
    decode: Callable[[Coded], Coded]


def codecs(data: Bf16Bits | Codes) -> list[Codec]:
    """Ours with each instruction set, and beside it on BF16 the peers that are installed; all on one thread."""
    if data.itemsize == 1:
        return ours(data, fp8.encode, fp8.decode_into, 0)
    return [*ours(data, exponent_fast.encode, exponent_fast.decode_into, 1), *peers(data)]


def ours(data: Bf16Bits | Codes, encode: Coder, decode_into: Coder, least: int) -> list[Codec]:
    """A codec at each level from `least` on, which it sets first: others may have run between."""
    native = exponent_fast.engine()
    if native is None:
        raise SystemExit("the codec was not compiled: install moepack where there is a C compiler")
    out = np.empty_like(data)

    def at(level: int) -> Codec:
        def encoded() -> Coded:
            native.use_level(level)
            return encode(data, 1)

        def decoded(coded: Coded) -> Coded:
            native.use_level(level)
            decode_into(coded, out, 1)
            return out

        return Codec(f"moepack ({native.LEVELS[level]})", encoded, decoded)

    return [at(level) for level in range(min(least, native.BEST), native.BEST + 1)]


def peers(bits: Bf16Bits | Codes) -> list[Codec]:
    """Those that are installed."""
    made = []
    data = bits.tobytes()
    with contextlib.suppress(ImportError):
        import zipnn

        z = zipnn.ZipNN(method="HUFFMAN", input_format="byte", bytearray_dtype="bfloat16", threads=1)
        made.append(Codec("ZipNN", lambda: z.compress(bytearray(data)), z.decompress))
    with contextlib.suppress(ImportError):
        import zstandard

        c = zstandard.ZstdCompressor(level=3, threads=0)
        d = zstandard.ZstdDecompressor()
        made.append(Codec("zstd -3", lambda: c.compress(data), d.decompress))
    return made


def same(decoded: Coded, bits: Bf16Bits | Codes) -> bool:
    """Whether what came back is what went in."""
    return bytes(decoded.tobytes() if hasattr(decoded, "tobytes") else decoded) == bits.tobytes()


def turns(work: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """The thread's processor seconds of each in every round."""

    def prepared(work: Callable[[], object], number: int) -> Callable[[], object]:
        return work

    return in_turns({name: functools.partial(prepared, one) for name, one in work.items()}, runs, time.process_time)


def speed(name: str, data: Bf16Bits | Codes, runs: int) -> list[Row]:
    """A row a codec, and on BF16 one for a memory copy."""
    rows: list[Row] = []
    least = floor(data)
    work: dict[str, Callable[[], object]] = {}
    for codec in codecs(data):
        coded = codec.encode()
        if coded is None or not same(codec.decode(coded), data):
            raise SystemExit(f"{codec.name} did not give back {name}")
        size = 8 * len(coded) / data.size
        row: Row = {"matrix": name, "codec": codec.name, "bits/weight": size}
        rows.append({**row, "over floor": f"{100 * (size / least - 1):+.2f} %"})
        work[f"{codec.name}: encode"] = codec.encode
        work[f"{codec.name}: decode"] = functools.partial(codec.decode, coded)
    if data.itemsize == 2:
        rows.append({"matrix": name, "codec": "memory copy"})
        copy = functools.partial(np.copyto, np.empty_like(data), data)
        work |= {"memory copy: encode": copy, "memory copy: decode": copy}
    times = turns(work, runs if data.size > SMALL else 10 * runs)
    for row in rows:
        for what in ("encode", "decode"):
            own = times[f"{row['codec']}: {what}"]
            row[f"{what} GB/s"] = data.nbytes / 1e9 / statistics.median(own)
            theirs = times.get(f"ZipNN: {what}")
            if theirs is not None and row["codec"].startswith("moepack"):
                row[f"{what} over ZipNN"] = statistics.median(z / o for z, o in zip(theirs, own, strict=True))
    return rows


def ratios(rows: list[Row], what: str) -> dict[str, float]:
    """Ours over ZipNN's, by engine, each the least of the matrices."""
    found: dict[str, float] = {}
    for r in rows:
        if (over := r.get(f"{what} over ZipNN")) is not None:
            found[r["codec"]] = min(over, found.get(r["codec"], over))
    return found


def sizes(name: str, arrays: Sequence[Bf16Bits] | Sequence[Codes]) -> Row:
    """Bits of a weight or code over many arrays, each coded on its own, beside their floor."""
    weights = sum(m.size for m in arrays)
    least = sum(m.size * floor(m) for m in arrays) / weights
    own = 8 * sum(_coded_size(m) for m in arrays) / weights
    row: Row = {"matrix": name, "codec": "moepack, sizes only", "bits/weight": own}
    return row | {"over floor": f"{100 * (own / least - 1):+.2f} %", "overhead": own / least}


def _coded_size(matrix: npt.NDArray[Any]) -> int:
    """Bytes of a coded array; FP8 codes that coding does not shorten stay as they are."""
    if matrix.itemsize != 1:
        return len(exponent_fast.encode(matrix))
    coded = fp8.encode(matrix)
    return matrix.size if coded is None else len(coded)


def fp8_codes(bits: Bf16Bits) -> Codes:
    """E4M3 codes of BF16 bits, the greatest of 16,384 in a row, as many as in a block of 128 by 128, scaled to 448."""
    import torch

    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    blocks = torch.nn.functional.pad(weight, (0, -len(weight) % 16384)).reshape(-1, 16384)
    codes = (blocks * (448 / blocks.abs().amax(1, keepdim=True).clamp(min=1e-30))).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).reshape(-1)[: len(weight)].numpy().copy()


def fp8_report(checkpoint: Path, runs: int) -> tuple[list[Row], list[Target]]:
    """Sizes and speeds of FP8; wanted: at most 6.9 bits a code, and 2 GB/s a thread with AVX2."""
    down = "Qwen3-30B-A3B down"
    name = f"FP8 codes of {down}"
    codes = fp8_codes(gaussian(SHAPES[down], 1))
    totals = [sizes(name, [codes])]
    totals.append(sizes(f"FP8 codes of experts of {checkpoint.name}", [fp8_codes(m) for m in trained(checkpoint)]))
    rows = speed(name, codes, runs)
    targets = [Target(f"size, {totals[0]['matrix']}: bits a code", totals[0]["bits/weight"], 6.9, "lower")]
    by = {r["codec"]: r["decode GB/s"] for r in rows}
    if "moepack (C, AVX2)" in by:
        targets.append(Target("decode, one thread, AVX2: GB/s of FP8", by["moepack (C, AVX2)"], 2.0, "higher"))
    return totals + rows, targets


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe", help="for sizes")
    args = parser.parse_args()
    runs = 3 if args.quick else 9
    shapes = dict(list(SHAPES.items())[:2]) if args.quick else SHAPES
    one: list[Row] = []
    for i, (name, shape) in enumerate(shapes.items()):
        one += speed(name, gaussian(shape, i), runs)
    totals = [
        sizes("Qwen3-30B-A3B down", [gaussian(SHAPES["Qwen3-30B-A3B down"], 1)]),
        sizes(f"experts of {args.checkpoint.name}", trained(args.checkpoint)),
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
            targets.append(Target(name, value, 1.5, "higher"))
    coded, reached = fp8_report(args.checkpoint, runs)
    finish("exponent codec, GB/s of BF16 or of FP8", one + totals + coded, targets + reached, args.json)


if __name__ == "__main__":
    main()
