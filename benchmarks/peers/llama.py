"""The llama.cpp side: whole models, files of its own format. Runs in an environment that has
llama-cpp-python, gguf and NumPy, and not torch; what it is asked comes from the benchmark's process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from benchmarks.common import Row
from benchmarks.limited.cage import counts
from benchmarks.limited.weights import to_float

from .ggml import Bytes, Ggml
from .gguf_layout import GgufTensor, metadata, tensors
from .worker import answer, threads

CONTEXT = 1024
PROMPT = 512
_SLICE = 1 << 24  # weights that are float32 at a time
# A stored sequence of llama.cpp: bytes before its tokens, and what it says of each of them.
_HEAD = 16
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_models: dict[str, Model] = {}
_ggml = cache(Ggml)


def _spread(kind: GGMLQuantizationType, matrices: Sequence[npt.NDArray[np.float32]]) -> Iterator[Bytes]:
    """Matrices in a type, row slices on all threads."""
    for matrix in matrices:
        with ThreadPoolExecutor(threads()) as workers:
            parts = np.array_split(matrix, max(1, min(len(matrix), 4 * threads())))
            yield np.concatenate(list(workers.map(lambda part: _ggml().quantise(part, kind), parts)))


class Source(Protocol):
    """Where BF16 tensors come from."""

    def bits(self, name: str) -> npt.NDArray[np.uint16]:
        """A tensor as its bits."""


def _data(tensor: GgufTensor, checkpoint: Source, kinds: int) -> Bytes | npt.NDArray[np.float32]:
    """What the file has of a tensor. Stacked experts repeat after `kinds`: each is converted once."""
    kind = GGMLQuantizationType[tensor.type]
    distinct = tensor.sources[: min(kinds, len(tensor.sources))]
    made: list[Bytes | npt.NDArray[np.float32]] = []
    for source in distinct:
        bits = checkpoint.bits(source)
        if kind.name == "BF16":
            made.append(np.ascontiguousarray(bits).view(np.uint8))
        elif kind.name == "F32":
            made.append(to_float(bits))
        else:
            step = max(1, _SLICE // bits.shape[1])
            parts = [bits[i : i + step] for i in range(0, len(bits), step)]
            made.append(np.concatenate([next(_spread(kind, [to_float(p)])) for p in parts]))
    if len(tensor.sources) == 1:
        one: Bytes | npt.NDArray[np.float32] = made[0]
        return one
    stacked = np.stack(made)
    return np.concatenate([stacked] * -(-len(tensor.sources) // len(made)))[: len(tensor.sources)]


def write_tensors(source: Source, config: Row, out: str, mix: str, kinds: int) -> int:
    """Write tensors as GGUF, the experts of a layer repeating after `kinds`; return the file's bytes."""
    plan = tensors(config, mix)
    part = f"{out}.{os.getpid()}"
    writer = GGUFWriter(part, "qwen3moe")
    for key, value in metadata(config, CONTEXT).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for t in plan:
        raw = None if t.type == "F32" else GGMLQuantizationType[t.type]
        shape, dtype = (t.shape, np.dtype(np.float32)) if raw is None else (t.byte_shape, np.dtype(np.uint8))
        writer.add_tensor_info(t.name, shape, dtype, int(np.prod(t.byte_shape)), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in plan:
        writer.write_tensor_data(_data(t, source, kinds))
    writer.close()
    Path(part).replace(out)
    return Path(out).stat().st_size


class Model:
    """A GGUF file on the processors, in a context of its own.

    Args:
        path: the file.
        repacked: whether weights are copied into llama.cpp's own layout, or stay as they stand in the mapped file.
        context, batch: tokens of a text, and of a pass.
        flash: whether attention is its fused kernel; None leaves the choice to it.
        kv: the type of the KV cache's keys and values.
        deep: whether `deepen` is asked for, which needs a second sequence in the same cache.
    """

    def __init__(
        self,
        path: str,
        repacked: bool,
        context: int = CONTEXT,
        batch: int = PROMPT,
        flash: bool | None = None,
        kv: str = "F16",
        deep: bool = False,
    ) -> None:
        self._llama = llama = self._bindings()
        llama.llama_backend_init()
        asked = llama.llama_model_default_params()
        wanted = llama.llama_context_default_params()
        self._choose(asked, wanted, repacked, flash)
        asked.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(path.encode(), asked)
        if not self._model:
            raise MemoryError(f"llama.cpp does not load {path}")
        wanted.n_ctx = context
        wanted.n_batch = batch
        wanted.n_ubatch = batch
        wanted.n_threads = wanted.n_threads_batch = threads()
        wanted.type_k = wanted.type_v = GGMLQuantizationType[kv]
        if deep:
            wanted.n_seq_max = 2
            wanted.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, wanted)
        if not self._context:
            llama.llama_model_free(self._model)
            raise MemoryError(f"llama.cpp makes no context for {path}")

    def _bindings(self) -> Any:
        return importlib.import_module("llama_cpp")

    def _choose(self, asked: Any, wanted: Any, repacked: bool, flash: bool | None) -> None:
        """What the program has of its own, in a model's parameters and in a context's."""
        asked.use_extra_bufts = repacked
        asked.use_mmap = True
        wanted.swa_full = False  # layers with a window keep the window, as in llama.cpp's own programs
        if flash is not None:
            wanted.flash_attn_type = int(flash)

    def _batch(self, array: Any) -> Any:
        """What llama_decode is given; it points to the array."""
        return self._llama.llama_batch_get_one(array, len(array))

    def clear(self) -> None:
        """Forget the text so far."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def deepen(self, ids: list[int], depth: int) -> None:
        """Begin a text of `depth` tokens whose keys and values are those of these few, again and again.

        A stored sequence names each token's position, and is put behind what the text has already.
        """
        llama = self._llama
        self.clear()
        self.decode(ids)
        size = llama.llama_state_seq_get_size(self._context, 0)
        stored = (ctypes.c_uint8 * size)()
        if llama.llama_state_seq_get_data(self._context, stored, size, 0) != size:
            raise RuntimeError("llama.cpp does not give its keys and values")
        cells = np.frombuffer(stored, _CELL, len(ids), _HEAD)
        if cells["position"].tolist() != list(range(len(ids))):
            raise RuntimeError("llama.cpp stores a sequence in another way than is known here")
        memory = llama.llama_get_memory(self._context)
        for _ in range(depth // len(ids) - 1):
            cells["position"] += len(ids)
            if llama.llama_state_seq_set_data(self._context, stored, size, 1) != size:
                raise RuntimeError("llama.cpp does not take its keys and values back")
            llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            llama.llama_memory_seq_rm(memory, 1, -1, -1)

    def decode(self, ids: list[int]) -> float:
        """Go on with these tokens, as llama-server does; return the seconds of the pass."""
        array = (self._llama.llama_token * len(ids))(*ids)
        began = time.perf_counter()
        status = self._llama.llama_decode(self._context, self._batch(array))
        self._llama.llama_synchronize(self._context)
        seconds = time.perf_counter() - began
        if status:
            raise RuntimeError(f"llama_decode ended with status {status}")
        return seconds

    def close(self) -> None:
        """Give its memory back."""
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)


def open_model(key: str, path: str, **options: Any) -> None:
    """Load a GGUF file; options are those of Model."""
    _models[key] = Model(path, **options)


def deepen(key: str, ids: list[int], depth: int) -> None:
    """See Model."""
    _models[key].deepen(ids, depth)


def facts(key: str) -> Row:
    """Counts of the process."""
    return counts()


def read(key: str, parts: list[list[int]], afresh: bool) -> list[float]:
    """Seconds of a pass over each part of a text, which goes on, or begins afresh."""
    model = _models[key]
    if afresh:
        model.clear()
    return [model.decode(part) for part in parts]


def close_model(key: str) -> None:
    """Give a model's memory back."""
    _models.pop(key).close()


