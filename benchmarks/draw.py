"""The pictures and tables of the documentation, from benchmarks/results/*.json.

    python -m benchmarks.draw [--out DIR] [--png]    the pictures, into docs/images/ as SVG, or elsewhere
    python -m benchmarks.draw --tables               the tables, into README.md and docs/benchmarks.md

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. Measures nothing: after a benchmark has
written its JSON file, both commands bring the documents up to date. Pictures have a background of their own, so
that they read the same on a light and on a dark page, and letters that are still legible at half the width.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
TEXTS = {"wikitext2-test": "WikiText-2 test", "gsm8k-test": "GSM8K test", "humaneval": "HumanEval"}
PAPER, INK, GREY = "#fcfbf8", "#1d1d1f", "#6d6d72"
VERSIONS = {"bf16": "#0b4f8a", "w4": "#1f7fc4", "w3": "#5fb0de", "w2": "#f2a65a", "w1": "#d9730d"}
OURS, THEIRS, THIRD, FOURTH = "#0b6bcb", "#c25700", "#3a8a3e", "#8a4fb0"


def results(name: str) -> dict[str, Any]:
    """One file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


# --- tables


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def machine(name: str) -> str:
    """What a file of results was measured on, in one line."""
    m = results(name)["machine"]
    libraries = ", ".join(f"{k} {v}" for k, v in m["libraries"].items() if k != "moepack")
    simd = f" ({', '.join(m['simd'])})" if m["simd"] else ""
    gpu = m["gpu"] or "no GPU"
    threads = f"{m['torch_threads']} torch thread{'s' * (m['torch_threads'] != 1)}"
    where = f"{m['cpu']}{simd}, {m['cores']} cores, {m['memory_gib']} GiB, {gpu}; {threads}; Python {m['python']}"
    return f"Machine: {where}, {libraries}. [As JSON](../benchmarks/results/{name}.json)."


def _texts(row: dict[str, Any]) -> list[str]:
    return [n for n in row if isinstance(row[n], float) and n in TEXTS]


def _rise(row: dict[str, Any], base: dict[str, Any], text: str) -> float:
    return float(100 * (row[text] / base[text] - 1))


def _mean_rise(row: dict[str, Any], base: dict[str, Any]) -> float:
    return statistics.fmean(_rise(row, base, text) for text in TEXTS)


