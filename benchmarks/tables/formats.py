"""Tables of formats: bits of released ones, bytes of released models, divergence at equal bytes or bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .common import results, table

# Version, group size, what it keeps, its bits a weight by formula.
FORMATS = (
    ("mxfp4", 32, "E2M1 codes, an E8M0 scale for 32 columns", "4 + 8/32"),
    ("nvfp4", 16, "E2M1 codes, an E4M3 scale for 16 columns, an FP32 scale for 16 rows", "4 + 8/16 + 32/(16*c)"),
    ("mxfp8", 32, "E4M3 codes, an E8M0 scale for 32 columns", "8 + 8/32"),
    ("fp8", 128, "E4M3 codes, an FP32 scale for 128 columns of 16 rows", "8 + 32/(16*128)"),
    ("fp8", 32, "the same for 32 columns", "8 + 32/(16*32)"),
    ("fp8row", 0, "E4M3 codes, an FP32 scale a row", "8 + 32/c"),
    ("int4", 32, "4-bit integers, a BF16 scale and a zero point for 32 columns", "4 + 16/32 + 8/32"),
    ("int4fp16", 128, "4-bit integers, an FP16 scale and a zero point for 128 columns", "4 + 16/128 + 8/128"),
    ("int8", 128, "8-bit integers, a BF16 scale and a zero point for 128 columns", "8 + 16/128 + 8/128"),
    ("int8fp16", 128, "the same with an FP16 scale", "8 + 16/128 + 8/128"),
)  # fmt: skip
_AT_BITS, _PLAIN = "of today's at these bits", "of the plain version's"  # columns of benchmarks.formats
_OURS = "today's error over it"
COLS = 4096  # columns of the matrix that the bits are counted for


def bits(version: str, group: int) -> float:
    """Bits a weight of a matrix of COLS by COLS in a version, scales and zero points included."""
    from moepack.pack.spec import Matrix, Version

    matrix = Matrix("weight", COLS, COLS)
    sections = Version.of(version, group).sections((matrix,))
    return 8 * sum(s.size for s in sections) / matrix.weights


def stored(version: str, group: int) -> str:
    """Bits a weight in a file where codes are entropy-coded, about: those of normally distributed weights."""
    from moepack.pack.spec import Version
    from moepack.pipeline.dryrun.ahead import sample

    own = Version.of(version, group)
    return f"about {sample(own, COLS)[0]:.2f}" if own.entropy_coded else "as many"


def formats() -> str:
    """What each version keeps, and its bits."""
    rows = []
    for version, group, keeps, formula in FORMATS:
        found = bits(version, group)
        shown = f"{found:.4f}".rstrip("0")
        rows.append([f"`{version}`", str(group) if group else "", keeps, f"`{formula}`", shown, stored(version, group)])
    return table(["version", "group", "keeps", "bits a weight in memory", f"at c = {COLS:,}", "in a file"], rows)


def sizes() -> str:
    """Bundles of released models with one version of every expert, in GB."""
    names = ("bf16", "native", "w4", "w3", "w2")
    rows = []
    for r in results("sizes")["rows"]:
        whole = [r["beside, GB"] + r[f"experts {name}, GB"] for name in names]
        rows.append([r["model"], f"`{r['native']}`", f"{r['beside, GB']:,.1f}", *(f"{size:,.1f}" for size in whole)])
    columns = [
        "model",
        "native",
        "beside experts",
        "about, all `bf16`",
        "all native",
        "all `w4`",
        "all `w3`",
        "all `w2`",
    ]
    return table(columns, rows)


def released() -> str:
    """Divergence from the released version by what a share of its bytes is spent on, thousandths of a nat."""
    rows = results("released-tiny-qwen3-moe")["rows"]
    shares = [s for s in dict.fromkeys(r["asked"] for r in rows) if s]
    cells: dict[str, dict[str, str]] = {}
    for r in rows:
        if r["asked"]:
            cells.setdefault(r["allocation"], {})[r["asked"]] = f"{r['KL']:.2f}"
            if r["allocation"] == "greedy, native/w3/w2":
                cells.setdefault("its 95 %", {})[r["asked"]] = r["KL 95 %"]
    return table(["bytes spent by", *shares], [[n, *(row.get(s, "") for s in shares)] for n, row in cells.items()])


def released_others() -> str:
    """The same of two more formats, some ways to spend the bytes: of each format two columns."""
    ways = tuple(f"{way}, native/w3/{low}" for way in ("greedy", "hotness") for low in ("w2", "w2/w1"))
    cells: dict[str, list[str]] = {way: [] for way in ways}
    columns = []
    for form in ("nvfp4", "fp8"):
        rows = [
            r
            for r in results(f"released-{form}-tiny-qwen3-moe")["rows"]
            if r["allocation"] in ways and r["asked"] in ("80 %", "60 %")
        ]
        columns += [f"`{form}`, {share}" for share in dict.fromkeys(r["asked"] for r in rows)]
        for r in rows:
            cells[r["allocation"]].append(f"{r['KL']:.2f}")
    return table(["bytes spent by", *columns], [[way, *row] for way, row in cells.items()])


def encodings() -> str:
    """Encodings of small models at their bytes: errors of a layer's matrices, and the divergence of the model."""
    out = []
    for row in results("formats")["rows"]:
        errors = [f"{row[k]:.2g}" if (k := f"error {part}") in row else "" for part in ("gate, up", "down")]
        if not any(errors):  # a type whose blocks no matrix of the model fills
            continue
        name = f"`{row['encoding']}`" if row["who"] == "moepack" else f"*{row['who']}*: {row['encoding']}"
        whole = "KL, mnat" in row
        divergence = f"{row['KL, mnat']:.3g} ± {row['+-']:.2g}" if whole else ""
        ratio = f"{row[_AT_BITS]:.2f} ± {row['ratio +-']:.2f}" if whole else ""
        out.append([row["model"], name, f"{row['bits/weight']:.4g}", *errors, divergence, ratio])
    columns = ["model", "encoding", "bits", "error of gate, up", "of down", "divergence", "over today's at these bits"]
    return table(columns, out)


