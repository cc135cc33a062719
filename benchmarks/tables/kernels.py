"""Tables of the codec and of the CPU kernels."""

from __future__ import annotations

from .common import VERSIONS, ratio, results, table


def codec() -> str:
    """Size and speed of the lossless codec."""
    out = []
    for row in results("codec")["rows"]:
        speed = [f"{row[k]:.3g}" if k in row else "" for k in ("encode GB/s", "decode GB/s")]
        bits = f"{row['bits/weight']:.2f}" if "bits/weight" in row else ""
        out.append([row["matrix"], row["codec"], str(row.get("threads", "")), bits, row.get("over floor", ""), *speed])
    return table(
        ["weights", "codec", "threads", "bits a weight", "over the floor", "encode, GB/s", "decode, GB/s"], out
    )


def kernels() -> str:
    """A layer's experts at true size, one thread."""
    out = []
    for row in results("kernels-tiny-qwen3-moe")["rows"]:
        if "tokens" not in row:
            continue
        rest = [
            ratio(row[k]) if k in row else "" for k in ("speed-up", "over floor", "over uniform", "over dequantise")
        ]
        out.append([str(row["tokens"]), row["version"], f"{row['ours us'] / 1000:.2f} ms", *rest])
    columns = ["tokens", "version", "ours", "torch BF16 over ours", "ours over reading the bytes"]
    return table([*columns, "over uniform layers", "dequantise and multiply over ours"], out)


def whole_model() -> str:
    """Tokens a second of a whole model."""
    out = []
    for row in results("kernels-tiny-qwen3-moe")["rows"]:
        if "decode tokens/s" in row:
            rates = [f"{row[k]:,.0f}" for k in ("decode tokens/s", "prefill tokens/s")]
            out.append([row["version"].replace("transformers", "transformers,"), *rates])
    return table(["experts by", "decode, tokens/s", "prefill, tokens/s"], out)


def shapes() -> str:
    """The same at other models' shapes, two threads: how far from their bytes, and from torch."""
    rows = [r for r in results("kernels-shapes")["rows"] if "tokens" in r and r["version"] != "mixed"]
    out = []
    for shape in dict.fromkeys(r["shape"] for r in rows):
        for tokens in dict.fromkeys(r["tokens"] for r in rows):
            mine = {r["version"]: r for r in rows if r["shape"] == shape and r["tokens"] == tokens}
            if not mine:
                continue
            key = "over floor" if tokens == 1 else "speed-up"
            what = "ours over reading the bytes" if tokens == 1 else "torch BF16 over ours"
            out.append([shape, f"{tokens}: {what}", *(f"{mine[v][key]:.2f}" if v in mine else "" for v in VERSIONS)])
    return table(["experts of", "tokens", *VERSIONS], out)


def released_kernels() -> str:
    """Every version's experts on one thread, released ones beside bf16 and w4, with AVX2 and all that there is."""
    rows = [r for n in ("kernels-released-avx2", "kernels-released") for r in results(n)["rows"] if "MB" in r]
    pace = {(r["instructions"], r["tokens"], r["version"]): r["ours us"] / r["MB"] for r in rows}
    out = []
    for row in rows:
        *key, mine = row["instructions"], row["tokens"], row["ours us"] / row["MB"]
        over = [ratio(mine / pace[*key, v]) for v in ("bf16", "w4")]
        out.append([*map(str, key), row["version"], f"{row['ours us'] / 1000:.2f} ms", f"{1 / mine * 1000:.1f}", *over])
    columns = ["instructions", "tokens", "version", "ours", "GB/s"]
    return table([*columns, "a byte's time over bf16's", "over w4's"], out)


def rotated_kernels() -> str:
    """Versions whose down multiplies rotated inputs over the same without, one thread."""
    return _over_plain("kernels-rotated")


def small_kernels() -> str:
    """Versions whose scales are bytes over the same with BF16 ones, one thread."""
    return _over_plain("kernels-bytes")


def _over_plain(name: str) -> str:
    rows = [r for r in results(name)["rows"] if "over plain" in r]
    names = list(dict.fromkeys(r["version"] for r in rows))
    found = {(r["tokens"], r["version"]): f"{r['over plain']:.3f}" for r in rows}
    out = [[str(n), *(found[n, v] for v in names)] for n in dict.fromkeys(r["tokens"] for r in rows)]
    return table(["tokens", *(f"`{v.partition(' ')[0]}`" for v in names)], out)
