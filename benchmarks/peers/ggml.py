"""ggml's quantisers through ctypes, as the llama-cpp-python of this interpreter brings them.

Runs in the llama.cpp side's process only.
"""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

_P = ctypes.c_void_p
_I = ctypes.c_int
_L = ctypes.c_int64
_Z = ctypes.c_size_t
Bytes = npt.NDArray[np.uint8]
_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "ggml_quantize_chunk": (_Z, (_I, _P, _P, _L, _L, _L, _P)),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, (_I,)),
}


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
            function.argtypes = arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def quantise(
        self,
        weight: npt.NDArray[np.float32],
        kind: GGMLQuantizationType,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> Bytes:
        """Rows in a type: uint8 [..., bytes of a row].

        Args:
            weight: float32 [..., cols].
            kind: not a plain number's type.
            importance: float32 [cols], how much a column's error counts; None where the type does without.
        """
        weight = np.ascontiguousarray(weight, np.float32)
        cols = weight.shape[-1]
        rows = weight.size // weight.shape[-1]
        out = np.empty(quant_shape_to_byte_shape(weight.shape, kind), np.uint8)
        counts = None if importance is None else np.ascontiguousarray(importance, np.float32)
        if counts is None and self.quantize_requires_imatrix(kind):
            counts = np.ones(cols, np.float32)
        address = None if counts is None else counts.ctypes.data
        self.quantize_chunk(kind, weight.ctypes.data, out.ctypes.data, 0, rows, cols, address)
        return out
