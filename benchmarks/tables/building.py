"""Tables of what a build makes and takes: quality, allocations, losses, time, memory, families."""

from __future__ import annotations

from .common import TEXTS, figures, mean_rise, percent, ratio, results, rise, table


def quality() -> str:
    """Perplexity by version, with what that is above the plain model."""
    rows = results("quality-tiny-qwen3-moe")["rows"]
    plain = rows[0]
    out = []
    for row in rows:
        name = row["version"].removesuffix(" gptq")
        bits = f"{row['bits/weight']:.4g}"
        cells = [f"{figures(row[t])}" + ("" if row is plain else f" ({percent(rise(row, plain, t))})") for t in TEXTS]
        out.append([name, bits, *cells])
    return table(["version", "bits a weight", *TEXTS.values()], out)


def summary() -> str:
    """The same for the front page: the mean over the texts, ours and rounding."""
    rows = {row["version"]: row for row in results("quality-tiny-qwen3-moe")["rows"]}
    out = []
    for name in ("bf16", "w4", "w3", "w2", "w1"):
        ours = rows.get(name) or rows[f"{name} gptq"]
        rounded = rows.get(f"{name} rtn")
        cells = [percent(mean_rise(r, rows["transformers"])) if r else "" for r in (ours, rounded)]
        out.append([f"`{name}`", f"{ours['bits/weight']:.4g}", *cells])
    return table(["version", "bits a weight", "perplexity", "rounding to nearest"], out)


SETS = {
    "generated 1536x2048": "Qwen3-30B-A3B's gate and up, generated",
    "generated 2048x768": "its down, generated",
    "tiny-qwen3-moe": "the 192 of tiny-qwen3-moe",
}


METHODS = {"gptq": "moepack's GPTQ", "gptqmodel": "gptqmodel", "hqq": "HQQ", "rtn": "rounding to nearest"}


def quantisers() -> str:
    """Output error and time of each method."""
    out = []
    for row in results("quantise-tiny-qwen3-moe")["rows"]:
        errors = [
            f"{row[v]:#.2g}" if row["method"] in ("gptq", "rtn") or v != "w1" else "" for v in ("w4", "w3", "w2", "w1")
        ]
        time = f"{row['seconds']:.2f} s" + ("" if row["method"] == "gptq" else f" ({ratio(row['ours is x faster'])}x)")
        out.append([SETS.get(row["experts"], row["experts"]), METHODS[row["method"]], *errors, time])
    return table(["experts", "method", "w4", "w3", "w2", "w1", "time of w4, w3 and w2"], out)


def families() -> str:
    """Those that work first, then the others with what moepack says of them."""
    rows = results("families")["rows"]
    order = ["works", "refused", "no small model"]
    rows = sorted(rows, key=lambda r: (order.index(r["outcome"]), r["model_type"]))
    return table(
        ["`model_type`", "class", "", "experts", "why"],
        [[f"`{r['model_type']}`", f"`{r['class']}`", r["outcome"], r.get("experts", ""), r["why"]] for r in rows],
    )


def families_rounding() -> str:
    """The error of the logits in BF16 against float32, plain and served."""
    rows = [row for row in results("families")["rows"] if row["outcome"] == "works"]
    return table(
        ["`model_type`", "kinds of layers tried", "plain BF16", "moepack", "ratio"],
        [[f"`{row['model_type']}`", row["layers"], row["plain"], row["moepack"], row["ratio"]] for row in rows],
    )
