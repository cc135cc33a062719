"""moepack's side: whole bundles, in a process of its own as llama.cpp's are."""

from __future__ import annotations

import time

import torch

from benchmarks.common import Row
from moepack.families.arguments import with_cache
from moepack.runtime.experts import backends
from moepack.runtime.kernels.affine_native import LEVELS, level, openmp

from .worker import answer, threads

_models: Row = {}


def open_model(key: str, bundle: str, version: str, dense: str | None) -> dict[str, float]:
    """Load a bundle in one version; its other matrices as the checkpoint has them, or in the version `dense`."""
    from moepack.runtime.load import load
    from moepack.runtime.patches import quiet_libraries

    quiet_libraries()
    began = time.perf_counter()
    _models[key] = load(bundle, policy=f"static:{version}", dense=dense)
    return {"seconds": time.perf_counter() - began}


def run_model(key: str, prompt: list[int], steps: int) -> Row:
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
    answer({f.__name__: f for f in (open_model, run_model, close_model, tune)})
