"""Tables of what a build makes and takes: quality, allocations, losses, time, memory, families."""

from benchmarks.common import Row

from .common import figures, percent, ratio, results, rise, shown, table


@shown
def summary() -> str:
    """Of the upcycled model, for the front page: versions by falling bits."""
    rows = results("real-versions")["rows"]
    falling = sorted(rows, key=lambda row: -row["bits/weight"])
    cells = [_version(row, rows[0]) for row in falling]
    return table(["version", "bits a weight", "perplexity", "right answers"], cells)


@shown
def real_versions() -> str:
    """The same by recipe, with divergence."""
    rows = results("real-versions")["rows"]
    out = []
    for row in rows:
        name, bits, perplexity, right = _version(row, rows[0])
        divergence = f"{figures(row['KL'])} ({row['KL, 95 %']})" if row["KL"] else ""
        out.append([row["recipe"] if row["KL"] else "", name, bits, divergence, perplexity, right])
    return table(["recipe", "version", "bits a weight", "KL (95 %)", "perplexity", "right answers (95 %)"], out)


def _version(row: Row, first: Row) -> list[str]:
    above = "" if row is first else f" ({percent(rise(row, first, 'perplexity'))})"
    right = f"{row['right answers %']:.0f} % ({row['95 %']})"
    return [f"`{row['version']}`", f"{row['bits/weight']:.4g}", f"{figures(row['perplexity'])}{above}", right]


@shown
def real() -> str:
    """The upcycled model beside its source, by text."""
    out = []
    for row in results("real")["rows"]:
        after = f"{figures(row['upcycled'])} ({row['95 %']})"
        shares = [f"{row[name]:.0f} %" for name in ("own experts %", "twins %", "apart %")]
        out.append([row["text"], figures(row["source"]), after, *shares])
    return table(["unseen text", "source", "upcycled (over the source's)", "own experts", "twins", "apart"], out)


SETS = {
    "generated 1536x2048": "gate and up",
    "generated 2048x768": "down",
    "tiny-qwen3-moe": "tiny-qwen3-moe",
}


METHODS = {"gptq": "moepack's GPTQ", "gptqmodel": "gptqmodel", "hqq": "HQQ", "rtn": "rounding to nearest"}


@shown
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


@shown
def families() -> str:
    """Those that work, by how a checkpoint stores their experts, then the others with what moepack says of them."""
    rows = results("families")["rows"]
    whole = [r for r in rows if r["outcome"] == "works" and not r["why"]]
    stored = list(dict.fromkeys(r["experts"] for r in whole))
    stored.sort(key=lambda experts: -sum(r["experts"] == experts for r in whole))
    out = [[experts, ", ".join(f"`{r['model_type']}`" for r in whole if r["experts"] == experts)] for experts in stored]
    limits: dict[str, list[str]] = {}
    for r in rows:
        if r not in whole:
            why = str(r["why"]).replace(f"{r['model_type']}: ", "").replace(r["model_type"], "it")
            limits.setdefault(why, []).append(f"`{r['model_type']}`")
    works = table(["experts", "`model_type`"], out)
    others = table(["`model_type`", "refused, or limited"], [[", ".join(names), why] for why, names in limits.items()])
    return f"{works}\n\n{others}"
