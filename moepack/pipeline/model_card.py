"""The model card of a bundle (README.md): its model, the sizes and losses of its versions, and how to load it.

The text comes from a manifest and its tables. Neither is trusted, because both may have been downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from moepack.pack.manifest import Manifest
from moepack.pack.spec import Version, expert_file
from moepack.pack.tables import FEW_TOKENS, CalibrationTables, shown_loss

# Keys of a checkpoint's card that hold for its bundle too.
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_MOST = 1 << 20  # the most bytes read of a card
_LOAD = """## Load it

```python
import moepack

model = moepack.load("WHERE", policy="static:LAST")  # fetches that version alone
model = moepack.load("WHERE", device_memory="24GiB")  # what fits, busy experts at high precision
```

Or some of it to a directory, or what a budget holds:

```sh
moepack pull WHERE -o some --versions LAST
moepack pull WHERE -o fitting --fit 24GiB
```

Or as another program reads it, as far as its format holds these codes: `--for transformers`, `vllm` or `llama.cpp`.

```sh
moepack pull WHERE -o here --for transformers --bits LAST
```

After `import moepack`, `AutoModelForCausalLM.from_pretrained` loads it too. Plain transformers cannot read this format:
it refuses the model instead of serving random experts.
"""


@dataclass(frozen=True, slots=True)
class MeasuredKl:
    """KL(lossless, version), nats a token, with its 95 % interval."""

    kl: float
    low: float
    high: float

    @property
    def cell(self) -> str:
        """A cell of the card's table, in thousandths."""
        return f" {1e3 * self.kl:.1f} ({1e3 * self.low:.1f} to {1e3 * self.high:.1f}) |"


def carried(card: Path) -> dict[str, str | list[str]]:
    """The metadata of a checkpoint's card that its bundle keeps; empty without a readable card."""
    try:
        with card.open(encoding="utf-8", errors="replace") as f:
            head = re.match(r"---\r?\n(.*?)\r?\n---", f.read(_MOST), re.DOTALL)
        found = yaml.safe_load(head[1]) if head else None
    except (OSError, yaml.YAMLError, RecursionError):
        return {}
    return _metadata(found)


def _metadata(found: object) -> dict[str, str | list[str]]:
    out: dict[str, str | list[str]] = {}
    if not isinstance(found, Mapping):
        return out
    for key in CARRIED:
        value = found.get(key)
        if isinstance(value, str):
            out[key] = value
        elif isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            out[key] = list(value)
    return out


def hub_id(path: Path) -> str | None:
    """The Hub id that a directory of the Hub's cache belongs to; None for any other directory."""
    for folder in path.parts:
        if (found := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder)) and "snapshots" in path.parts:
            return f"{found[1]}/{found[2]}"
    return None


def hub_commit(path: Path) -> str | None:
    """The commit that a directory of the Hub's cache holds; None for any other directory."""
    at = path.parts.index("snapshots") + 1 if hub_id(path) else 0
    return path.parts[at] if at and at < len(path.parts) else None


def model_card(
    manifest: Manifest,
    tables: CalibrationTables,
    versions: Sequence[str],
    repo: str | None = None,
    picture: str | None = None,
    base_model: str | None = None,
    divergences: Mapping[str, MeasuredKl] | None = None,
) -> str:
    """Return the card's text. `versions` are those that the bundle's directory holds.

    Args:
        repo: the bundle's name on the Hub, if any.
        picture: file name of a picture of the losses, beside the card.
        base_model: the checkpoint's Hub id, in place of the manifest's.
        divergences: measured ones, by version; a column of the table.
    """
    provenance = (manifest.provenance.get(k) for k in ("checkpoint", "calibration"))
    checkpoint, calibration = (found if isinstance(found, Mapping) else {} for found in provenance)
    model = _line(manifest.model.get("model_type"))
    name = _line(checkpoint.get("name"))
    given = checkpoint.get("id")
    base = base_model or (given if isinstance(given, str) and given else None)
    facts: dict[str, object] = {"library_name": "moepack", "pipeline_tag": "text-generation"}
    facts |= _metadata(checkpoint.get("card"))
    facts |= {"base_model": base, "base_model_relation": "quantized"} if base else {}
    facts["tags"] = ["moepack", "mixture-of-experts", "quantized", model]
    experts = sum(layer.experts for layer in manifest.layers)
    dense = sum(e.size for n, e in manifest.files.items() if n.startswith("model") and n.endswith(".safetensors"))
    kl = {name: d.cell for name, d in (divergences or {}).items()}
    rows = "\n".join(_row(manifest, tables, v) + kl.get(v, "  |" * bool(kl)) for v in versions)
    if manifest.dense:
        more = "  |" * bool(kl)
        rows += "".join(f"\n{_dense_row(manifest, tables, v.name)}{more}" for v in manifest.dense_versions)
    column = " KL from the lossless version, in thousandths of a nat a token (95 %) |" * bool(kl)
    tokens = manifest.calibration_tokens
    sources = calibration.get("sources")
    text = ", ".join(f"`{_line(s)}`" for s in sources) if isinstance(sources, list) else "unknown text"
    few = sum(tables.few().values())
    leaning = f" {few:,} of {experts:,} experts had fewer than {FEW_TOKENS}: their errors lean on their layers'."
    license_file = next((n for n in manifest.files if n.upper().startswith("LICENSE")), None)
    parts = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---\n\n# {name}, packed\n",
        f"A moepack bundle of {f'[{_line(base)}](https://huggingface.co/{base})' if _is_id(base) else name} ({model}): "
        f"its {experts:,} experts in {len(manifest.layers)} layers, each at {len(versions)} "
        f"precision{'s' * (len(versions) > 1)}, with measured losses. "
        f"{'What has no row below' if manifest.dense else 'Everything outside the experts'} is as in the "
        f"original ({dense / 1e6:,.1f} MB).\n",
        f"| version | stored as | size | bits a weight | mean relative output error |{column}\n"
        f"|---|---|---|---|---|{'---|' * bool(kl)}\n{rows}\n",
        f"Errors are measured on {tokens:,} calibration tokens ({text}), expert by expert, against the output in the "
        f"original's precision. `moepack inspect` shows them all.{leaning * bool(few)}\n",
        f"![Tokens routed to each expert, and what each version costs it]({picture})\n" if picture else "",
        (_memory(manifest, versions, dense) + "\n" + _LOAD.replace("LAST", versions[-1])).replace(
            "WHERE", repo or "path/or/hub-id"
        ),
        f"The original's licence holds here too: [{license_file}]({license_file}).\n" if license_file else "",
    ]
    return "\n".join(p for p in parts if p)


