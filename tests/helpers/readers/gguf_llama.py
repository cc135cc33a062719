"""llama.cpp as llama-cpp-python brings it: of this interpreter, or of the benchmarks' own environment."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import environments

GREEDY = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
ids = model.tokenize(b"The history of", add_bos=False)
out = []
for token in model.generate(ids, top_k=1, temp=0.0):
    out.append(token)
    if len(out) == 8:
        break
print(*out)
"""


def packages() -> Path | None:
    """The folder of packages that llama_cpp is in."""
    found = importlib.util.find_spec("llama_cpp")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent.parent
    python = environments.installed(environments.LLAMA)
    place = [] if python is None else python.parent.parent.glob("lib/python*/site-packages/llama_cpp")
    return next((p.parent for p in place), None)


def library(name: str) -> ctypes.CDLL | None:
    """One of its libraries."""
    place = packages()
    return None if place is None else ctypes.CDLL(str(place / "llama_cpp" / "lib" / f"lib{name}.so"))


def llama_python() -> Path | None:
    """An interpreter that imports llama_cpp."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return Path(sys.executable)
    return environments.installed(environments.LLAMA)


def greedy(python: Path, file: Path) -> str:
    """The first eight tokens that llama.cpp's model goes on with."""
    done = subprocess.run([python, "-c", GREEDY, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
