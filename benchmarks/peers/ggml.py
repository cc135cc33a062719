"""ggml through ctypes, as the llama-cpp-python of this interpreter brings it: quantising, and graphs of experts.

A graph is what llama.cpp builds for a Mixture-of-Experts layer after its router (llama-graph.cpp, build_moe_ffn):
gate, up, SwiGLU, down, weights, sum. Runs in the llama.cpp side's process only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .ggml_types import TYPES, GgmlType

_I32 = 26  # ggml's type of experts' numbers
_P = ctypes.c_void_p
_I = ctypes.c_int
_L = ctypes.c_int64
_Z = ctypes.c_size_t
Bytes = npt.NDArray[np.uint8]
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, ()),  # takes a structure by value: see `_context`
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (_Z, ()),
    "ggml_graph_overhead": (_Z, ()),
    "ggml_new_tensor_2d": (_P, (_P, _I, _L, _L)),
    "ggml_new_tensor_3d": (_P, (_P, _I, _L, _L, _L)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_view_2d": (_P, (_P, _P, _L, _L, _Z, _Z)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_set_input": (None, (_P,)),
    "ggml_set_output": (None, (_P,)),
    "ggml_nbytes": (_Z, (_P,)),
    "ggml_quantize_chunk": (_Z, (_I, _P, _P, _L, _L, _L, _P)),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, (_I,)),
    "ggml_get_type_traits": (_P, (_I,)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _I)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_get_device": (_P, (_P,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_tensor_get": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, (_P, _P)),
    "ggml_gallocr_free": (None, (_P,)),
}


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool)]


class _Traits(ctypes.Structure):
    """The beginning of struct ggml_type_traits."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", _L),
        ("blck_size_interleave", _L),
        ("type_size", _Z),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _P, _P, _L)),
    ]


