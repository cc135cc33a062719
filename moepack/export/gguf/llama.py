"""llama.cpp's own quantiser and dequantisers, as an installed llama-cpp-python brings them. No weights are chosen here.

It quantises in a process of its own: one that can be interrupted, and whose end by an assertion is an error here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.processors import processors
from moepack.shared.progress import Reporter

MIXES = {
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
}  # llama.h's llama_ftype
_BUFFER = 1 << 30  # bytes of tensors' rows that it holds at once
_CODE = f"""
import ctypes, sys
# It ends with the export (Linux): left alone it would write among a later one's files.
getattr(ctypes.CDLL(None), "prctl", print)(1, 9)
import llama_cpp
source, target, mix, threads, split = sys.argv[1:]
log = llama_cpp.llama_log_callback(lambda level, text, _: print(text.decode(errors="replace"), end="", flush=True))
llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
how = llama_cpp.llama_model_quantize_default_params()
how.ftype, how.nthread, how.keep_split = int(mix), int(threads), split == "split"
if hasattr(how, "max_buf_size"):
    how.max_buf_size = {_BUFFER}
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(how)))
"""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor of a file: ggml's name of its type, as q4_K, and its bytes."""

    name: str
    type: str
    data: npt.NDArray[np.uint8]


class Llama:
    """The installed llama.cpp. Raises InputError where there is none."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise InputError("--lossy: llama.cpp quantises, and is not here. Run: pip install llama-cpp-python")
        self._folder = Path(spec.origin).parent / "lib"

    @cached_property
    def _base(self) -> ctypes.CDLL:
        suffix = "dylib" if sys.platform == "darwin" else "so"
        base = ctypes.CDLL(str(self._folder / f"libggml-base.{suffix}"))
        pointer = ctypes.c_void_p
        number = ctypes.c_int64
        for name, result, arguments in (
            ("gguf_init_from_file", pointer, (ctypes.c_char_p, _InitParams)),
            ("gguf_free", None, (pointer,)),
            ("gguf_get_n_tensors", number, (pointer,)),
            ("gguf_get_data_offset", ctypes.c_size_t, (pointer,)),
            ("gguf_get_tensor_name", ctypes.c_char_p, (pointer, number)),
            ("gguf_get_tensor_offset", ctypes.c_size_t, (pointer, number)),
            ("gguf_get_tensor_size", ctypes.c_size_t, (pointer, number)),
            ("gguf_get_tensor_type", ctypes.c_int, (pointer, number)),
            ("ggml_type_name", ctypes.c_char_p, (ctypes.c_int,)),
        ):
            function = getattr(base, name)
            function.restype = result
            function.argtypes = arguments
        return base

    def quantise(self, source: Path, target: Path, mix: str, split: bool, reporter: Reporter) -> None:
        """Quantise a file, or all files of a split model of which `source` is the first, into as many.

        `target` is the file, or the beginning of the files' names. Raises InputError in llama.cpp's words; OSError
        where it could not write, or was ended from without: after that it may go well another time.
        """
        threads = processors()
        command = [sys.executable, "-c", _CODE, str(source), str(target), str(MIXES[mix]), str(threads)]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        said = [""]
        total = 0
        with subprocess.Popen(
            [*command, "split" if split else ""], env=path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    said = [*said[-8:], line.strip()]
                    if found := re.match(r"\[\s*\d+/\s*(\d+)\]\s+(\S+)", line):
                        if not total:
                            total = int(found[1])
                            reporter.stage(f"quantise to {mix}", total)
                        reporter.step(found[2])
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            why = next((t for t in reversed(said) if "fail" in t or "error" in t.lower()), said[-1])
            if process.returncode < 0 and process.returncode != -signal.SIGABRT:  # which an assertion raises
                raise OSError(f"llama.cpp was ended by {signal.Signals(-process.returncode).name}: is memory short?")
            if "iostream" in why:  # all that it says of a full disk
                raise OSError(f"llama.cpp says: {why}: is the disk full?")
            raise InputError(
                f"--lossy {mix}: llama.cpp cannot quantise this model: {why or f'status {process.returncode}'}"
            )

    def tensors(self, path: Path) -> Iterator[Blocks]:
        """The tensors of a file, mapped."""
        base = self._base
        file = base.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
        if not file:
            raise InputError(f"{path}: llama.cpp cannot read the file that it wrote")
        try:
            begin = base.gguf_get_data_offset(file)
            mapped = np.memmap(path, np.uint8, "r")
            for i in range(base.gguf_get_n_tensors(file)):
                at = begin + base.gguf_get_tensor_offset(file, i)
                size = base.gguf_get_tensor_size(file, i)
                kind = base.ggml_type_name(base.gguf_get_tensor_type(file, i)).decode()
                yield Blocks(base.gguf_get_tensor_name(file, i).decode(), kind, mapped[at : at + size])
        finally:
            base.gguf_free(file)

    def dequantise(self, kind: str, data: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.float32]:
        """The values of whole rows, `count` of them, float32."""
        if kind == "bf16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if kind == "f16":
            return data.view(np.float16).astype(np.float32)
        out = np.empty(count, np.float32)
        data = np.ascontiguousarray(data)
        function = getattr(self._base, f"dequantize_row_{kind}")
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function.restype = None
        function(data.ctypes.data, out.ctypes.data, count)
        return out


class _InitParams(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))
