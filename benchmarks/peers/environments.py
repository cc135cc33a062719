"""llama.cpp's own environment, under the user's cache: made once, used again until what is asked for changes.

llama-cpp-python is compiled here, for this processor and without BLAS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from moepack.pack.user_files import cache_path

from .worker import PeerError

LLAMA = "llama-cpp"
LLAMA_AVX2 = "llama-cpp-avx2"
PROGRAM = "llama-cpp-python==0.3.36"
BESIDE = ("gguf==0.19.0", "numpy")
FLAGS = {  # what it is compiled with, by the name of its environment
    LLAMA: "-DGGML_NATIVE=ON",
    LLAMA_AVX2: "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
}


def cache() -> Path:
    """Where environments are kept, and beside it generated models."""
    found = cache_path("peers")
    if found is None:
        raise PeerError("there is no home directory to keep environments and generated models in")
    return found


def _stamp(name: str) -> dict[str, object]:
    """What an environment that is used again must have been made from."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {
        "requirements": [PROGRAM, *BESIDE],
        "source": "kept",  # older environments have none
        "env": {"CMAKE_ARGS": FLAGS[name]},
        "python": version,
    }


def installed(name: str) -> Path | None:
    """The interpreter of an environment; None if there is none, or its installation did not come to its end."""
    where = cache() / name
    python = where / "bin" / "python"
    stamp = where / "installed.json"
    whole = python.exists() and stamp.is_file() and json.loads(stamp.read_text()) == _stamp(name)
    return python if whole else None


def environment(name: str, install: bool = True) -> Path:
    """The interpreter of an environment, which is made where there is none and `install` says so.

    Raises:
        PeerError: in one line why it cannot be had.
    """
    if (found := installed(name)) is not None:
        return found
    if not install:
        raise PeerError(f"{PROGRAM} is not installed: python -m benchmarks.peers --install")
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise PeerError(f"{PROGRAM} is compiled here, and there is no C++ compiler")
    where = cache() / name
    print(f"installing {PROGRAM} into {where} (compiles for many minutes)", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    try:
        venv.create(where, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{where} cannot be made: {error}") from None
    python = where / "bin" / "python"
    unpacked = _unpacked(python, where / "archive")
    # Without pip's cache: it would hand out what was compiled before, with whatever flags.
    pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--no-input"]
    _run([*pip, str(unpacked), *BESIDE], {**os.environ, "CMAKE_ARGS": FLAGS[name]})
    shutil.move(unpacked / "vendor" / "llama.cpp", source(name))
    shutil.rmtree(where / "archive")
    _run([str(python), "-c", "import llama_cpp"], dict(os.environ))
    (where / "installed.json").write_text(json.dumps(_stamp(name)) + "\n")
    return python


def source(name: str) -> Path:
    """Where llama.cpp's source is in an environment: its converter of checkpoints is in no package."""
    return cache() / name / "source"


def _unpacked(python: Path, into: Path) -> Path:
    """llama-cpp-python's source, unpacked into a folder that there was not."""
    pip = [str(python), "-m", "pip", "download", "--no-input", "--no-deps", "--no-binary", "llama-cpp-python"]
    _run([*pip, "--dest", str(into), PROGRAM], dict(os.environ))
    (archive,) = into.iterdir()
    try:
        with tarfile.open(archive) as file:
            file.extractall(into, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise PeerError(f"{archive} cannot be unpacked: {error}") from None
    archive.unlink()
    (unpacked,) = into.iterdir()
    return unpacked


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{PROGRAM} cannot be had: {reason(done.stdout)}")


def reason(log: str) -> str:
    """The line of a command's output that says best why it failed: the network first, then an error, then the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    offline = ("Temporary failure in name resolution", "Network is unreachable", "Connection refused", "timed out")
    if any(word in line for line in lines for word in offline):
        return "no package index can be reached"
    errors = [line for line in lines if line.startswith(("ERROR:", "error:")) or "Error:" in line]
    return (errors or lines or ["it said nothing"])[-1]
