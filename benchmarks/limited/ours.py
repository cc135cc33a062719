"""moepack's side, in a process of its own: `python -m benchmarks.limited.ours ORDER` (an order as passes.py describes).

Its options are those of `moepack.load`, such as `policy` and `kv`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import moepack
from benchmarks.common import Row
from moepack.families.arguments import with_cache
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.patches import leave_out, quiet_libraries

from .passes import Order, Side, serve

EVERY = 8  # of how many tokens one is looked at for the versions that it was served
COUNTED = ("demand_bytes", "prefetch_bytes", "forward_waits", "bytes_moved")


class Moepack(Side):
    """A bundle under a policy, in a memory limit."""

    def __init__(self, order: Order) -> None:
        quiet_libraries()
        leave_out("serve")
        torch.set_num_threads(order.threads)
        more: Row = dict(order.options)
        self._model = moepack.load(
            order.path,
            memory=order.memory,
            kv_tokens=order.depth + order.length,
            prefill_tokens=order.prompt,
            all_logits=False,
            **more,
        )
        self._served: Counter[str] = Counter()  # uses of experts, by version, in the tokens that were looked at
        self._steps = 0

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Count the versions that a pass is served. Hooks let experts run apart from their layer, so few passes do."""
        layers = zip(self._model.model.layers, self._model.moepack.layers, strict=True)
        hooks = [layer.mlp.experts.register_forward_hook(partial(self._look, held)) for layer, held in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, held: LayerExperts, module: nn.Module, given: tuple[Tensor, ...], out: object) -> None:
        self._served.update(str(held.current.handles[e]) for e in given[1].flatten().tolist())

    def begin(self, before: list[int], depth: int) -> None:
        """See Side."""
        from transformers.cache_utils import DynamicCache  # after `leave_out`

        self._cache = DynamicCache(config=self._model.config)
        if depth:
            self._pass(before)
            layers: list[Any] = self._cache.layers
            for layer in layers:
                times = (1, 1, depth // len(before), 1)
                layer.keys, layer.values = layer.keys.repeat(times), layer.values.repeat(times)

    def _pass(self, ids: list[int]) -> None:
        with torch.inference_mode():
            self._model(torch.tensor([ids]), logits_to_keep=1, **with_cache(self._model, self._cache))

    def step(self, ids: list[int]) -> None:
        """See Side."""
        self._steps += 1
        looks = len(ids) == 1 and self._steps % EVERY == 0
        with self._looking() if looks else nullcontext():
            self._pass(ids)

    def facts(self) -> Row:
        """See Side."""
        counted = self._model.moepack.counters()
        manager = self._model.moepack.manager
        return {name: counted[name] for name in COUNTED if name in counted} | {
            "served": dict(self._served),
            "waited": 0.0 if manager is None else manager.waited,
        }


if __name__ == "__main__":
    serve(Moepack, Order(**json.loads(sys.argv[1])))
