"""Tables beside other programs."""

from __future__ import annotations

import re
from typing import Any

from .common import results, table


def _peers(part: str) -> list[dict[str, Any]]:
    return [row for row in results("peers")["rows"] if row["part"] == part]


def _own(side: str) -> str:
    return side.replace("moepack", "**moepack**")


def peer_layers() -> str:
    """A layer's experts on every side: milliseconds by tokens, of each number of threads."""
    return table(*_layers(_peers("layers")))


def peer_mxfp4() -> str:
    """The same of gpt-oss' experts in MXFP4, with AVX2 and with all that the processor has."""
    out: list[list[str]] = []
    for name, instructions in (("peers-mxfp4-avx2", "AVX2"), ("peers-mxfp4", "all")):
        columns, rows = _layers(results(name)["rows"])
        out += [[instructions, *row[1:]] for row in rows]
    return table(["instructions", *columns[1:]], out)


def _layers(every: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of a table of layers."""
    rows = [row for row in every if "ms" in row]
    counts, threads = (sorted({row[name] for row in rows}) for name in ("tokens", "threads"))
    out = []
    for shape, side in dict.fromkeys((row["shape"], row["side"]) for row in rows):
        by = {(r["tokens"], r["threads"]): r for r in rows if (r["shape"], r["side"]) == (shape, side)}
        cells = ["/".join(f"{by[n, t]['ms']:.3g}" if (n, t) in by else "-" for t in threads) for n in counts]
        floor = "/".join(f"{by[1, t]['floor ms']:.3g}" for t in threads if (1, t) in by)
        out.append([shape, _own(side), f"{next(iter(by.values()))['bits/weight']:.4g}", *cells, floor])
    columns = [f"{n:,} token{'s' * (n > 1)}, ms" for n in counts]
    return ["experts of", "side", "bits", *columns, "floor of 1 token, ms"], out


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
    rows = _peers("quality")
    out = []
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


def limited() -> str:
    """Both programs in a memory limit below the model's size, as the command prints it."""
    return table(*limited_rows(results("limited")["rows"]))


def limited_released() -> str:
    """The same of a model released in MXFP4."""
    return table(*limited_rows(results("limited-gpt-oss")["rows"]))


def limited_rows(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: a cell is empty where there is no figure."""
    columns = {
        "first token, s": "first token s",
        "prompt, tokens/s": "prefill tokens/s",
        "decode, tokens/s": "decode tokens/s",
        "p99, ms": "p99 ms",
        "read a token, MB": "MB/token read",
        "waited a token, ms": "ms/token waited",
        "uses at w4": "served w4",
        "process, GB": "process GB",
        "result": "result",
    }
    out = []
    for row in rows:
        cells = [f"{v:.3g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in columns.values()]
        if (least := re.search(r"refused: .*the least that would do is (\d+)", cells[-1])) is not None:
            cells[-1] = f"refused: needs {int(least[1]) / 1e9:.1f} GB"
        out.append([f"{row['cage GB']:g}", _own(row["side"]), *cells])
    return ["limit, GB", "side", *columns], out
