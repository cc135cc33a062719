"""The tables of the documentation, from benchmarks/results/*.json: `python -m benchmarks.draw --tables` writes them.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. Measures nothing.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "families.md",
    ROOT / "docs" / "policies.md",
    ROOT / "docs" / "reliability.md",
)
TEXTS = {"wikitext2-test": "WikiText-2 test", "gsm8k-test": "GSM8K test", "humaneval": "HumanEval"}
VERSIONS = ("bf16", "w4", "w3", "w2", "w1")


def results(name: str) -> dict[str, Any]:
    """One file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


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


def mean_rise(row: dict[str, Any], base: dict[str, Any]) -> float:
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
        cells = [_percent(mean_rise(r, rows["transformers"])) if r else "" for r in (ours, rounded)]
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
        mean = "" if row is rows[0] else f"{_percent(mean_rise(row, rows[0]))}"
        name = ALLOCATIONS.get(row["allocation"], row["allocation"])
        out.append([name, f"{row['bits/weight']:.4g}", *(_figures(row[t]) for t in TEXTS), mean])
    return table(["allocation", "bits a weight", *TEXTS.values(), "mean rise"], out)


def losses() -> str:
    """The truth over what loss tables say."""
    rows = results("losses-tiny-qwen3-moe")["rows"]
    out = []
    for kind, tokens in dict.fromkeys((row["experts"], row["tokens"]) for row in rows):
        found = {row["version"]: row for row in rows if (row["experts"], row["tokens"]) == (kind, tokens)}
        plain = [row["true / on own tokens"] for row in found.values()]
        inside = statistics.fmean(row["inside two"] for row in found.values())
        ratios = [_figures(found[v]["true / measured"]) for v in VERSIONS[1:]]
        out.append([kind, f"{tokens:,}", *ratios, f"{min(plain):.2f} to {max(plain):.2f}", f"{100 * inside:.0f} %"])
    columns = ["experts", "tokens an expert", *VERSIONS[1:], "uncorrected, all four", "within two standard errors"]
    return table(columns, out)


def weighting() -> str:
    """Divergence by what losses are weighted with."""
    models = ("tiny-qwen3-moe", "mini-qwen3-moe")
    first, second = (results(f"weighting-{m}")["rows"] for m in models)
    out = []
    for rows in zip(first, second, strict=True):
        cells = [_percent(r["from the default, %"]) + f" ({r['its 95 %']})" for r in rows]
        default = [f"{r['KL, mnats']:.3g} mnat a token" for r in rows]
        out.append([rows[0]["losses weighted by"], *(default if rows[0] is first[0] else cells)])
    return table(["losses weighted by", *models], out)


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


def widened() -> str:
    """BF16 products by torch's emulation, and in float32."""
    out = []
    for row in results("widened")["rows"]:
        times = [f"{row[k]:.2f} s" for k in ("torch, s", "float32, s")]
        out.append([row["product"], row["torch keeps to"], *times, f"{row['float32 over torch']:.2f}"])
    return table(["product", "instructions", "torch in BF16", "in float32", "ratio"], out)


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


def policies() -> str:
    """All policies at equal bytes of device memory."""
    out = []
    for row in results("policies-tiny-qwen3-moe")["rows"]:
        name, share = row["policy"], row["budget"] or "none"
        if "least MB" in row:
            out.append([share, name, f"needs {row['least MB']:.1f} MB", *[""] * 9])
            continue
        kl = f"{row['KL, mnat']:.2f} ± {row['+-']:.2f}" if "KL, mnat" in row else ""
        times = [f"{row[k]:.1f}" for k in ("TTFT ms", "TPOT p50 ms", "TPOT p99 ms")]
        moved = [_megabytes(row[k]) for k in ("MB demand", "MB ahead", "MB host")]
        waits = f"{row['waits']:,}" if row["waits"] else ""
        out.append([share, name, *(_figures(row[t]) for t in TEXTS), kl, *times, *moved, waits])
    columns = ["budget", "policy", *TEXTS.values(), "KL, mnat", "TTFT, ms", "TPOT, ms", "its 99th percentile, ms"]
    return table([*columns, "waited for, MB", "ahead, MB", "host, MB", "waits"], out)


def _megabytes(size: float) -> str:
    return "" if not size else f"{size:.1f}" if size < 100 else f"{size:,.0f}"


