"""Tables of what a build makes and takes: quality, allocations, losses, time, memory, families."""

from __future__ import annotations

import statistics
from typing import Any

from .common import RESULTS, TEXTS, VERSIONS, figures, mean_rise, percent, ratio, results, rise, table


def quality() -> str:
    """Perplexity by version, with what that is above the plain model."""
    rows = results("quality-tiny-qwen3-moe")["rows"]
    plain, out = rows[0], []
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


ALLOCATIONS = {
    "uniform mix": "half at 3 bits, half at 2",
    "uniform mix, random experts": "the same, which half chosen at random",
    "milp, gates": "integer programming, losses weighted by gates",
    "milp, tokens": "integer programming, losses weighted by tokens",
    "milp, none": "integer programming, unweighted losses",
    "greedy, gates": "`greedy`, losses weighted by gates (the default)",
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
        mean = "" if row is rows[0] else f"{percent(mean_rise(row, rows[0]))}"
        name = ALLOCATIONS.get(row["allocation"], row["allocation"])
        out.append([name, f"{row['bits/weight']:.4g}", *(figures(row[t]) for t in TEXTS), mean])
    return table(["allocation", "bits a weight", *TEXTS.values(), "mean rise"], out)


def losses() -> str:
    """The truth over what loss tables say."""
    rows = results("losses-tiny-qwen3-moe")["rows"]
    out = []
    for kind, tokens in dict.fromkeys((row["experts"], row["tokens"]) for row in rows):
        found = {row["version"]: row for row in rows if (row["experts"], row["tokens"]) == (kind, tokens)}
        plain = [row["true / on own tokens"] for row in found.values()]
        inside = statistics.fmean(row["inside two"] for row in found.values())
        ratios = [figures(found[v]["true / measured"]) for v in VERSIONS[1:]]
        out.append([kind, f"{tokens:,}", *ratios, f"{min(plain):.2f} to {max(plain):.2f}", f"{100 * inside:.0f} %"])
    columns = ["experts", "tokens an expert", *VERSIONS[1:], "uncorrected, all four", "within two standard errors"]
    return table(columns, out)


def weighting() -> str:
    """Divergence by what losses are weighted with."""
    models = ("tiny-qwen3-moe", "mini-qwen3-moe")
    first, second = (results(f"weighting-{m}")["rows"] for m in models)
    out = []
    for rows in zip(first, second, strict=True):
        cells = [percent(r["from the default, %"]) + f" ({r['its 95 %']})" for r in rows]
        default = [f"{r['KL, mnats']:.3g} mnat a token" for r in rows]
        out.append([rows[0]["losses weighted by"], *(default if rows[0] is first[0] else cells)])
    return table(["losses weighted by", *models], out)


def reach() -> str:
    """Divergence by budget, of allocations by the default weighting and by the logits."""
    out = []
    for model in ("tiny-qwen3-moe", "mini-qwen3-moe"):
        rows = results(f"reach-{model}")["rows"]
        for bits in dict.fromkeys(r["bits"] for r in rows):
            own = {r["losses weighted by"]: r for r in rows if r["bits"] == bits}
            cells = [f"{r['KL, mnats']:.3g}" for r in own.values()]
            less = percent(own["logits"]["from the default, %"]) + f" ({own['logits']['its 95 %']})"
            out.append([model, f"{bits:g}", *cells, less])
    return table(
        ["model", "bits of code", "gates, mnat", "logits, mnat", "uniform mix, mnat", "logits from gates"], out
    )


def tried() -> str:
    """Divergence of experts that were quantised on the outputs of quantised layers, over the build's own."""
    out = []
    for model in ("tiny-qwen3-moe", "mini-qwen3-moe"):
        for r in results(f"tried-{model}")["rows"]:
            if r["way"].startswith("on the outputs"):  # the other one is in `refined`
                ratio = f"{r['over as built']:.3f} ± {r['+-']:.3f}"
                out.append([model, r["version"], f"{r['KL, mnat']:.3g}", ratio])
    return table(["model", "version", "mnat a token", "over as built"], out)


def learned() -> str:
    """What learning scales and codes by gradient leaves of the divergence, beside fitting down again."""
    rows = results("learned-mini-qwen3-moe")["rows"]
    built = {r["version"]: r["seconds"] for r in rows if r["way"] == "as built"}
    out = [
        [
            r["version"],
            r["way"],
            f"{r['over as built']:.3f} ± {r['+-']:.3f}",
            f"{r['seconds'] / built[r['version']]:.1f}",
        ]
        for r in rows
        if r["way"] != "as built"
    ]
    return table(["version", "way", "over as built", "times the build's time"], out)


def refined() -> str:
    """Versions as built, with down fitted again, with scales of a byte, and with both, over today's at as many bits."""
    out = []
    for model in ("tiny-qwen3-moe", "mini-qwen3-moe"):
        by_version: dict[str, list[dict[str, Any]]] = {}
        for r in sorted(results(f"refined-{model}")["rows"], key=lambda r: -r["scale bits"]):
            by_version.setdefault(r["version"], []).append(r)
        for version, rows in by_version.items():
            bits = ", ".join(f"{r['bits/weight']:.3f}" for r in rows[::2])
            ratios = [(r["over today's at these bits"], r["today +-"]) for r in rows]
            cells = ["1" if over == 1 else f"{over:.2f} ± {half:.2f}" for over, half in ratios]
            out.append([model, f"`{version}`", bits, f"{rows[0]['KL, mnat']:.3g}", *cells])
    columns = ["model", "version", "bits", "divergence", "over today's at these bits", "down fitted again"]
    return table([*columns, "scales of a byte", "both"], out)


def autoround() -> str:
    """AutoRound's divergence beside the build's, and over today's at as many bits."""
    out = []
    for model in ("tiny-qwen3-moe", "mini-qwen3-moe"):
        for r in results(f"autoround-{model}")["rows"]:
            ratio, half = r["over today's at these bits"], r["today +-"]
            known = f"{ratio:.2f} ± {half:.2f}" if r["way"] == "AutoRound" else "1"
            out.append([model, r["version"], r["way"], f"{r['bits/weight']:.4g}", f"{r['KL, mnat']:.3g}", known])
    return table(["model", "version", "way", "bits", "mnat a token", "over today's at these bits"], out)


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


def build() -> str:
    """A build's memory by depth."""
    out = []
    for row in results("build")["rows"]:
        sizes = [f"{row[k]:,.0f} MiB" for k in ("checkpoint MiB", "layer MiB", "peak MiB")]
        out.append([str(row["layers"]), *sizes, f"{row['seconds']:.0f} s"])
    return table(["layers", "checkpoint", "one layer", "peak of the process", "time"], out)


def estimates() -> str:
    """What the dry run says, and what was."""
    out = []
    for row in results("build-estimates")["rows"]:
        pairs = (("said, s", "seconds", "s"), ("said, MiB", "peak MiB", "MiB"), ("said, disk", "disk MiB", "MiB"))
        out.append([f"{row['hidden']:,}", *(f"{row[a]:,.0f} / {row[b]:,.0f} {unit}" for a, b, unit in pairs)])
    return table(["hidden size", "time, said / was", "memory", "disk"], out)


def bounded() -> str:
    """The peak of builds of layers of true size in a bound."""
    out = []
    for path in sorted(RESULTS.glob("build-bounded-*.json")):
        for row in results(path.stem)["rows"]:
            sizes = [f"{row[k]:,.0f} MiB" for k in ("layer MiB", "bound MiB", "peak MiB")]
            out.append([row["layer"], f"{row['tokens']:,}", *sizes, f"{row['experts made']} of {row['of']}"])
    return table(["layer", "tokens", "in BF16", "`--memory`", "peak", "experts made"], out)


def layer_time() -> str:
    """How long a layer of Qwen3-30B-A3B takes."""
    row = results("build-bounded-qwen3-30b-a3b")["rows"][0]
    out = [["calibrating", _duration(row["calibrate s"])]]
    out += [[f"quantising {row['experts made']} of its {row['of']} experts", _duration(row["quantise s"])]]
    whole = row["calibrate s"] + row["quantise s"] / row["experts made"] * row["of"]
    out += [["all of the layer, by these", _duration(whole)]]
    return table([f"a layer of {row['layer']}, {row['tokens']:,} tokens", "time"], out)


def _duration(seconds: float) -> str:
    """Minutes."""
    return f"{seconds / 60:.1f} min"


def scale() -> str:
    """One worker on Ray, and two."""
    rows = results("scale")["rows"]
    columns = ["workers", "time", "tokens through the driver", "all else through it", "weights"]
    return table(
        columns,
        [
            [
                str(row["workers"]), f"{row['seconds']:.0f} s", f"{row['tokens MB']:.0f} MB",
                f"{row['other kB']:.0f} kB", f"{row['weights MB']:.0f} MB",
            ]
            for row in rows
        ],
    )  # fmt: skip


def pieces() -> str:
    """What an expert of large models' shapes takes of one core, and a product."""
    out = []
    for name, piece in results("scale-pieces")["pieces"].items():
        expert, rate = piece["seconds"] / piece["batch"], piece["rate"] / 1e9
        out.append([name, f"{piece['tokens']:,}", f"{expert:.0f} s", f"{rate:.0f} GFLOP/s"])
    return table(["model", "tokens of its recipe", "an expert at four widths", "a BF16 product"], out)


def clusters() -> str:
    """Builds on clusters, simulated with these."""
    out = []
    for row in results("scale-pieces")["rows"]:
        hours = [row[k] for k in ("hours", "calibration h", "cores h", "disk h")]
        out.append(
            [row["model"], str(row["nodes"]), *(f"{h:.1f}" if h >= 1 else f"{h:.2f}" for h in hours), row["bound"]]
        )
    columns = ["model", "nodes", "hours", "calibrating alone", "cores alone", "filesystem alone", "bound by"]
    return table(columns, out)


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
