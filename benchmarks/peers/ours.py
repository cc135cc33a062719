"""moepack's side: whole bundles, in a process of its own as llama.cpp's are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common import Row
from benchmarks.decoding import reading, timed
from moepack.runtime.experts import backends
from moepack.runtime.kernels.affine_native import LEVELS, level, openmp

from .worker import answer, threads

_models: Row = {}
_texts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def open_model(key: str, bundle: str, version: str, dense: str | None) -> None:
    """Load a bundle in one version; its other matrices as the checkpoint has them, or in the version `dense`."""
    from moepack.runtime.load import load
    from moepack.runtime.patches import quiet_libraries

    quiet_libraries()
    _models[key] = load(bundle, policy=f"static:{version}", dense=dense)


def read(key: str, parts: list[list[int]], afresh: bool) -> list[float]:
    """Seconds of a pass over each part of a text, which goes on, or begins afresh."""
    if afresh:
        _texts[key] = reading(_models[key], logits_to_keep=1)
    return timed(_texts[key], parts)


def close_model(key: str) -> None:
    """Give its memory back."""
    import gc

    model = _models.pop(key)
    _texts.pop(key, None)
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
    answer({f.__name__: f for f in (open_model, read, close_model, tune)})