def _claims(name: str) -> list[dict[str, Any]]:
    return [row for row in results("policies-tiny-qwen3-moe")["claims"] if row["table"] == name]


def similarity() -> str:
    """A prompt's experts and its decoding's."""
    rows = _claims("prefill: similarity")
    return table(
        ["", *(row["what"] for row in rows)],
        [[shown, *(f"{row[key]:.3f}" for row in rows)]
         for shown, key in (("its own decoding", "own"), ("another text's", "other text's"))],
    )  # fmt: skip


def _divergences(name: str) -> str:
    rows = [[row["what"], f"{row['KL, mnat']:.2f} ± {row['+-']:.2f}"] for row in _claims(name)]
    return table(["", "KL, mnat"], rows)


def selector() -> str:
    """Widths of the host's experts."""
    return _divergences("prefill: bits of the rest")


def retention() -> str:
    """Critical experts and the others."""
    return _divergences("importance: retention")


def on_demand() -> str:
    """Bytes that passes waited for, and those fetched ahead."""
    out = []
    for row in _claims("importance: bytes"):
        needed = row["MB in time"] + row["MB late"]
        in_time = f"{row['MB in time'] / needed:.2f}" if needed else ""
        moved = [_megabytes(row[k]) for k in ("MB demand", "MB ahead")]
        out.append([row["what"], *moved, in_time, f"{row['KL, mnat']:.2f}", f"{row['TPOT p50 ms']:.1f}"])
    return table(["", "waited for, MB", "ahead, MB", "in time", "KL, mnat", "TPOT, ms"], out)


def prediction() -> str:
    """Of the next layer's experts."""
    rows = _claims("importance: prediction")
    return table([row["what"] for row in rows], [[f"{row['foretold']:.2f}" for row in rows]])


def alpha() -> str:
    """Time a token by what stays on the device."""
    rows = _claims("paged: alpha")
    shown = [(row["what"].removeprefix("alpha="), f"{row['TPOT p50 ms']:.1f}", f"{row['peak MB']:.1f}") for row in rows]
    return table(["alpha", "TPOT, ms", "device memory, MB"], [list(row) for row in shown])


def paged() -> str:
    """Paged experts at a large layer's shape."""
    return _as_is("paged")


def serving() -> str:
    """Servers by clients."""
    return _as_is("serve")


def start() -> str:
    """From the start of a command to its first token."""
    return _as_is("start")


def _peers(part: str) -> list[dict[str, Any]]:
    return [row for row in results("peers")["rows"] if row["part"] == part]


def _own(side: str) -> str:
    return side.replace("moepack", "**moepack**")


def peer_layers() -> str:
    """A layer's experts on every side: milliseconds and GB/s by tokens."""
    rows = _peers("layers")
    counts = sorted({row["tokens"] for row in rows if "tokens" in row})
    out = []
    for key in dict.fromkeys((row["shape"], row["threads"], row["side"]) for row in rows):
        mine = [row for row in rows if (row["shape"], row["threads"], row["side"]) == key]
        by = {row["tokens"]: row for row in mine if "ms" in row}
        cells = [f"{by[n]['ms']:.3g} ({by[n]['GB/s']:.3g})" if n in by else "" for n in counts]
        floor = f"{by[counts[0]]['floor ms']:.3g}" if counts[0] in by else ""
        bits = f"{next(iter(by.values()))['bits/weight']:.4g}" if by else ""
        why = next((row["not measured"] for row in mine if "not measured" in row), "")
        out.append([key[0], str(key[1]), _own(key[2]), bits, *cells, floor, why])
    columns = [f"{n} token{'s' * (n > 1)}, ms (GB/s)" for n in counts]
    return table(
        ["experts of", "threads", "side", "bits", *columns, f"floor of {counts[0]}, ms", "not measured"],
        out,
    )


def peer_models() -> str:
    """Tokens a second of a generated model on both sides."""
    out = []
    for row in _peers("models"):
        rates = [f"{row[k]:.0f}" if k in row else "" for k in ("decode tokens/s", "prefill tokens/s")]
        over = [
            f"{row[k]:.2f}" if (k := f"{what} over llama.cpp's best") in row else "" for what in ("decode", "prefill")
        ]
        out.append([row["rest"], str(row["threads"]), _own(row["side"]), *rates, *over, row.get("not measured", "")])
    columns = ["rest", "threads", "side", "decode, tokens/s", "prefill, tokens/s"]
    return table([*columns, "decode over llama.cpp's best", "prefill over its best", "not measured"], out)


