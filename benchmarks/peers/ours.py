"""moepack's side: a layer's experts, and whole bundles, in a process of its own as the others' sides are."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.layers import Module, Pool
from moepack.families.arguments import with_cache
from moepack.pack.spec import ExpertLayer, Matrix, Version, encoding_of, version_names
from moepack.runtime.experts import backends
from moepack.runtime.experts.cpu import forward
from moepack.runtime.experts.handles import LayerCall
from moepack.runtime.kernels.affine_native import LEVELS, LayerForms, level, openmp, read
from moepack.runtime.kernels.forms import handle
from moepack.runtime.kernels.reference import plain_weights, sections_of

from .worker import answer, threads


class Layer:
    """What the experts' forward reads of a layer and of its snapshot: a pool's experts, all of one version."""

    def __init__(self, matrices: tuple[Matrix, ...], pool: Pool) -> None:
        self.of = self
        self.pool = pool
        self.versions = (pool.version,)
        self.layer = ExpertLayer(0, "experts", len(pool), matrices)
        self.device = torch.device("cpu")
        self.native = LayerForms(matrices, self.versions)
        self.gated: Any = None
        number = self.native.numbers[pool.version.name]
        self.table = np.array([handle(int(a), number) for a in pool.addresses], np.uint64)
        sections = sections_of(matrices, pool.version)
        self.handles = [
            SimpleNamespace(version=pool.version, extent=e, weights=plain_weights(e, sections)) for e in self._extents()
        ]

    def _extents(self) -> list[torch.Tensor]:
        return [row[: self.pool.size] for row in self.pool.memory]

    def bias(self, expert: int, matrix: int, dtype: torch.dtype) -> None:
        """None: these experts have no biases."""


_layers: dict[str, Layer] = {}
_models: dict[str, Any] = {}


def open_layer(key: str, version: str, group_size: int, sizes: Sequence[int], pool: int) -> dict[str, float]:
    """Hold a layer's experts: `sizes` are hidden, intermediate and experts; at least `pool` bytes and so many."""
    if version not in version_names():
        raise LookupError(f"this moepack has no {version}")
    hidden, inner, least = sizes
    matrices = (Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner))
    kind = Version.of(version, group_size if group_size in encoding_of(version).group_sizes else 0)
    size = Pool(matrices, kind, 1, "huge").size
    made = Layer(matrices, Pool(matrices, kind, max(least, -(-pool // size)), "huge"))
    _layers[key] = made
    return {"bytes": size, "bits": 8 * size / sum(m.weights for m in matrices), "experts": len(made.pool)}


def run_layer(key: str, index: list[list[int]], step: int, first: int, passes: int, warm: int) -> list[float]:
    """Seconds of each of so many passes after `warm` others; pass i takes the experts `index` + i * `step`."""
    layer = _layers[key]
    ids = torch.tensor(index)
    module = Module()
    x = torch.randn(len(ids), layer.layer.matrices[0].cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    gates = torch.full(ids.shape, 1 / ids.shape[1])
    times = []
    with torch.inference_mode():
        for i in range(first, first + warm + passes):
            chosen = (ids + i * step) % len(layer.pool)
            began = time.perf_counter()
            forward(LayerCall(module, layer, x, chosen, gates))  # type: ignore[arg-type]
            times.append(time.perf_counter() - began)
    return times[warm:]


def read_layer(key: str, index: list[list[int]], step: int, first: int, passes: int, warm: int) -> list[float]:
    """The same of reading the experts' bytes, each once, and doing nothing with them."""
    pool = _layers[key].pool
    used = np.unique(np.array(index))
    times = []
    for i in range(first, first + warm + passes):
        addresses = pool.addresses[(used + i * step) % len(pool)]
        began = time.perf_counter()
        read(addresses, pool.size)
        times.append(time.perf_counter() - began)
    return times[warm:]


def close_layer(key: str) -> None:
    """Give its memory back."""
    _layers.pop(key)


def open_model(key: str, bundle: str, version: str, dense: str | None) -> dict[str, float]:
    """Load a bundle in one version; its other matrices as the checkpoint has them, or in the version `dense`."""
    from moepack.runtime.load import load
    from moepack.runtime.patches import quiet_libraries

    more: dict[str, Any] = {}
    if dense is not None:
        if "dense" not in inspect.signature(load).parameters:
            raise LookupError("this moepack serves the matrices beside experts as the checkpoint has them")
        more["dense"] = dense
    quiet_libraries()
    began = time.perf_counter()
    _models[key] = load(bundle, policy=f"static:{version}", **more)
    return {"seconds": time.perf_counter() - began}


def run_model(key: str, prompt: list[int], steps: int) -> dict[str, Any]:
    """Seconds of a prompt's pass, and of each token after it; and the prompt's last logits' first few."""
    from transformers.cache_utils import DynamicCache

    model = _models[key]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        began = time.perf_counter()
        logits = model(ids, logits_to_keep=1, **with_cache(model, cache)).logits
        prefill = time.perf_counter() - began
        decode = []
        for i in range(steps):
            one = ids[:, i % len(prompt)][:, None]
            began = time.perf_counter()
            model(one, logits_to_keep=1, **with_cache(model, cache))
            decode.append(time.perf_counter() - began)
    return {"prefill": prefill, "decode": decode, "logits": logits[0, -1, :64].float().tolist()}


def close_model(key: str) -> None:
    """Give its memory back."""
    import gc

    model = _models.pop(key)
    if hasattr(model, "moepack"):
        model.moepack.close()
    del model
    gc.collect()


def tune() -> str:
    """Measure the kernels' limits for these threads, as `moepack doctor --kernels` does; what runs the kernels."""
    backends.autotune()
    return f"{LEVELS[level]}, {threads()} threads ({'torch' if openmp else 'own'} pool)"


if __name__ == "__main__":
    torch.set_num_threads(threads())
    answer(
        {
            f.__name__: f
            for f in (open_layer, run_layer, read_layer, close_layer, open_model, run_model, close_model, tune)
        }
    )
