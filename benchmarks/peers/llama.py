"""The llama.cpp side: whole models, files of its own format. Runs in an environment that has
llama-cpp-python, gguf and NumPy, and not torch; what it is asked comes from the benchmark's process.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.common import Row

from .ggml import Bytes, Ggml
from .ggml_types import TYPES, GgmlType
from .gguf_layout import GgufTensor, metadata, tensors
from .worker import answer, threads

CONTEXT = 1024
PROMPT = 512
_SLICE = 1 << 24  # weights that are float32 at a time
_g = Ggml()
_models: dict[str, tuple[Any, Any]] = {}


def _spread(kind: GgmlType, matrices: Sequence[npt.NDArray[np.float32]]) -> Iterator[Bytes]:
    """Matrices in a type, row slices on all threads."""
    for matrix in matrices:
        with ThreadPoolExecutor(threads()) as workers:
            parts = np.array_split(matrix, max(1, min(len(matrix), 4 * threads())))
            yield np.concatenate(list(workers.map(lambda part: _g.quantise(part, kind), parts)))


def _floats(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Source(Protocol):
    """Where BF16 tensors come from."""

    def bits(self, name: str) -> npt.NDArray[np.uint16]:
        """A tensor as its bits."""


def _data(tensor: GgufTensor, checkpoint: Source, kinds: int) -> Bytes | npt.NDArray[np.float32]:
    """What the file has of a tensor. Stacked experts repeat after `kinds`: each is converted once."""
    kind = TYPES[tensor.type]
    distinct = tensor.sources[: min(kinds, len(tensor.sources))]
    made: list[Bytes | npt.NDArray[np.float32]] = []
    for source in distinct:
        bits = checkpoint.bits(source)
        if kind.name == "BF16":
            made.append(np.ascontiguousarray(bits).view(np.uint8))
        elif kind.name == "F32":
            made.append(_floats(bits))
        else:
            step = max(1, _SLICE // bits.shape[1])
            parts = [bits[i : i + step] for i in range(0, len(bits), step)]
            made.append(np.concatenate([next(_spread(kind, [_floats(p)])) for p in parts]))
    if len(tensor.sources) == 1:
        one: Bytes | npt.NDArray[np.float32] = made[0]
        return one
    stacked = np.stack(made)
    return np.concatenate([stacked] * -(-len(tensor.sources) // len(made)))[: len(tensor.sources)]


def write_tensors(source: Source, config: Row, out: str, mix: str, kinds: int) -> int:
    """Write tensors as GGUF, the experts of a layer repeating after `kinds`; return the file's bytes."""
    gguf = importlib.import_module("gguf")
    plan = tensors(config, mix)
    part = f"{out}.{os.getpid()}"
    writer = gguf.GGUFWriter(part, "qwen3moe")
    for key, value in metadata(config, CONTEXT).items():
        put = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        (writer.add_string if isinstance(value, str) else put)(key, value)
    for t in plan:
        kind = TYPES[t.type]
        raw = None if kind.name == "F32" else gguf.GGMLQuantizationType(kind.number)
        shape, dtype = (t.shape, np.dtype(np.float32)) if raw is None else (t.byte_shape, np.dtype(np.uint8))
        size = int(np.prod(t.byte_shape)) if raw is not None else 4 * int(np.prod(t.shape))
        writer.add_tensor_info(t.name, shape, dtype, size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in plan:
        writer.write_tensor_data(_data(t, source, kinds))
    writer.close()
    Path(part).replace(out)
    return Path(out).stat().st_size


def open_model(key: str, path: str, repacked: bool) -> dict[str, float]:
    """Load a GGUF file, its weights repacked or as they stand."""
    llama = importlib.import_module("llama_cpp")
    llama.llama_backend_init()
    asked = llama.llama_model_default_params()
    asked.use_extra_bufts = repacked
    asked.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), asked)
    if not model:
        raise ValueError(f"llama.cpp does not load {path}")
    wanted = llama.llama_context_default_params()
    wanted.n_ctx = CONTEXT
    wanted.n_batch = PROMPT
    wanted.n_ubatch = PROMPT
    wanted.n_threads = wanted.n_threads_batch = threads()
    context = llama.llama_init_from_model(model, wanted)
    if not context:
        llama.llama_model_free(model)
        raise ValueError(f"llama.cpp makes no context for {path}")
    _models[key] = model, context
    return {"bytes": float(llama.llama_model_size(model))}


def run_model(key: str, prompt: list[int], steps: int) -> Row:
    """Seconds of a prompt's pass, and of each token after it; and the prompt's last logits' first few."""
    llama = importlib.import_module("llama_cpp")
    context = _models[key][1]
    llama.llama_memory_clear(llama.llama_get_memory(context), True)

    def decode(ids: list[int]) -> float:
        array = (llama.llama_token * len(ids))(*ids)
        began = time.perf_counter()
        status = llama.llama_decode(context, llama.llama_batch_get_one(array, len(ids)))
        llama.llama_synchronize(context)
        seconds = time.perf_counter() - began
        if status:
            raise RuntimeError(f"llama_decode ended with status {status}")
        return seconds

    prefill = decode(prompt)
    logits = list(llama.llama_get_logits_ith(context, -1)[:64])
    return {"prefill": prefill, "decode": [decode([prompt[i % len(prompt)]]) for i in range(steps)], "logits": logits}


def close_model(key: str) -> None:
    """Give its memory back."""
    llama = importlib.import_module("llama_cpp")
    model, context = _models.pop(key)
    llama.llama_free(context)
    llama.llama_model_free(model)


def quantised(path: str, out: str, encoding: str) -> float:
    """Quantise and dequantise experts by importance.

    Args:
        path: .npz of weight float32 [experts, rows, cols] and importance float32 [experts, cols].
        out: .npy of the values that come back, float32.
        encoding: the type.

    Returns:
        bits a weight.
    """
    kind = TYPES[encoding]
    given = np.load(path)
    weight = given["weight"]
    importance = given["importance"]

    def one(e: int) -> npt.NDArray[np.float32]:
        packed = _g.quantise(weight[e], kind, importance[e])
        return _g.dequantise(packed, kind, weight.shape[-1])

    with ThreadPoolExecutor(threads()) as workers:
        np.save(out, np.stack(list(workers.map(one, range(len(weight))))))
    return kind.bits


def versions() -> dict[str, str]:
    """What this side is."""
    llama = importlib.import_module("llama_cpp")
    told = [part.partition("=") for part in llama.llama_print_system_info().decode().replace(":", "|").split("|")]
    flags = ", ".join(name.strip() for name, _, value in told if value.strip() == "1")
    return {"llama-cpp-python": llama.__version__, "llama.cpp, compiled for": flags}


if __name__ == "__main__":
    calls = (
        open_model,
        run_model,
        close_model,
        quantised,
        versions,
    )
    answer({f.__name__: f for f in calls})