class Ggml:
    """The functions, by their names without `ggml_`."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ImportError("llama_cpp is not installed here")
        folder = Path(spec.origin).parent / "lib"
        names = ("libggml-base.so", "libggml-cpu.so", "libggml.so")
        libraries = [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in names]
        for name, (result, arguments) in _SIGNATURES.items():
            function = next((getattr(x, name) for x in libraries if hasattr(x, name)), None)
            if function is None:
                raise ImportError(f"{folder}: no library has {name}")
            function.restype = result
            function.argtypes = [_InitParams] if name == "ggml_init" else arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self, tensors: int) -> Any:
        """A context for the descriptions of so many tensors and one graph."""
        size = self.tensor_overhead() * tensors + self.graph_overhead()
        return self.init(_InitParams(size, None, True))

    def quantise(self, weight: npt.NDArray[np.float32], kind: GgmlType, importance: Any = None) -> Bytes:
        """Rows in a type: uint8 [..., bytes of a row].

        Args:
            weight: float32 [..., cols].
            kind: not a plain number's type.
            importance: float32 [cols], how much a column's error counts; None where the type does without.
        """
        weight = np.ascontiguousarray(weight, np.float32)
        cols = weight.shape[-1]
        rows = weight.size // weight.shape[-1]
        out = np.empty((*weight.shape[:-1], kind.row_bytes(cols)), np.uint8)
        counts = None if importance is None else np.ascontiguousarray(importance, np.float32)
        if counts is None and self.quantize_requires_imatrix(kind.number):
            counts = np.ones(cols, np.float32)
        address = None if counts is None else counts.ctypes.data
        self.quantize_chunk(kind.number, weight.ctypes.data, out.ctypes.data, 0, rows, cols, address)
        return out

    def dequantise(self, packed: Bytes, kind: GgmlType, cols: int) -> npt.NDArray[np.float32]:
        """The values of rows, float32 [..., cols]."""
        out = np.empty((*packed.shape[:-1], cols), np.float32)
        traits = ctypes.cast(self.get_type_traits(kind.number), ctypes.POINTER(_Traits)).contents
        if traits.type_size != kind.size or traits.blck_size != kind.block:
            raise ValueError(f"{kind.name}: blocks of {traits.blck_size} in {traits.type_size} bytes, not as foreseen")
        traits.to_float(packed.ctypes.data, out.ctypes.data, out.size)
        return out


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Experts:
    """A layer's experts in one type and layout.

    Args:
        g: the library.
        kind: of all three matrices.
        sizes: hidden, intermediate, how many experts are held, and how many a token uses.
        one: the bytes of one expert's gate, up and down; all experts hold the same, in memory of their own.
        repacked: in the layout that llama.cpp brings weights into when it loads them.

    Raises:
        LookupError: when llama.cpp has no such layout of the type here.
    """

    def __init__(self, g: Ggml, kind: GgmlType, sizes: Sequence[int], one: Sequence[Bytes], repacked: bool) -> None:
        self._g = g
        self._backend = g.backend_cpu_init()
        self._hidden, self._inner, count, self._top_k = sizes
        self._context = g.context(3)
        shapes = [(self._hidden, self._inner), (self._hidden, self._inner), (self._inner, self._hidden)]
        self._weights = [g.new_tensor_3d(self._context, kind.number, *shape, count) for shape in shapes]
        self._buffer = None
        try:
            where = _repack_type(g, self._backend) if repacked else g.backend_cpu_buffer_type()
            self._buffer = g.backend_alloc_ctx_tensors_from_buft(self._context, where)
            if repacked and not self._supported():
                raise LookupError(f"llama.cpp does not repack {kind.name} here")
            for tensor, packed in zip(self._weights, one, strict=True):
                self._fill(tensor, packed, count, whole=repacked)
        except BaseException:
            self.close()
            raise
        self._graphs: dict[int, tuple[Any, ...]] = {}

    def _fill(self, tensor: Any, packed: Bytes, count: int, whole: bool) -> None:
        data = np.ascontiguousarray(packed).reshape(-1)
        if whole:  # repacking takes a tensor at once
            data = np.tile(data, count)
            self._g.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
            return
        for e in range(count):
            self._g.backend_tensor_set(tensor, data.ctypes.data, e * data.nbytes, data.nbytes)

    def _supported(self) -> bool:
        g = self._g
        context = g.context(8)
        try:
            ids = g.new_tensor_2d(context, _I32, self._top_k, 1)
            made = []
            for weight, cols in zip(self._weights, (self._hidden, self._hidden, self._inner), strict=True):
                x = g.new_tensor_3d(context, TYPES["F32"].number, cols, 1, 1)
                made.append(g.mul_mat_id(context, weight, x, ids))
            device = g.backend_get_device(self._backend)
            return all(g.backend_dev_supports_op(device, op) for op in made)
        finally:
            g.free(context)

    def run(self, ids: npt.NDArray[np.int32], x: npt.NDArray[np.float32], threads: int) -> tuple[float, Any]:
        """Seconds of one pass, and its sums, float32 [tokens, hidden].

        Args:
            ids: int32 [tokens, top_k].
            x: float32 [tokens, hidden].
            threads: on which it runs.
        """
        tokens = len(x)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._graph(tokens)
        _, graph, place, chosen, gates, out, _ = self._graphs[tokens]
        g = self._g
        share = np.full(ids.size, 1 / self._top_k, np.float32)
        for tensor, values in ((place, x), (chosen, np.ascontiguousarray(ids, np.int32)), (gates, share)):
            g.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        g.backend_cpu_set_n_threads(self._backend, threads)
        began = time.perf_counter()
        status = g.backend_graph_compute(self._backend, graph)
        seconds = time.perf_counter() - began
        if status:
            raise RuntimeError(f"ggml ended with status {status}")
        result = np.empty((tokens, self._hidden), np.float32)
        g.backend_tensor_get(out, result.ctypes.data, 0, result.nbytes)
        return seconds, result

    def _graph(self, tokens: int) -> tuple[Any, ...]:
        g = self._g
        float32 = TYPES["F32"].number
        context = g.context(16 + 2 * self._top_k)
        x = g.new_tensor_3d(context, float32, self._hidden, 1, tokens)
        ids = g.new_tensor_2d(context, _I32, self._top_k, tokens)
        gates = g.new_tensor_3d(context, float32, 1, self._top_k, tokens)
        for tensor in (x, ids, gates):
            g.set_input(tensor)
        gate, up, down = self._weights
        made = g.swiglu_split(context, g.mul_mat_id(context, gate, x, ids), g.mul_mat_id(context, up, x, ids))
        made = g.mul(context, g.mul_mat_id(context, down, made, ids), gates)
        graph = g.new_graph(context)
        row = 4 * self._hidden
        rows = [g.view_2d(context, made, self._hidden, tokens, row * self._top_k, i * row) for i in range(self._top_k)]
        for one in rows:
            g.build_forward_expand(graph, one)
        out = rows[0]
        for one in rows[1:]:
            out = g.add(context, out, one)
        g.set_output(out)
        g.build_forward_expand(graph, out)
        room = g.gallocr_new(g.backend_cpu_buffer_type())
        if not g.gallocr_alloc_graph(room, graph):
            raise MemoryError(f"no memory for a graph of {tokens} tokens")
        return context, graph, x, ids, gates, out, room

    def close(self) -> None:
        """Give the memory back."""
        for context, *_, room in getattr(self, "_graphs", {}).values():
            self._g.gallocr_free(room)
            self._g.free(context)
        if self._buffer:
            self._g.backend_buffer_free(self._buffer)
        self._g.free(self._context)
        self._graphs = {}
        self._buffer = None


def _repack_type(g: Ggml, backend: Any) -> Any:
    """The buffer type whose tensors are repacked when they are set."""
    device = g.backend_get_device(backend)
    address = g.backend_reg_get_proc_address(g.backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts")
    if address:
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device)
        for i in range(16):
            if not kinds[i]:
                break
            if b"REPACK" in g.backend_buft_name(kinds[i]):
                return kinds[i]
    raise LookupError("this llama.cpp repacks nothing")
