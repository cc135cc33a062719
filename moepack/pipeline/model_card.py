"""The model card of a bundle (README.md): what it is, what its versions cost, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moepack.pack.spec import ExpertLayer, Version


def model_card(
    record: Mapping[str, Any],
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    losses: Mapping[str, float],
) -> str:
    """The card's text; `losses` is the mean relative output error of each version's experts."""
    name = Path(record["name"]).name
    rows = "\n".join(
        f"| {v.name} | {'lossless' if v.is_lossless else f'{v.bits} bits, groups of {v.group_size}'} "
        f"| {losses[v.name]:.4f} |"
        for v in versions
    )
    experts = sum(layer.experts for layer in layers)
    return f"""---
library_name: moepack
tags:
- moepack
- mixture-of-experts
- quantized
---

# {name}, packed

A moepack bundle of {name} ({record["model"]["model_type"]}): its {experts} experts in {len(layers)} layers, each at
{len(versions)} precisions, with measured losses. Everything outside the experts is as in the original.

| version | experts stored as | mean relative output error |
|---|---|---|
{rows}

Measured on {record["samples"] * record["length"]} calibration tokens ({", ".join(record["sources"])}).

```python
import moepack

model = moepack.load("path/or/hub-id")  # or moepack.load(..., policy="static:{versions[-1].name}")
```

Plain transformers cannot read this format: it refuses the model instead of serving random experts.
"""