def _percent(value: float) -> str:
    shown = f"{value:+.0f}" if abs(value) >= 20 else f"{value:+.1f}" if abs(value) >= 9.95 else f"{value:+.2f}"
    return f"{shown.replace('-0.00', '+0.00')} %"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def _figures(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def quality() -> str:
    """Perplexity by version, with what that is above the plain model."""
    rows = results("quality-tiny-qwen3-moe")["rows"]
    plain, out = rows[0], []
    for row in rows:
        name = row["version"].removesuffix(" gptq")
        bits = f"{row['bits/weight']:.4g}"
        cells = [
            f"{_figures(row[t])}" + ("" if row is plain else f" ({_percent(_rise(row, plain, t))})") for t in TEXTS
        ]
        out.append([name, bits, *cells])
    return table(["version", "bits a weight", *TEXTS.values()], out)


def summary() -> str:
    """The same for the front page: the mean over the texts, ours and rounding."""
    rows = {row["version"]: row for row in results("quality-tiny-qwen3-moe")["rows"]}
    out = []
    for name in ("bf16", "w4", "w3", "w2", "w1"):
        ours = rows.get(name) or rows[f"{name} gptq"]
        rounded = rows.get(f"{name} rtn")
        cells = [_percent(_mean_rise(r, rows["transformers"])) if r else "" for r in (ours, rounded)]
        out.append([f"`{name}`", f"{ours['bits/weight']:.4g}", *cells])
    return table(["version", "bits a weight", "perplexity", "rounding to nearest"], out)


ALLOCATIONS = {
    "uniform mix": "half at 3 bits, half at 2",
    "uniform mix, random experts": "the same, which half chosen at random",
    "milp, gates": "`milp`, losses weighted by gates (the default)",
    "milp, tokens": "`milp`, losses weighted by tokens",
    "milp, none": "`milp`, unweighted losses",
    "greedy, gates": "`greedy`, losses weighted by gates",
    "prefix_split": "`prefix_split`",
    "prefix, random order": "prefixes of a random order",
    "uniform mix, gptqmodel": "half at 3 bits, half at 2, by gptqmodel",
    "uniform mix, hqq": "the same by HQQ",
}


def allocation() -> str:
    """Perplexity by how widths are given to experts."""
    rows = results("allocation-tiny-qwen3-moe")["rows"]
    out = []
    for row in rows:
        mean = "" if row is rows[0] else f"{_percent(_mean_rise(row, rows[0]))}"
        name = ALLOCATIONS.get(row["allocation"], row["allocation"])
        out.append([name, f"{row['bits/weight']:.4g}", *(_figures(row[t]) for t in TEXTS), mean])
    return table(["allocation", "bits a weight", *TEXTS.values(), "mean rise"], out)


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
        time = f"{row['seconds']:.2f} s" + ("" if row["method"] == "gptq" else f" ({_ratio(row['ours is x faster'])}x)")
        out.append([SETS.get(row["experts"], row["experts"]), METHODS[row["method"]], *errors, time])
    return table(["experts", "method", "w4", "w3", "w2", "w1", "time of w4, w3 and w2"], out)


def build() -> str:
    """A build's memory by depth."""
    out = []
    for row in results("build")["rows"]:
        sizes = [f"{row[k]:,.0f} MiB" for k in ("checkpoint MiB", "layer MiB", "peak MiB")]
        out.append([str(row["layers"]), *sizes, f"{row['seconds']:.0f} s"])
    return table(["layers", "checkpoint", "one layer", "peak of the process", "time"], out)


def true_size() -> str:
    """A build of two layers of true size."""
    out = []
    for row in results("build-true-size")["rows"]:
        seconds = row.get("seconds")
        if seconds is None:
            shown = f"{row['MiB']:,.0f} MiB"
        else:
            shown = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
        out.append([row["what"].replace("estimated: group", "estimated: experts at a time"), shown])
    return table(["what", "how much"], out)


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
            _ratio(row[k]) if k in row else "" for k in ("speed-up", "over floor", "over uniform", "over dequantise")
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


POLICIES = {
    "static, first file, most used": "static map, most used",
    "static, first file, by loss": "static map, by loss",
    "hotness, the two": "`hotness:hi=bf16,lo=w2,between=no`",
    "hotness, two of its choice": "`hotness:between=no`",
    "hotness": "`hotness`",
    "lru": "`lru:hi=bf16,lo=w2`",
}


def residency() -> str:
    """Perplexity by budget and policy."""
    out = []
    for row in results("residency-tiny-qwen3-moe")["rows"]:
        if not set(TEXTS) <= row.keys():
            continue
        share = row["budget"] or "none"
        counts = [f"{row[k]:,.0f}" for k in ("peak MB", "promotions", "MB copied", "waits")]
        out.append([share, POLICIES.get(row["policy"], row["policy"]), *(_figures(row[t]) for t in TEXTS), *counts])
    columns = ["budget", "policy", *TEXTS.values(), "peak, MB", "promotions", "MB read", "waits"]
    return table(columns, out)


def tpot() -> str:
    """Time a token, with and without swaps."""
    rows = [r for r in results("residency-tiny-qwen3-moe")["rows"] if "TPOT median ms" in r]
    return table(
        ["while decoding", "TPOT, median", "TPOT, 99th percentile", "promotions", "waits"],
        [
            [r["policy"].removeprefix("TPOT, ").replace("none", "no swaps"), f"{r['TPOT median ms']:.2f} ms",
             f"{r['TPOT p99 ms']:.2f} ms", f"{r['promotions']:,}", f"{r['waits']:,}"]
            for r in rows
        ],
    )  # fmt: skip


def overlap() -> str:
    """Promotions by the number of threads."""
    rows = [r for r in results("residency-tiny-qwen3-moe")["rows"] if " threads, " in r["policy"]]
    return table(
        ["threads", "passes a second", "promotions", "waits"],
        [
            [
                *r["policy"].removesuffix(" passes a second").split(" threads, "),
                f"{r['promotions']:,}",
                f"{r['waits']:,}",
            ]
            for r in rows
        ],
    )


def missed() -> str:
    """Targets that are not met, of all results."""
    out = []
    for path in sorted(RESULTS.glob("*.json")):
        for t in results(path.stem)["targets"]:
            if not t["met"]:
                sign = "at least" if t["better"] == "higher" else "at most"
                out.append([path.stem, t["name"], f"{t['value']:.4g}", f"{sign} {t['target']:g}"])
    return table(["results", "target", "measured", "wanted"], out)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        summary, quality, allocation, quantisers, build, true_size, codec, kernels, whole_model, shapes, residency,
        tpot, overlap, missed,
    )
}  # fmt: skip
_TABLE = re.compile(r"<!-- table: ([a-z_]+) -->\n.*?<!-- end of table -->", re.S)
_MACHINE = re.compile(r"<!-- machine: ([a-z0-9-]+) -->\n.*?<!-- end of machine -->", re.S)


