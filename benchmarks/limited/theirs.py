"""llama.cpp's side: writes a generated model as GGUF, and serves it. Runs in the environment of benchmarks/peers.

    python -m benchmarks.limited.theirs THREADS write SHAPE MIX FILE
    python -m benchmarks.limited.theirs THREADS serve ORDER    (an order as passes.py describes it)

`llama_decode` is called as llama-server calls it. Weights are mapped and stay as they are: repacked, as llama.cpp would
by default, they are copied, and the whole model must fit in memory.
"""

from __future__ import annotations

import importlib
import json
import sys

from benchmarks.common import Row

from .passes import Order, Side, serve
from .shapes import SHAPES


class Llama(Side):
    """A GGUF file in a context of its own."""

    def __init__(self, order: Order) -> None:
        self._llama = llama = importlib.import_module("llama_cpp")
        llama.llama_backend_init()
        asked = llama.llama_model_default_params()
        asked.use_extra_bufts = "repack" in order.options
        asked.n_gpu_layers = 0
        asked.use_mmap = "no-mmap" not in order.options
        model = llama.llama_model_load_from_file(order.path.encode(), asked)
        if not model:
            raise MemoryError("llama.cpp does not load the model")
        wanted = llama.llama_context_default_params()
        wanted.n_ctx = order.length
        wanted.n_batch = order.prompt
        wanted.n_ubatch = order.prompt
        wanted.n_threads = wanted.n_threads_batch = order.threads
        self._context = llama.llama_init_from_model(model, wanted)
        if not self._context:
            raise MemoryError("llama.cpp makes no context for the model")

    def begin(self) -> None:
        """See Side."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def step(self, ids: list[int]) -> None:
        """See Side."""
        array = (self._llama.llama_token * len(ids))(*ids)
        status = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(ids)))
        self._llama.llama_synchronize(self._context)
        if status:
            raise RuntimeError(f"llama_decode ended with status {status}")

    def facts(self) -> Row:
        """See Side."""
        return {}


def write(shape: str, mix: str, out: str) -> None:
    """Write a generated model as GGUF."""
    from benchmarks.peers.llama import write_tensors

    from .weights import Weights

    described = SHAPES[shape]
    write_tensors(Weights(described), described.config(), out, mix, described.kinds)


if __name__ == "__main__":
    _, _, what, *arguments = sys.argv
    if what == "write":
        write(*arguments)
    else:
        serve(Llama, Order(**json.loads(arguments[0])))