def peer_quality() -> str:
    """Error and divergence by bits on both sides, a model after another."""
    rows, out = _peers("quality"), []
    for row in sorted(rows, key=lambda r: -r["bits/weight"]):
        error = f"{row['error']:.2g}" if "error" in row else ""
        kl = f"{row['KL, mnat']:.3g} ± {row['+-']:.2g}" if "KL, mnat" in row else ""
        added = f"{row['added, %']:+.1f} % ± {row['added +-']:.1f}" if "added, %" in row else ""
        name = _own(f"{row['who']} {row['encoding']}")
        out.append([row["model"], name, f"{row['bits/weight']:.4g}", error, kl, added])
    order = list(dict.fromkeys(row["model"] for row in rows))
    out.sort(key=lambda cells: order.index(cells[0]))
    return table(["matrices of", "encoding", "bits", "error", "KL, mnat", "attention adds"], out)


def peer_versions() -> str:
    """What the peers are."""
    return table(["side", "what"], [[name, what] for name, what in results("peers")["peers"].items()])


def _as_is(name: str) -> str:
    rows = results(name)["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[f"{v:.4g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in columns] for row in rows]
    return table(columns, cells)


def missed() -> str:
    """Targets that are not met, of all results."""
    out = []
    for path in sorted(RESULTS.glob("*.json")):
        for t in results(path.stem)["targets"]:
            if not t["met"]:
                sign = "at least" if t["better"] == "higher" else "at most"
                out.append([path.stem, t["name"], f"{t['value']:.4g}", f"{sign} {t['target']:g}"])
    return table(["results", "target", "measured", "wanted"], out)


def hostile() -> str:
    """What became of hostile bundles."""
    rows = [*results("hostile")["rows"]]
    columns = ("cases", "opened", "refused", "wrong")
    rows.append({"changed": "all", **{c: sum(row[c] for row in rows) for c in columns}})
    out = [[row["changed"], *(f"{row[c]:,}" for c in columns)] for row in rows]
    return table(["what is changed", "cases", "opened", "refused", "anything else"], out)


def soak() -> str:
    """A server under load for minutes."""
    columns = {
        "minutes": ".1f",
        "MB": ".1f",
        "answers": ",",
        "errors": ",",
        "left": ",",
        "promotions": ",",
        "waits": ",",
    }
    out = [[f"{row[c]:{how}}" for c, how in columns.items()] for row in results("soak")["rows"]]
    return table(["minutes", "memory, MB", "answers", "errors", "clients that left", "promotions", "waits"], out)


def families() -> str:
    """Those that work first, then the others with what moepack says of them."""
    rows = results("families")["rows"]
    order = ["works", "refused", "no small model"]
    rows = sorted(rows, key=lambda r: (order.index(r["outcome"]), r["model_type"]))
    return table(
        ["`model_type`", "class", "", "why"],
        [[f"`{r['model_type']}`", f"`{r['class']}`", r["outcome"], r["why"]] for r in rows],
    )


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        summary, quality, allocation, weighting, losses, quantisers, build, bounded, layer_time, widened, estimates,
        scale, codec, kernels, whole_model, shapes, residency, tpot, overlap, missed, policies, similarity, selector,
        retention, on_demand, prediction, alpha, paged, hostile, soak, serving, start, families, peer_layers,
        peer_models, peer_quality, peer_versions,
    )
}  # fmt: skip
_TABLE = re.compile(r"<!-- table: ([a-z_]+) -->\n.*?<!-- end of table -->", re.S)
_MACHINE = re.compile(r"<!-- machine: ([a-z0-9-]+) -->\n.*?<!-- end of machine -->", re.S)


def with_tables(text: str) -> str:
    """A document with its tables, and the lines that name machines, made anew."""
    text = _TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{TABLES[m[1]]()}\n<!-- end of table -->", text)
    return _MACHINE.sub(lambda m: f"<!-- machine: {m[1]} -->\n{machine(m[1])}\n<!-- end of machine -->", text)
