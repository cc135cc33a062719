"""Tables beside other programs."""

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.common import Row
from benchmarks.peers.judge import PEERS

from .common import joined, ratio, results, shown, table


def _peers(part: str) -> list[Row]:
    return [row for row in results("peers")["rows"] if row["part"] == part]


def _own(side: str) -> str:
    return side.replace("moepack", "**moepack**")


@shown
def peer_models() -> str:
    """Tokens a second of a generated model on all sides, by threads, and ours over the best of each peer."""
    return _rates("decode", "prefill of 16", "prefill")


@shown
def peer_depths() -> str:
    """The same in a context of 4,000 tokens; nothing where it was not measured."""
    return _rates("decode at 4,000", "prefill to 4,000")


def _rates(*measures: str) -> str:
    rows = [row for row in _peers("models") if "not measured" not in row]
    shown = [what for what in measures if any(f"{what} tokens/s" in row for row in rows)]
    out = []
    for row in rows:
        for what in shown:
            rate = f"{row[f'{what} tokens/s']:.0f}"
            over = [f"{row[key]:.2f}" for peer in PEERS if (key := f"{what} over {peer}'s best") in row]
            out.append((_own(row["side"]), [f"{rate} ({', '.join(over)})" if over else rate]))
    columns = [f"{what}, {threads}" for threads in ("1 thread", "2 threads") for what in shown]
    return joined(["side", *columns], out) if shown else ""


@shown
def peer_quality() -> str:
    """By bits on both sides: the error of generated matrices, error and divergence of the larger trained model."""
    rows = [row for row in _peers("quality") if row["model"] != "mini-qwen3-moe"]
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda r: -r["bits/weight"]):
        name = _own(f"{row['who']} {row['encoding']}")
        cells = found.setdefault(name, [f"{row['bits/weight']:.4g}", "", "", ""])
        if "error" in row:
            cells[1 if row["model"] == "generated" else 2] = f"{row['error']:.2g}"
        if "KL, mnat" in row:
            cells[3] = f"{row['KL, mnat']:.3g} ± {row['+-']:.2g}"
    return table(["encoding", "bits", "error, generated", "error", "KL, mnat"], [[n, *c] for n, c in found.items()])


@shown
def limited() -> str:
    """Both programs in a memory limit below the model's size."""
    return _limited("limited")


@shown
def limited_released() -> str:
    """The same of a model released in MXFP4."""
    return _limited("limited-gpt-oss")


@shown
def limited_depth() -> str:
    """The same behind contexts of thousands of tokens."""
    return _limited("limited-depth", {"context": "depth"})


def _limited(name: str, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """A cell is empty where there is no figure."""
    columns = {
        **more,
        "first token, s": "first token s",
        "prompt, tokens/s": "prefill tokens/s",
        "decode, tokens/s": "decode tokens/s",
        "p99, ms": "p99 ms",
        "read a token, MB": "MB/token read",
        "waited a token, ms": "ms/token waited",
        "uses at w4": "served w4",
    }
    out = []
    for row in results(name)["rows"]:
        cells = [f"{v:.3g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in columns.values()]
        out.append([f"{row['cage GB']:g}", _own(row["side"]), *cells])
    return table(["limit, GB", "side", *columns], out)


@shown
def contexts() -> str:
    """Tokens a second of whole models by depth of the context: moepack's, and how much more than llama.cpp's."""
    return _by_depth("contexts")


@shown
def beside() -> str:
    """The same of a short context, while another program computes on the same processors."""
    return _by_depth("contexts-beside")


def _by_depth(name: str) -> str:
    rows = results(name)["rows"]
    first, *later = sorted({row["depth"] for row in rows})
    found: dict[str, list[str]] = {}
    for row in rows:
        cells = found.setdefault(f"{row['model']}, {row['attention']}", [])
        for what in ("decode", "prompt") if row["depth"] != first else ("decode",):
            rate = row[f"moepack, {what}"]
            over = row.get(f"{what} over llama.cpp's")
            cells.append(f"{rate:.3g}" if over is None else f"{rate:.3g} ({ratio(over)})")
    heads = [f"decode at {first:,}", *(f"{what} at {depth:,}" for depth in later for what in ("decode", "prompt"))]
    return table(["model and attention", *heads], [[name, *cells] for name, cells in found.items()])