def generated_matrices() -> str:
    """Errors on generated matrices of true size, and today's at as many bits over the greatest of these ratios."""
    shown = ("w4", "w3", "w2", "w1")
    rows = results("formats-generated")["rows"]
    rows = [r for r in rows if r["who"] == "llama.cpp" or (r["who"] == "moepack" and r["encoding"] in shown)]
    kinds = list(dict.fromkeys(r["model"] for r in rows))
    found = {(r["model"], r["encoding"]): r for r in rows}
    out = []
    for first in (r for r in rows if r["model"] == kinds[0]):
        every = [found[kind, first["encoding"]] for kind in kinds]
        errors = [f"{r['error gate, up']:.2g}, {r['error down']:.2g}" for r in every]
        ours = first["who"] == "moepack"
        ratio = "" if ours else f"{max(r[_OURS] for r in every):.2f}"
        name = f"`{first['encoding']}`" if ours else f"*llama.cpp*: {first['encoding']}"
        out.append([name, f"{first['bits/weight']:.4g}", *errors, ratio])
    columns = ["encoding", "bits", *(kind.removeprefix("generated, ") for kind in kinds), "today's error over it"]
    return table(columns, out)


def rotations() -> str:
    """Versions with a rotated down beside plain ones, and errors of down over today's at as many bits."""
    rows = results("rotated")["rows"]
    found = {(r["model"], r["who"], r["encoding"]): r for r in rows}
    today = {(model, encoding): r for (model, who, encoding), r in found.items() if who == "moepack"}
    out = []
    for row in rows:
        if _PLAIN in row:
            own = today[row["model"], row["encoding"].removesuffix(" rotated")]
            divergence = [f"{r['KL, mnat']:.3g}" for r in (own, row)]
            ratio = f"{row[_PLAIN]:.3f} ± {row['plain +-']:.3f}"
            small = found.get((row["model"], "bytes", row["encoding"]))
            down = ["" if r is None else f"{_over_today(today, r)[1]:.2f}" for r in (row, small)]
            out.append([row["model"], f"`{own['encoding']}`", *divergence, ratio, f"{row[_AT_BITS]:.2f}", *down])
    columns = ["model", "version", "divergence", "rotated", "rotated over plain", "over today's at these bits"]
    return table([*columns, "error of `down` over today's at these bits", "the same, scales of a byte"], out)


def small_generated() -> str:
    """Errors with scales of a byte on generated matrices over today's at as many bits: the greater of two."""
    rows = results("formats-bytes")["rows"]
    known = {(r["model"], r["encoding"]): r for r in rows if r["who"] == "moepack"}
    own = {(r["model"], r["encoding"]): r for r in rows if r["who"] == "bytes"}
    kinds, versions = (list(dict.fromkeys(key[i] for key in own)) for i in range(2))
    out = [[f"`{v}`", *(f"{max(_over_today(known, own[k, v])):.2f}" for k in kinds)] for v in versions]
    return table(["version", *(kind.removeprefix("generated, ") for kind in kinds)], out)


def _over_today(known: Mapping[tuple[str, str], Any], row: Any) -> list[float]:
    """Of each matrix: a row's error over that of today's versions at as many bits, on the same generated matrix."""
    from benchmarks.formats.measure import PARTS, at_bits

    out = []
    for part in (f"error {p}" for p in PARTS):
        anchors = [(r["bits/weight"], [r[part]]) for w in ("w1", "w2", "w3", "w4") for r in (known[row["model"], w],)]
        out.append(row[part] / at_bits(anchors, row["bits/weight"])[0])
    return out


def grids() -> str:
    """Ideas over today's at as many bits: divergence of two models, and the greatest error of a kind of matrices."""
    widths = ("w4", "w3", "w2", "w1")
    cells: dict[str, dict[str, list[str]]] = {}
    worst: dict[str, dict[str, float]] = {}
    for row in results("grids")["rows"]:
        version, _, idea = row["encoding"].partition(", ")
        if "d" in version:
            idea = f"a bit more in `down`, {idea or 'as today'}"
        ratio = f"{row[_AT_BITS]:.2f}±{row['ratio +-']:.2f}"
        cells.setdefault(idea, {}).setdefault(version[:2], []).append(ratio)
    rows = results("grids-generated")["rows"]
    found = {(r["model"], r["encoding"]): r for r in rows}
    for row in rows:
        version, _, idea = row["encoding"].partition(", ")
        if version in widths:
            kinds = worst.setdefault(idea, {})
            kinds[row["model"]] = max(*_over_today(found, row), kinds.get(row["model"], 0.0))
    out = []
    for idea, by_width in cells.items():
        if idea:
            errors = ", ".join(f"{v:.2f}" for v in worst.get(idea, {}).values())
            shown = idea.replace(", scales of 6 bits in blocks", ", S6")
            out.append([shown, *(", ".join(by_width.get(w, [])) for w in widths), errors])
    return table(["idea", *(f"`{w}`" for w in widths), "error"], out)