def with_tables(text: str) -> str:
    """A document with its tables, and the lines that name machines, made anew."""
    text = _TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{TABLES[m[1]]()}\n<!-- end of table -->", text)
    return _MACHINE.sub(lambda m: f"<!-- machine: {m[1]} -->\n{machine(m[1])}\n<!-- end of machine -->", text)


# --- pictures


def _canvas(width: float, height: float) -> Any:
    """A figure and one axis over all of it, in units of a hundredth of an inch."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width / 100, height / 100), facecolor=PAPER)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def _plain(axis: Any) -> None:
    axis.set_facecolor(PAPER)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=14)
    axis.grid(axis="y", color="#e4e1da")
    axis.set_axisbelow(True)


def bundle() -> Any:
    """What moepack does: a checkpoint, a bundle of it, a budget it is served in."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

    figure, axis = _canvas(760, 440)

    def text(x: float, y: float, what: str, size: float = 15, **options: Any) -> None:
        axis.text(x, y, what, **{"fontsize": size, "color": INK, "va": "center", **options})

    def box(x: float, title: str, width: float) -> None:
        style = "round,pad=0,rounding_size=10"
        patch = FancyBboxPatch((x, 96), width, 272, style, facecolor="white", edgecolor=GREY, linewidth=1.5)
        axis.add_patch(patch)
        text(x + width / 2, 398, title, 18, ha="center", weight="bold")

    def squares(x: float, y: float, colours: list[str], across: int, size: float = 24) -> None:
        for i, colour in enumerate(colours):
            at = (x + (i % across) * (size + 4), y - (i // across) * (size + 4))
            axis.add_patch(Rectangle(at, size, size, facecolor=colour, edgecolor="none"))

    def arrow(x: float, to: float) -> None:
        axis.add_patch(
            FancyArrowPatch((x, 232), (to, 232), arrowstyle="-|>", mutation_scale=22, color=INK, linewidth=2)
        )

    box(18, "checkpoint", 168)
    text(102, 342, "experts", 14, ha="center")
    squares(48, 292, [VERSIONS["bf16"]] * 16, 4)
    text(102, 164, "BF16", 16, ha="center", color=VERSIONS["bf16"], weight="bold")
    text(102, 134, "16 bits a weight", 13, ha="center", color=GREY)

    box(236, "bundle", 248)
    text(360, 342, "every expert, 5 times", 14, ha="center")
    rows = results("quality-tiny-qwen3-moe")["rows"]
    bits = {r["version"].split()[0]: r["bits/weight"] for r in rows if "rtn" not in r["version"]}
    for i, (name, colour) in enumerate(VERSIONS.items()):
        y = 305 - 32 * i
        text(250, y, name, 14, color=colour, weight="bold")
        axis.add_patch(Rectangle((306, y - 10), 10.6 * bits[name], 20, facecolor=colour))
        text(312 + 10.6 * bits[name], y, f"{bits[name]:.4g}", 13)
    text(360, 146, "bits a weight,", 13, ha="center", color=GREY)
    text(360, 124, "and what each one costs", 13, ha="center", color=GREY)

    box(534, "budget", 208)
    for y, label, height in ((344, "dense tensors", 28), (312, "KV cache", 28), (280, "activations", 28)):
        axis.add_patch(Rectangle((548, y - height / 2), 180, height, facecolor="#e9e6df"))
        text(638, y, label, 14, ha="center")
    high, low = VERSIONS["bf16"], VERSIONS["w2"]
    squares(584, 236, [high if i in (1, 6, 7, 12) else low for i in range(16)], 4)
    text(638, 132, "busy experts high", 13, ha="center", color=high, weight="bold")
    text(638, 110, "the rest low", 13, ha="center", color="#b3620a", weight="bold")

    arrow(190, 232)
    arrow(488, 530)
    text(211, 62, "build", 16, ha="center", weight="bold")
    text(211, 34, "quantise, measure", 13, ha="center", color=GREY)
    text(509, 62, "serve", 16, ha="center", weight="bold")
    text(509, 34, "hard limit in bytes", 13, ha="center", color=GREY)
    return figure


def bits() -> Any:
    """What a bit costs: the rise in perplexity against bits a weight, moepack's versions and others'."""
    import matplotlib.pyplot as plt

    quality_rows = results("quality-tiny-qwen3-moe")["rows"]
    plain = quality_rows[0]

    def points(method: str) -> tuple[list[float], list[float]]:
        mine = [r for r in quality_rows if r["version"].endswith(f" {method}")]
        return [r["bits/weight"] for r in mine], [_mean_rise(r, plain) for r in mine]

    figure, axis = plt.subplots(figsize=(7.6, 4.9), facecolor=PAPER, layout="constrained")
    _plain(axis)
    axis.plot(*points("rtn"), "s--", color=THEIRS, linewidth=2, markersize=9)
    axis.plot(*points("gptq"), "o-", color=OURS, linewidth=2.5, markersize=10)
    mixes = {r["allocation"]: r for r in results("allocation-tiny-qwen3-moe")["rows"]}
    base = mixes["transformers"]
    for name, colour, mark in (
        ("uniform mix, hqq", FOURTH, "^"),
        ("uniform mix, gptqmodel", THIRD, "D"),
        ("milp, gates", OURS, "*"),
    ):
        axis.plot(
            [mixes[name]["bits/weight"]],
            [_mean_rise(mixes[name], base)],
            mark,
            color=colour,
            markersize=17 if mark == "*" else 10,
        )
    axis.set_yscale("symlog", linthresh=0.1, linscale=0.5)
    axis.set(ylim=(-0.1, 300), xlim=(1, 4.75))
    axis.set_yticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    axis.set_xlabel("bits a weight, tables included", fontsize=15, color=INK)
    axis.set_title("Rise in perplexity over BF16, %", fontsize=16, color=INK, loc="left", weight="bold")
    for x, y, what, colour, side in (
        (1.38, 105, "rounding to nearest", THEIRS, "left"),
        (1.22, 3.0, "moepack", OURS, "left"),
        (3.25, 4.0, "HQQ", FOURTH, "left"),
        (3.12, 0.36, "gptqmodel", THIRD, "left"),
        (3.06, 0.034, "moepack,\nwidths by loss", OURS, "right"),
    ):
        axis.text(x, y, what, color=colour, fontsize=14, ha=side, va="center", weight="bold")
    return figure


def budgets() -> Any:
    """What a budget costs: the rise in perplexity over all-BF16, by memory and policy."""
    import matplotlib.pyplot as plt

    rows = [r for r in results("residency-tiny-qwen3-moe")["rows"] if set(TEXTS) <= r.keys()]
    best = next(r for r in rows if r["policy"] == "all bf16")
    low = next(r for r in rows if r["policy"] == "all w2")
    figure, axis = plt.subplots(figsize=(7.6, 4.9), facecolor=PAPER, layout="constrained")
    _plain(axis)
    for policy, colour, mark in (
        ("static, first file, most used", THEIRS, "s--"), ("static, first file, by loss", THIRD, "D--"),
        ("hotness, the two", "#5fb0de", "o-"), ("hotness", OURS, "o-"),
    ):  # fmt: skip
        mine = (
            [low, *(r for r in rows if r["policy"] == policy)]
            if policy != "hotness"
            else [r for r in rows if r["policy"] == policy]
        )
        label = {
            "hotness, the two": "hotness, bf16 over w2",
            "hotness": "hotness, all versions",
        }
        shown = label.get(policy, policy.replace("static, first file,", "static map,"))
        axis.plot(
            [r["peak MB"] for r in mine],
            [_mean_rise(r, best) for r in mine],
            mark,
            color=colour,
            linewidth=2.5,
            markersize=9,
            label=shown,
        )
    axis.axvline(best["peak MB"], ymax=0.55, color=GREY, linestyle=":")
    axis.text(best["peak MB"] - 0.5, 1.2, "all bf16", fontsize=14, color=GREY, ha="right")
    axis.text(low["peak MB"] + 0.7, _mean_rise(low, best), "all w2", fontsize=14, color=GREY, va="center")
    axis.set_xlabel("memory taken at the peak, MB", fontsize=15, color=INK)
    axis.set_title("Rise in perplexity over all-BF16, %", fontsize=16, color=INK, loc="left", weight="bold")
    axis.set(ylim=(-0.05, 2.4))
    axis.legend(fontsize=14, frameon=False, labelcolor=INK, loc="upper right")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (bundle, bits, budgets)}


def draw(out: Path, png: bool = False) -> list[Path]:
    """Draw every picture into a directory; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    files = []
    with plt.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "moepack", "path.simplify": True}):
        for name, make in PICTURES.items():
            files.append(out / f"{name}.{'png' if png else 'svg'}")
            figure = make()
            figure.savefig(files[-1], dpi=100, facecolor=PAPER, metadata={"Software" if png else "Date": None})
            plt.close(figure)
    return files


def main() -> None:
    """Parse arguments, draw or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where pictures go")
    parser.add_argument("--png", action="store_true", help="PNG, to look at")
    parser.add_argument("--tables", action="store_true", help="write the tables instead")
    args = parser.parse_args()
    if args.tables:
        for path in DOCUMENTS:
            path.write_text(with_tables(path.read_text()))
        return
    for path in draw(args.out, args.png):
        print(path)


if __name__ == "__main__":
    main()
