"""moepack's side: whole bundles, in a process of its own as llama.cpp's are."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Row
from benchmarks.decoding import Reading, timed
from benchmarks.limited.cage import counts
from moepack.runtime.experts import backends
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.kernels.affine_native import LEVELS, level, openmp
from moepack.runtime.patches import leave_out, quiet_libraries

from .worker import answer, threads

EVERY = 8  # of how many tokens one is looked at for the versions that it was served
COUNTED = ("demand_bytes", "prefetch_bytes", "forward_waits", "bytes_moved")


class Opened:
    """A bundle that is served, and the text that it reads.

    With `looks` the versions are counted that tokens are served. Hooks let experts run apart from their layer, so few
    passes do.
    """

    def __init__(self, model: Any, looks: bool) -> None:
        self.model = model
        self.served: Counter[str] | None = Counter() if looks else None  # uses of experts, by version
        self._calls = 0

    def begin(self) -> None:
        """Forget the text so far."""
        self.text = Reading(self.model, logits_to_keep=1)

    def read(self, parts: list[list[int]]) -> list[float]:
        """Go on with these parts of a text; return the seconds of each."""
        self._calls += 1
        looks = self.served is not None and len(parts[0]) == 1 and self._calls % EVERY == 0
        with self._looking() if looks else nullcontext():
            return timed(self.text, parts)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        layers = zip(self.model.model.layers, self.model.moepack.layers, strict=True)
        hooks = [layer.mlp.experts.register_forward_hook(partial(self._look, held)) for layer, held in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, held: LayerExperts, module: nn.Module, given: tuple[Tensor, ...], out: object) -> None:
        assert self.served is not None
        self.served.update(str(held.current.handles[e]) for e in given[1].flatten().tolist())


_opened: dict[str, Opened] = {}


def open_model(key: str, bundle: str, looks: bool = False, **options: Any) -> None:
    """Load a bundle; options are those of `moepack.load`."""
    from moepack.runtime.load import load

    quiet_libraries()
    leave_out("serve")
    _opened[key] = Opened(load(bundle, **options), looks)


def deepen(key: str, ids: list[int], depth: int) -> None:
    """Begin a text of `depth` tokens whose keys and values are those of these few, again and again."""
    opened = _opened[key]
    opened.begin()
    opened.read([ids])
    for layer in opened.text.cache.layers:
        times = (1, 1, depth // len(ids), 1)
        layer.keys, layer.values = layer.keys.repeat(times), layer.values.repeat(times)


def read(key: str, parts: list[list[int]], afresh: bool) -> list[float]:
    """Seconds of a pass over each part of a text, which goes on, or begins afresh."""
    opened = _opened[key]
    if afresh:
        opened.begin()
    return opened.read(parts)


def facts(key: str) -> Row:
    """Counts of the process, and of the model since it was loaded."""
    opened = _opened[key]
    counted = opened.model.moepack.counters()
    manager = opened.model.moepack.manager
    own: Row = {name: counted[name] for name in COUNTED if name in counted}
    own |= {"served": dict(opened.served or {}), "waited": 0.0 if manager is None else manager.waited}
    return own | counts()


def close_model(key: str) -> None:
    """Give its memory back."""
    _opened.pop(key).model.moepack.close()
    gc.collect()


def tune() -> str:
    """Measure the kernels' limits for these threads, as `moepack doctor --kernels` does; what runs the kernels."""
    backends.autotune()
    return f"{LEVELS[level]}, {threads()} threads ({'torch' if openmp else 'own'} pool)"


if __name__ == "__main__":
    torch.set_num_threads(threads())
    answer({f.__name__: f for f in (open_model, deepen, read, facts, close_model, tune)})
