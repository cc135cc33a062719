"""How long a layer of experts takes."""

from functools import partial

from benchmarks.kernels import gpu
from moepack.pack.spec import Version

from .bundles import VERSIONS
from .rows import Entry, Measured, Rows, Setting

BATCHES = (1, 4, 16, 512, 2048)


def rows(setting: Setting) -> Rows:
    """A row a version and batch, of Qwen3-30B-A3B's layer, as a graph; a run's experts take over 4 times the L2."""
    out = {}
    for name, version in VERSIONS.items():
        for tokens in BATCHES:
            tried = name == "w4" and tokens in (1, 16)
            out[f"layer, {name}, {tokens} tokens"] = Entry(partial(layer, setting, version, tokens), on_cpu=tried)
    return out


def layer(setting: Setting, version: Version, tokens: int) -> Measured:
    """Microseconds of a layer's forward, routing to weighted sum."""
    sizes = (128, 32, 4, 2) if setting.small else (2048, 768, 128, 8)
    row = gpu.measure(sizes, version, tokens, 3 if setting.small else 20, setting.torch, setting.cache)
    return Measured(row.pop("ours us"), "us", more=row)
