"""Tables of serving: policies, what passes wait for, starts, hostile input and long runs."""

from collections.abc import Iterable

from benchmarks.common import Row

from .common import TEXTS, figures, listed, results, shown, table

POLICIES = {
    "static, first file, most used": "static map, most used",
    "static, first file, by loss": "static map, by loss",
    "hotness, the two": "`hotness:hi=bf16,lo=w2,between=no`",
    "hotness, two of its choice": "`hotness:between=no`",
    "hotness": "`hotness`",
    "lru": "`lru:hi=bf16,lo=w2`",
}
KL = "{KL, mnat:.2f} ± {+-:.2f}"


@shown
def residency() -> str:
    """Perplexity, promotions and bytes read by policy, at each budget."""
    rows = results("residency-tiny-qwen3-moe")["rows"]
    budgets, found = _by_budget(row for row in rows if set(TEXTS) <= row.keys() and row["budget"])
    out = []
    for policy, at in found.items():
        perplexities = [", ".join(figures(row[t]) for t in TEXTS) for row in at]
        moved = [_each(at, key, ".0f") for key in ("promotions", "MB copied")]
        out.append([POLICIES.get(policy, policy), *perplexities, *moved])
    return table(["policy", *budgets, "promotions", "MB read"], out)


@shown
def tpot() -> str:
    """Time a token, with and without swaps."""
    rows = [r for r in results("residency-tiny-qwen3-moe")["rows"] if "TPOT median ms" in r]
    named = [{**r, "while": r["policy"].removeprefix("TPOT, ").replace("none", "no swaps")} for r in rows]
    times = {"TPOT, median": "{TPOT median ms:.2f} ms", "TPOT, 99th percentile": "{TPOT p99 ms:.2f} ms"}
    return listed(named, {"while decoding": "{while}", **times, "promotions": "{promotions:,}", "waits": "{waits:,}"})


@shown
def policies() -> str:
    """All policies at equal bytes of device memory: a cell has the figures of each budget, the smallest first."""
    rows = results("policies-tiny-qwen3-moe")["rows"]
    budgets, found = _by_budget(row for row in rows if row["policy"] not in ("all bf16", "all w2"))
    out = []
    for name, at in found.items():
        divergences = [_divergence(row) for row in at]
        times = [_each(at, key, ".1f") for key in ("TTFT ms", "TPOT p50 ms")]
        moved = [_each(at, key, ".0f") for key in ("MB demand", "MB ahead", "MB host")]
        out.append([name, *divergences, *times, *moved])
    columns = [*(f"KL at {budget}, mnat" for budget in budgets), "TTFT, ms", "TPOT, ms"]
    return table(["policy", *columns, "waited for, MB", "ahead, MB", "host, MB"], out)


def _by_budget(rows: Iterable[Row]) -> tuple[list[str], dict[str, list[Row]]]:
    """The budgets, and by policy its row at each of them."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["policy"], {})[row["budget"]] = row
    budgets = list(dict.fromkeys(budget for at in found.values() for budget in at))
    return budgets, {policy: [at[budget] for budget in budgets] for policy, at in found.items()}


def _divergence(row: Row) -> str:
    if "least MB" in row:
        return f"needs {row['least MB']:.1f} MB"
    return KL.format_map(row)


def _each(rows: list[Row], key: str, how: str) -> str:
    """Show one figure of each row, or nothing where all are zero; a dash stands for a row that lacks it."""
    if not any(row.get(key) for row in rows):
        return ""
    return ", ".join(f"{row[key]:{how}}" if key in row else "-" for row in rows)


def _megabytes(size: float) -> str:
    if not size:
        return ""
    return f"{size:.1f}" if size < 100 else f"{size:,.0f}"


def _claims(name: str) -> list[Row]:
    return [row for row in results("policies-tiny-qwen3-moe")["claims"] if row["table"] == name]


@shown
def similarity() -> str:
    """A prompt's experts and its decoding's."""
    rows = _claims("prefill: similarity")
    shown = {"its own decoding": "own", "another text's": "other text's"}
    return table(
        ["", *(row["what"] for row in rows)], [[name, *(f"{r[key]:.3f}" for r in rows)] for name, key in shown.items()]
    )


@shown
def selector() -> str:
    """Widths of the host's experts."""
    return listed(_claims("prefill: bits of the rest"), {"": "{what}", "KL, mnat": KL})


@shown
def retention() -> str:
    """Critical experts and the others: KL by the share that is critical."""
    found: dict[str, dict[str, str]] = {}
    for row in _claims("importance: retention"):
        widths, share, by = row["what"].split(", ")
        found.setdefault(f"{widths}, {by}", {})[share] = KL.format_map(row)
    shares = list(dict.fromkeys(share for cells in found.values() for share in cells))
    return table(["KL, mnat", *shares], [[name, *(c.get(share, "") for share in shares)] for name, c in found.items()])


@shown
def on_demand() -> str:
    """Bytes that passes waited for, and those fetched ahead."""
    out = []
    for row in _claims("importance: bytes"):
        needed = row["MB in time"] + row["MB late"]
        in_time = f"{row['MB in time'] / needed:.2f}" if needed else ""
        moved = [_megabytes(row[k]) for k in ("MB demand", "MB ahead")]
        out.append([row["what"], *moved, in_time, f"{row['KL, mnat']:.2f}", f"{row['TPOT p50 ms']:.1f}"])
    return table(["", "waited for, MB", "ahead, MB", "in time", "KL, mnat", "TPOT, ms"], out)


@shown
def prediction() -> str:
    """Of the next layer's experts."""
    rows = _claims("importance: prediction")
    return table([row["what"] for row in rows], [[f"{row['foretold']:.2f}" for row in rows]])


@shown
def alpha() -> str:
    """Time a token by what stays on the device."""
    rows = [{**row, "alpha": row["what"].removeprefix("alpha=")} for row in _claims("paged: alpha")]
    return listed(rows, {"alpha": "{alpha}", "TPOT, ms": "{TPOT p50 ms:.1f}", "device memory, MB": "{peak MB:.1f}"})


@shown
def serving() -> str:
    """Servers: a cell has the figures of each number of clients."""
    found: dict[str, list[Row]] = {}
    for row in results("serve")["rows"]:
        found.setdefault(row["server"], []).append(row)
    keys = {"tokens/s": ".0f", "TTFT p50": ".0f", "TTFT p99": ".0f", "TPOT p50": ".1f", "TPOT p99": ".1f", "errors": ""}
    out = [[server, *(_each(rows, key, how) for key, how in keys.items())] for server, rows in found.items()]
    return table(["server", *keys], out)


@shown
def start() -> str:
    """From the start of a command to its first token."""
    return listed(results("start")["rows"], {"what": "{what}", "s": "{s:.4g}", "processor s": "{processor s:.4g}"})


@shown
def hostile() -> str:
    """What became of hostile bundles and checkpoints, by what is changed."""
    rows = results("hostile")["rows"]
    counted = {"cases": "cases", "opened": "opened", "refused": "refused", "anything else": "wrong"}
    every = {"changed": "all", **{key: sum(row[key] for row in rows) for key in counted.values()}}
    columns = {heading: f"{{{key}:,}}" for heading, key in counted.items()}
    return listed([*rows, every], {"what is changed": "{changed}", **columns})