def quantised(path: str, out: str, encoding: str) -> None:
    """Quantise and dequantise experts by importance.

    Args:
        path: .npz of weight float32 [experts, rows, cols] and importance float32 [experts, cols].
        out: .npy of the values that come back, float32.
        encoding: the type.

    """
    kind = GGMLQuantizationType[encoding]
    given = np.load(path)
    weight = given["weight"]
    importance = given["importance"]

    def one(e: int) -> npt.NDArray[np.float32]:
        packed = _ggml().quantise(weight[e], kind, importance[e])
        return dequantize(packed, kind)

    with ThreadPoolExecutor(threads()) as workers:
        np.save(out, np.stack(list(workers.map(one, range(len(weight))))))


def quantise_file(source: str, out: str, encoding: str) -> None:
    """Write a GGUF file's matrices in one type, all of them."""
    llama = importlib.import_module("llama_cpp")
    asked = llama.llama_model_quantize_default_params()
    asked.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{encoding}")
    asked.pure = True
    asked.nthread = threads()
    if status := llama.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(asked)):
        raise RuntimeError(f"llama_model_quantize ended with status {status}")


def versions() -> dict[str, str]:
    """What this side is."""
    llama = importlib.import_module("llama_cpp")
    told = compiled_for(llama.llama_print_system_info())
    return {"llama-cpp-python": llama.__version__, "llama.cpp, compiled for": told}


def compiled_for(told: bytes) -> str:
    """What a program says that it was compiled for."""
    parts = [part.partition("=") for part in told.decode().replace(":", "|").split("|")]
    return ", ".join(name.strip() for name, _, value in parts if value.strip() == "1")


if __name__ == "__main__":
    calls = (open_model, deepen, read, facts, close_model, quantised, quantise_file, versions)
    answer({f.__name__: f for f in calls})
