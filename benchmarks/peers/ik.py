"""The ik_llama.cpp side: whole models, in files that llama.cpp reads as well or in types of its own.

Runs in an environment that has ik-llama-cpp-python, gguf and NumPy, and not torch. Its defaults have attention, a
gate with its up projection and the sum over experts each in one kernel.
"""

import ctypes
import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

from .llama import Model, close_model, compiled_for, read
from .llama import _models as models
from .worker import answer, threads


def _bindings() -> Any:
    """The package's bindings, with functions that it leaves out, one of them under llama.cpp's name."""
    found = importlib.import_module("ik_llama_cpp._ctypes_api")
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    left_out: dict[str, tuple[Any, list[Any]]] = {
        "llama_batch_get_one": (found.llama_batch, [pointer, number, number, number]),
        "llama_synchronize": (None, [pointer]),
        "llama_print_system_info": (ctypes.c_char_p, []),
    }
    for name, (result, arguments) in left_out.items():
        function = getattr(found._lib, name)
        function.restype = result
        function.argtypes = arguments
        setattr(found, name, function)
    found.llama_model_free = found.llama_free_model  # type: ignore[attr-defined]
    return found


class IkModel(Model):
    """A GGUF file on the processors. `repacked`: with --run-time-repack, --merge-qkv and --merge-up-gate-experts."""

    _at = 0  # tokens of the text so far

    def _bindings(self) -> Any:
        return _bindings()

    def _choose(self, asked: Any, wanted: Any, repacked: bool, flash: bool | None) -> None:
        asked.repack_tensors = asked.merge_qkv = asked.merge_up_gate_exps = repacked
        asked.use_mmap = not repacked
        if flash is not None:
            asked.flash_attn = wanted.flash_attn = flash

    def _batch(self, array: Any) -> Any:
        batch = self._llama.llama_batch_get_one(array, len(array), self._at, 0)
        self._at += len(array)
        return batch

    def clear(self) -> None:
        """See Model."""
        self._llama.llama_kv_cache_clear(self._context)
        self._at = 0


def open_model(key: str, path: str, **options: Any) -> None:
    """Load a GGUF file; options are those of Model."""
    models[key] = IkModel(path, **options)


def quantise_file(source: str, out: str, encoding: str) -> None:
    """Write a GGUF file in one of its own mixes; `source` may be quantised already."""
    package = Path(str(importlib.import_module("ik_llama_cpp").__file__)).parent
    program = str(package / "bin" / "llama-quantize")
    part = f"{out}.partial"
    command = [program, "--allow-requantize", "--ignore-imatrix-rules", source, part, encoding, str(threads())]
    env = {**os.environ, "LD_LIBRARY_PATH": str(package / "lib")}  # where the program does not look by itself
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"llama-quantize ended with status {done.returncode}")
    Path(part).rename(out)


def versions() -> dict[str, str]:
    """What this side is."""
    version = importlib.import_module("ik_llama_cpp").__version__
    told = compiled_for(_bindings().llama_print_system_info())
    return {"ik-llama-cpp-python": version, "ik_llama.cpp, compiled for": told}


if __name__ == "__main__":
    answer({f.__name__: f for f in (open_model, read, close_model, quantise_file, versions)})
