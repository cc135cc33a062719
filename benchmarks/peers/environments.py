"""llama.cpp's own environment, under the user's cache: made once, used again until what is asked for changes.

llama-cpp-python is compiled here, for this processor and without BLAS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .worker import PeerError


@dataclass(frozen=True)
class Peer:
    """Something to install.

    Attributes:
        name: of its environment.
        requirements: what pip is asked for.
        options: pip's, beside those that every install has.
        env: what it is built with.
        imports: the module that must be importable afterwards.
    """

    name: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    imports: str = ""

    def stamp(self) -> dict[str, object]:
        """What an environment that is used again must have been made from."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return {"requirements": list(self.requirements), "env": dict(self.env), "python": version}


LLAMA = Peer(
    "llama-cpp",
    ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy"),
    ("--no-binary", "llama-cpp-python"),
    {"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    imports="llama_cpp",
)
LLAMA_AVX2 = replace(
    LLAMA,
    name="llama-cpp-avx2",
    env={"CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"},
)


def cache() -> Path:
    """Where environments and generated models are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moepack" / "peers"


def _places(peer: Peer, root: Path) -> tuple[Path, Path]:
    return root / peer.name / "bin" / "python", root / peer.name / "installed.json"


def installed(peer: Peer, root: Path) -> Path | None:
    """The interpreter of a peer's environment; None if there is none, or its installation did not come to its end."""
    python, stamp = _places(peer, root)
    whole = python.exists() and stamp.is_file() and json.loads(stamp.read_text()) == peer.stamp()
    return python if whole else None


def environment(peer: Peer, root: Path, install: bool = True) -> Path:
    """The interpreter of a peer's environment, which is made where there is none and `install` says so.

    Raises:
        PeerError: in one line why it cannot be had.
    """
    where = root / peer.name
    if (found := installed(peer, root)) is not None:
        return found
    python, stamp = _places(peer, root)
    if not install:
        raise PeerError(f"{peer.requirements[0]} is not installed: python -m benchmarks.peers --install")
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise PeerError(f"{peer.requirements[0]} is compiled here, and there is no C++ compiler")
    print(f"installing {peer.requirements[0]} into {where} (compiles for many minutes)", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    try:
        venv.create(where, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{where} cannot be made: {error}") from None
    # Without pip's cache: it would hand out what was compiled before, with whatever flags.
    command = [str(python), "-m", "pip", "install", "--no-cache-dir", "--no-input", *peer.options, *peer.requirements]
    _run(command, peer, {**os.environ, **peer.env})
    _run([str(python), "-c", f"import {peer.imports}"], peer, dict(os.environ))
    stamp.write_text(json.dumps(peer.stamp()) + "\n")
    return python


def _run(command: Sequence[str], peer: Peer, env: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{peer.requirements[0]} cannot be had: {reason(done.stdout)}")


def reason(log: str) -> str:
    """The line of a command's output that says best why it failed: the network first, then an error, then the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    offline = ("Temporary failure in name resolution", "Network is unreachable", "Connection refused", "timed out")
    if any(word in line for line in lines for word in offline):
        return "no package index can be reached"
    errors = [line for line in lines if line.startswith(("ERROR:", "error:")) or "Error:" in line]
    return (errors or lines or ["it said nothing"])[-1]
