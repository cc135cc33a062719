"""Tables of the codec and of the CPU kernels."""

from __future__ import annotations

from .common import ratio, results, table


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
        if row.get("tokens") not in (1, 16, 512):
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


def released_kernels() -> str:
    """Every version's experts for one token on one thread, with AVX2 alone and with all instructions that there are."""
    rows = [
        r
        for n in ("kernels-released-avx2", "kernels-released")
        for r in results(n)["rows"]
        if "MB" in r and r["tokens"] == 1
    ]
    pace = {(r["instructions"], r["version"]): r["ours us"] / r["MB"] for r in rows}
    out = []
    for row in rows:
        mine = row["ours us"] / row["MB"]
        over = [ratio(mine / pace[row["instructions"], v]) for v in ("bf16", "w4")]
        out.append(
            [row["instructions"], row["version"], f"{row['ours us'] / 1000:.2f} ms", f"{1 / mine * 1000:.1f}", *over]
        )
    columns = ["instructions", "version", "ours", "GB/s"]
    return table([*columns, "a byte's time over bf16's", "over w4's"], out)