def _memory(manifest: Manifest, versions: Sequence[str], dense: int) -> str:
    """Say which command serves in which memory. `dense` has the bytes of tensors without versions."""
    for version in manifest.dense_versions[:1]:
        extents = (x.extent_matrices(i) for x in manifest.dense_layers for i in range(x.extents))
        dense += sum(version.resident_size(matrices) for matrices in extents)
    rows = ""
    for name in reversed(versions):
        version = manifest.version(name)
        experts = sum(layer.experts * version.resident_size(layer.matrices) for layer in manifest.layers)
        rows += f"\n| {(dense + experts) / 1e6:,.1f} MB | `moepack serve WHERE --policy static:{name}` |"
    return (
        f"## Which command for which memory\n\n| weights | command |\n|---|---|{rows}\n\n"
        "The KV cache and activations come on top. Between two rows `moepack serve WHERE --device-memory 24GiB` "
        "holds busy experts at the higher versions; `--memory 24GiB` bounds the whole process.\n"
    )


def _row(manifest: Manifest, tables: CalibrationTables, name: str) -> str:
    files = [expert_file(name, layer.index) for layer in manifest.layers]
    weights = sum(layer.experts * layer.expert_weights for layer in manifest.layers)
    return _cells(manifest, manifest.version(name), files, weights, "", shown_loss(*tables.mean_loss(name)))


def _dense_row(manifest: Manifest, tables: CalibrationTables, name: str) -> str:
    dense = tables.dense
    weights = sum(d.matrix.weights for d in manifest.dense)
    assert dense is not None
    loss = float(dense.relative[:, dense.versions.index(name)].mean())
    what = f"{len(manifest.dense)} matrices outside the experts: "
    return _cells(manifest, manifest.dense_version(name), manifest.dense_files(name), weights, what, f"{loss:.4f}")


def _cells(manifest: Manifest, version: Version, names: Sequence[str], weights: int, what: str, loss: str) -> str:
    files = [manifest.expert_files[name] for name in names]
    bits = 8 * sum(f.payload for f in files) / weights
    size = sum(f.size for f in files) / 1e6
    return f"| {version.name} | {what}{_described(version)} | {size:,.1f} MB | {bits:.2f} | {loss} |"


def _is_id(value: str | None) -> bool:
    return bool(value and re.fullmatch(r"[\w.-]+/[\w.-]+", value))


def _line(value: object) -> str:
    """Turn untrusted text into one line of plain Markdown, without characters that do not print."""
    text = "".join(c if c.isprintable() else " " for c in str(value if value is not None else "unknown")[:200])
    return re.sub(r"[\\`*\[\]<>|#!&]", r"\\\g<0>", text)


def _described(version: Version) -> str:
    """How weights are stored, in words."""
    if version.holds:
        return "as released" if version.released else "lossless"
    more = ", in down one more" if version.by_matrix else ""
    small = ", scales of a byte" if version.scale_bits == 8 else ""
    return f"{version.bits} bits{more}, groups of {version.group_size}{small}"
