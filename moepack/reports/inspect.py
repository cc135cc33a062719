"""Report what a bundle holds: sizes, losses and routing, as numbers, tables and a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError, MissingExtraError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import encoding_of, lossless, lossy
from moepack.pack.tables import FEW_TOKENS, TABLES, shown_loss
from moepack.pack.user_files import write_report
from moepack.shared.palette import colour

if TYPE_CHECKING:
    from rich.table import Table


def inspect(path: str | Path) -> JsonObject:
    """Read the facts of a bundle, ready for JSON."""
    bundle = open_bundle(path)
    tables = bundle.calibration()
    found = bundle.manifest.provenance.get("calibration")
    calibration = found if isinstance(found, dict) else {}
    sources = calibration.get("sources")
    versions = {}
    loss = {}
    loss_error = {}
    methods = {}
    for version in bundle.versions:
        versions[version.name] = {
            "bytes": bundle.version_bytes(version.name),
            "bits_per_weight": round(bundle.bits_per_weight(version.name), 4),
            "group_size": version.group_size,
            "scale_bits": 0 if version.holds else version.scale_bits,
        }
        loss[version.name], loss_error[version.name] = tables.mean_loss(version.name)
        methods[version.name] = tables.made_by(version.name)
    allocation = bundle.manifest.allocation
    dense = {}
    weights = sum(d.matrix.weights for d in bundle.manifest.dense)
    for version in bundle.dense_versions:
        assert tables.dense is not None
        files = [bundle.manifest.expert_files[name] for name in bundle.manifest.dense_files(version.name)]
        dense[version.name] = {
            "bytes": sum(f.size for f in files),
            "bits_per_weight": round(8 * sum(f.payload for f in files) / weights, 4),
            "group_size": version.group_size,
            "loss": float(tables.dense.relative[:, tables.dense.versions.index(version.name)].mean()),
        }
    return {
        "model_type": bundle.manifest.model.get("model_type", "unknown"),
        "expert_dtype": bundle.manifest.model["expert_dtype"],
        "moe_layers": len(bundle.layers),
        "experts": sum(layer.experts for layer in bundle.layers),
        "expert_weights": bundle.expert_weights,
        "versions": versions,
        "loss": loss,
        "loss_error": loss_error,
        "methods": methods,
        "calibration_tokens": bundle.manifest.calibration_tokens,
        "calibration_sources": sources if isinstance(sources, list) else [],
        "starved_experts": sum(int((t.tokens == 0).sum()) for t in tables.layers),
        "few_tokens": {"below": FEW_TOKENS, "experts": sum(tables.few().values())},
        "allocation": None if allocation is None else allocation.name,
        "dense_bytes": sum(
            e.size for n, e in bundle.manifest.files.items() if n.endswith(".safetensors") and n != TABLES
        ),
        "dense_matrices": len(bundle.manifest.dense),
        "dense_versions": dense,
    }


def render(facts: JsonObject) -> Table:
    """Make a table of the facts."""
    from rich.table import Table

    title = (
        f"{facts['model_type']}: {facts['experts']} experts in {facts['moe_layers']} layers, "
        f"{facts['expert_weights']:,} expert weights, calibrated on {facts['calibration_tokens']:,} tokens"
    )
    notes = ["± two standard errors"] if any(facts["loss_error"].values()) else []
    if exact := lossless(map(encoding_of, facts["versions"])):
        notes.insert(0, f"{exact.name} holds {exact.holds[facts['expert_dtype']]}")
    if small := [n for n, v in facts["versions"].items() if v["scale_bits"] == 8]:
        notes.append(f"scales of {', '.join(small)} have a byte")
    if few := facts["few_tokens"]["experts"]:
        below = facts["few_tokens"]["below"]
        notes.append(f"{few:,} experts had fewer than {below} calibration tokens: their losses draw on their layers'")
    columns = ("version", "bytes", "bits/weight", "group", "mean relative loss", "made by")
    table = Table(*columns, title=title, caption="; ".join(notes) or None)
    for name, v in facts["versions"].items():
        loss = shown_loss(facts["loss"][name], facts["loss_error"][name])
        table.add_row(name, *_sizes(v), loss, made_by(facts["methods"][name]))
    for name, v in facts["dense_versions"].items():
        matrices = f"{facts['dense_matrices']} matrices outside the experts"
        table.add_row(f"dense {name}", *_sizes(v), f"{v['loss']:.5f}", matrices)
    return table


def _sizes(version: JsonObject) -> tuple[str, str, str]:
    return f"{version['bytes']:,}", f"{version['bits_per_weight']:.3f}", str(version["group_size"] or "-")


def made_by(methods: dict[str, int]) -> str:
    """Name a version's quantisation methods, each with its number of experts; "exact" if none was needed."""
    return ", ".join(f"{method} {n:,}" for method, n in methods.items() if method != "none") or "exact"


def check_picture(out: Path) -> None:
    """Raise InputError for a name that is not a picture's."""
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"{out}: a picture is a .png, a .svg or a .pdf")


def plot(path: str | Path, out: Path) -> None:
    """Draw the loss tables (`draw_tables`) into a file. Raises InputError for a file of another format."""
    check_picture(out)
    write_report(out, draw_tables(open_bundle(path), out.suffix[1:]))


def draw_tables(bundle: Bundle, kind: str) -> bytes:
    """Draw the loss tables as "png", "svg" or "pdf": tokens by expert, then each lossy version; a row is a layer.

    Raises:
        MissingExtraError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "build") from None
    import numpy as np

    tables = bundle.calibration()
    names = [v.name for v in lossy(bundle.versions)]
    shape = len(tables.layers), max(len(t.tokens) for t in tables.layers)
    figure = Figure(figsize=(4 + 3.2 * len(names), 1.6 + 0.28 * max(6, min(40, shape[0]))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names) + 1, sharey=True, squeeze=False)[0]
    grids = [("tokens routed", np.full(shape, np.nan))]
    grids += [(f"{name}: relative output error", np.full(shape, np.nan)) for name in names]
    for row, t in enumerate(tables.layers):
        grids[0][1][row, : len(t.tokens)] = np.maximum(t.tokens, 0.5)
        for k, name in enumerate(names):
            column = np.maximum(t.relative[:, tables.versions.index(name)], 1e-8)
            grids[k + 1][1][row, : len(column)] = column
    for axis, (title, grid) in zip(axes, grids, strict=True):
        image = axis.imshow(grid, aspect="auto", norm=LogNorm(), cmap="viridis", interpolation="nearest")
        axis.set(title=title, xlabel="expert")
        figure.colorbar(image, ax=axis)
    for axis, name in zip(axes[1:], names, strict=True):
        axis.spines[:].set(color=colour(name), linewidth=3)
    axes[0].set_ylabel("layer")
    step = max(1, shape[0] // 12)
    axes[0].set_yticks(range(0, shape[0], step), [str(t.index) for t in tables.layers[::step]])
    figure.suptitle(f"{bundle.manifest.model.get('model_type')}: what each width costs each expert")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=120)
    return picture.getvalue()
