"""Tables of the codec and of the CPU kernels."""

from .common import joined, listed, ratio, results, shown, table

TOKENS = (1, 16, 512)


@shown
def codec() -> str:
    """Size of the lossless codec, and its speed by the shape of the weights."""
    rows = [row for row in results("codec")["rows"] if "encode GB/s" in row]
    found: dict[str, list[str]] = {}
    for row in rows:
        fp8 = row["matrix"].startswith("FP8")
        bits = f"{row['bits/weight']:.2f}" if "bits/weight" in row else ""
        name = f"{row['codec']}, FP8 codes" if fp8 else row["codec"]
        cells = found.setdefault(name, [bits, row.get("over floor", "")] + ["", ""] * fp8)
        cells += [f"{row[k]:.3g}" for k in ("encode GB/s", "decode GB/s")]
    shapes = dict.fromkeys(row["matrix"] for row in rows if not row["matrix"].startswith("FP8"))
    heads = [head for shape in shapes for head in (f"{shape}: encode", "decode")]
    out = [[name, *cells, *[""] * (2 + len(heads) - len(cells))] for name, cells in found.items()]
    return table(["codec", "bits a weight", "over the floor", *heads], out)


@shown
def kernels() -> str:
    """A layer's experts at true size, one thread: our time beside torch's and beside reading, by tokens."""
    rows = [row for row in results("kernels-tiny-qwen3-moe")["rows"] if row.get("tokens") in TOKENS]
    columns = [f"{n} token{'s' * (n > 1)}" for n in TOKENS]
    heads = [head for column in columns for head in (column, "torch over it", "it over reading")]
    cells = ([f"{r['ours us'] / 1000:.2f} ms", ratio(r["speed-up"]), ratio(r["over floor"])] for r in rows)
    return joined(["version", *heads], zip([r["version"] for r in rows], cells, strict=True))


@shown
def whole_model() -> str:
    """Tokens a second of a whole model."""
    rows = [row for row in results("kernels-tiny-qwen3-moe")["rows"] if "decode tokens/s" in row]
    named = [{**row, "by": row["version"].replace("transformers", "transformers,")} for row in rows]
    rates = {f"{what}, tokens/s": f"{{{what} tokens/s:,.0f}}" for what in ("decode", "prefill")}
    return listed(named, {"experts by": "{by}", **rates})


@shown
def released_kernels() -> str:
    """Every version's experts for one token on one thread, with AVX2 alone and with all instructions that there are."""
    every = [row for name in ("kernels-released-avx2", "kernels-released") for row in results(name)["rows"]]
    rows = [row for row in every if "MB" in row and row["tokens"] == 1]
    pace = {(r["instructions"], r["version"]): r["ours us"] / r["MB"] for r in rows}
    out = []
    for row in rows:
        mine = row["ours us"] / row["MB"]
        over = ratio(mine / pace[row["instructions"], "bf16"])
        out.append((row["version"], [f"{row['ours us'] / 1000:.2f} ms", f"{1 / mine * 1000:.1f}", over]))
    columns = [f"{level}{head}" for level in ("AVX2", "AMX") for head in ("", ", GB/s", ", over bf16")]
    return joined(["version", *columns], out)


@shown
def cache() -> str:
    """What a cache in fewer bits costs and gains, by form."""
    rows = results("cache")["rows"]
    larger = {(r["experts"], r["kv"]): r for r in results("cache-tiny-qwen3-moe")["rows"] if "layer" not in r}
    names = list(dict.fromkeys(row["layer"] for row in rows if "layer" in row))
    lines = []
    for row in rows:
        if "layer" in row:
            continue
        timed = {r["layer"]: r for r in rows if "layer" in r and r["kv"] == row["kv"] and row["experts"] != "w4"}
        times = [f"{timed[n]['ms']:.1f} ms" if n in timed else "" for n in names]
        loss = f"{row['KL']:.4f} ({row['95 %']})"
        both = (row, larger[row["experts"], row["kv"]])
        alike = ", ".join(f"{of['as relative loss']:.5f}" for of in both)
        lines.append([row["experts"], f"`{row['kv']}`", f"{row['bits a number']:.4g}", loss, alike, *times])
    depth = max(row.get("depth", 0) for row in rows)
    layers = [f"{n.partition(',')[0]}, a layer at {depth:,}" for n in names]
    return table(
        [
            "experts",
            "cache",
            "bits a number",
            "divergence (95 %)",
            "as relative loss, of mini- and tiny-qwen3-moe",
            *layers,
        ],
        lines,
    )
