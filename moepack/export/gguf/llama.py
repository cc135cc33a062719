"""llama.cpp's own quantiser, as an installed llama-cpp-python brings it. No weights are chosen here.

It quantises in a process of its own: one that can be interrupted, and whose end by an assertion is an error here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

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


def check_llama() -> None:
    """Raise InputError where llama-cpp-python is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise InputError("--lossy: llama.cpp quantises, and is not here. Run: pip install llama-cpp-python")


def quantise(source: Path, target: Path, mix: str, split: bool, reporter: Reporter) -> None:
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
