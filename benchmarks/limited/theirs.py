"""llama.cpp's side: writes a generated model as GGUF, and serves it. Runs in the environment of benchmarks/peers.

    python -m benchmarks.limited.theirs THREADS write SHAPE MIX FILE
    python -m benchmarks.limited.theirs THREADS serve ORDER    (an order as passes.py describes it)

`llama_decode` is called as llama-server calls it. Weights are mapped and stay as they are: repacked, as llama.cpp would
by default, they are copied, and the whole model must fit in memory.
"""

from __future__ import annotations

import json
import sys

from benchmarks.peers.llama import Model, write_tensors

from .passes import Order, Side, serve
from .shapes import SHAPES
from .weights import Weights


class Llama(Side):
    """A GGUF file in a context of its own."""

    def __init__(self, order: Order) -> None:
        kv = order.options.get("kv", "F16")
        flash = {"0": False, "1": True}.get(order.options.get("flash", ""))
        room = order.depth + order.length
        deep = order.depth > 0
        self._model = Model(order.path, room, order.prompt, order.threads, False, flash, kv, deep)

    def begin(self, before: list[int], depth: int) -> None:
        """See Side."""
        self._model.clear()
        if depth:
            self._model.deepen(before, depth)

    def step(self, ids: list[int]) -> None:
        """See Side."""
        self._model.decode(ids)


def write(shape: str, mix: str, out: str) -> None:
    """Write a generated model as GGUF."""
    described = SHAPES[shape]
    write_tensors(Weights(described), described.config(), out, mix, described.kinds)


if __name__ == "__main__":
    _, _, what, *arguments = sys.argv
    if what == "write":
        write(*arguments)
    else:
        serve(Llama, Order(**json.loads(arguments[0])))
