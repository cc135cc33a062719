"""An edit of a copied bundle, and the files of that bundle that edits name."""

from collections.abc import Callable

from hostile_edits import Victim

Do = Callable[[Victim], object]
BF16, W4, W3, W1 = (f"experts/{v}/layer-001.safetensors" for v in ("bf16", "w4", "w3", "w1"))
Q1, Q8, HEAD = "dense/bf16/layer-001.safetensors", "dense/w8/layer-001.safetensors", "dense/w4/head.safetensors"
MANIFEST, CONFIG, DENSE, TABLES = "manifest.json", "config.json", "model.safetensors", "calibration.safetensors"
