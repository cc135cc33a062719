"""Write a bundle's report (`moepack inspect --html`) as one page without scripts or requests.

Text from the bundle is escaped, and what should be a number is shown only if it is one. inspect.py gives the facts and
draws the picture.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError, MissingExtraError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import lossy
from moepack.pack.tables import CalibrationTables, shown_loss
from moepack.pack.user_files import write_report
from moepack.shared.palette import PARTS, VERSIONS

from .inspect import draw_tables, made_by

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5c5c5c; --paper: #ffffff; --line: #d8d8d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a8a8a8; --paper: #161616; --line: #3a3a3a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 45rem; }
.wide { overflow-x: auto; max-height: 32rem; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--soft); }
figure { margin: 1rem 0; } figcaption, .soft { color: var(--soft); font-size: .9rem; }
img { max-width: 100%; height: auto; background: #fff; } pre { overflow-x: auto; font-size: .85rem; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; } .bar { height: .6rem; }
"""
_STYLE += "".join(f".{name} {{ background: {shade}; }}\n" for name, shade in {**VERSIONS, **PARTS}.items())


def check_page(out: Path) -> None:
    """Raise InputError for a name that is not a page's."""
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"{out}: a report is a .html file")


def write_page(path: str | Path, facts: JsonObject, out: Path) -> None:
    """Write the page of a bundle, with the facts that `inspect` returns, into a .html file.

    Raises:
        InputError: if `out` is not a .html file.
        BundleError: for a damaged bundle.
    """
    check_page(out)
    bundle = open_bundle(path)
    tables = bundle.calibration()
    name = _object(bundle.manifest.provenance.get("checkpoint")).get("name") or Path(path).name
    parts = [
        f"<h1>{_text(name)}</h1>",
        _paragraph(
            f"A moepack bundle of {facts['model_type']}: {facts['experts']:,} experts in {facts['moe_layers']:,} layers"
            f", {facts['expert_weights']:,} expert weights, calibrated on {facts['calibration_tokens']:,} tokens of "
            f"{', '.join(map(str, facts['calibration_sources'])) or 'unknown text'}."
        ),
        _versions(facts),
        _losses(bundle, tables),
        _routing(tables),
        _widths(bundle),
        _origin(bundle.manifest.provenance),
    ]
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(name)}: moepack bundle</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'img-src data:"><style>{_STYLE}</style></head><body>{"".join(parts)}</body></html>\n'
    )
    write_report(out, text.encode(errors="replace"))


def _versions(facts: JsonObject) -> str:
    most = max([facts["dense_bytes"], *(v["bytes"] for v in facts["versions"].values())]) or 1
    rows = []
    for name, v in facts["versions"].items():
        loss = shown_loss(facts["loss"][name], facts["loss_error"][name])
        made = made_by(facts["methods"][name])
        cells = (f"{v['bytes']:,}", f"{v['bits_per_weight']:.3f}", v["group_size"] or "", loss, made)
        key = f'<span class="key {_text(name)}"></span>{_text(name)}'
        rows.append([key, *map(_text, cells), _bar(v["bytes"] / most, name)])
    dense = facts["dense_bytes"]
    rows.append(["outside the experts", f"{dense:,}", "", "", "", "", _bar(dense / most, "dense")])
    head = ("version", "bytes", "bits a weight", "group", "mean relative error", "made by", "size")
    return f"<h2>Versions and sizes</h2>{_table(head, rows)}"


def _losses(bundle: Bundle, tables: CalibrationTables) -> str:
    names = [v.name for v in lossy(bundle.versions)]
    if not names:
        return ""
    columns = tables.columns(names)
    rows = [[str(t.index), *(f"{t.relative[:, c].mean():.5f}" for c in columns)] for t in tables.layers]
    return (
        "<h2>What a version costs</h2>"
        + _paragraph(
            "Squared error of an expert's output, relative to its output in the original's precision, for tokens like "
            "those that calibration routed to it, except the tokens it was fitted to; ± two standard errors, where the "
            "bundle has them."
        )
        + _picture(bundle)
        + f"<details><summary>By layer</summary>{_table(('layer', *names), rows)}</details>"
    )


def _picture(bundle: Bundle) -> str:
    try:
        image = base64.b64encode(draw_tables(bundle, "png")).decode()
    except MissingExtraError as error:
        return _paragraph(f"No picture: {error}")
    return f'<img alt="Tokens routed and relative errors, layers by experts" src="data:image/png;base64,{image}">'


def _routing(tables: CalibrationTables) -> str:
    rows = []
    tenth = []
    for t in tables.layers:
        tokens = np.sort(t.tokens.astype(np.float64).clip(0))[::-1]
        whole = tokens.sum() or 1.0
        busiest = tokens[0] * len(tokens) / whole
        tenths = tokens[: -(-len(tokens) // 10)].sum() / whole
        tenth.append(tenths)
        without = int((tokens == 0).sum())
        rows.append([str(t.index), f"{busiest:.1f}", f"{tenths:.1%}", f"{skew(tokens):.3f}", f"{without:,}"])
    head = ("layer", "busiest, times the mean", "busiest tenth's tokens", "Gini", "experts without tokens")
    return (
        "<h2>Where tokens go</h2>"
        + _paragraph(
            f"The busiest tenth of a layer's experts, rounded up, took {np.mean(tenth):.1%} of its tokens, on average."
        )
        + f"<details><summary>By layer</summary>{_table(head, rows)}</details>"
    )


def skew(tokens: npt.NDArray[np.float64]) -> float:
    """Gini coefficient of `tokens`, float64 [experts] in falling order: 0 if equal, near 1 if one expert has all."""
    n = len(tokens)
    whole = float(tokens.sum())
    if not whole:
        return 0.0
    rising = tokens[::-1]
    return float(2 * (np.arange(1, n + 1) * rising).sum() / (n * whole) - (n + 1) / n)


def _widths(bundle: Bundle) -> str:
    chosen = bundle.manifest.allocation
    if chosen is None:
        return ""
    names = [v.name for v in bundle.manifest.versions]
    layers = zip(bundle.layers, chosen.versions, strict=True)
    rows = [[str(layer.index), *(str(row.count(n)) for n in names)] for layer, row in layers]
    said = _paragraph(f"Experts at each version, by layer, under {chosen.name}:")
    return f"<h2>Versions chosen</h2>{said}{_table(('layer', *names), rows)}"


def _origin(provenance: Mapping[str, object]) -> str:
    checkpoint, tools = (_object(provenance.get(k)) for k in ("checkpoint", "tools"))
    rows = [[_text(k), _text(v)] for k, v in (("checkpoint", checkpoint.get("id")), *tools.items()) if v]
    recipe = provenance.get("recipe")
    text = f"<details><summary>The recipe</summary><pre>{_text(recipe)}</pre></details>" if recipe else ""
    return f"<h2>Where it comes from</h2>{_table(('made with', ''), rows)}{text}"


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return escape(str(value)[:20_000], quote=True)


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>"


def _bar(share: float, kind: str) -> str:
    return f'<div class="bar {kind}" style="width:{max(1.0, 100 * share):.0f}px"></div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(h)}</th>" for h in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
