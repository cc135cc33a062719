"""Writes a generated model as GGUF: `theirs.py THREADS SHAPE MIX FILE`, in the environment of benchmarks/peers."""

import sys

from benchmarks.peers.llama import write_tensors

from .shapes import SHAPES
from .weights import Weights

if __name__ == "__main__":
    _, _, name, mix, out = sys.argv
    shape = SHAPES[name]
    write_tensors(Weights(shape), shape.config(), out, mix, shape.kinds)
