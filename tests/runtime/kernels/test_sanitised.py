"""Both libraries, built with the address and undefined-behaviour sanitisers, stand their trials at every level.

The sources and the macros are those that an installation compiles. A bad access or an operation without a defined
result ends the child process, whose last lines name the place in the C source.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import ROOT

from moepack.pack import trials

COMPILER = shutil.which("gcc")
# Without the checks of pointers that the address sanitiser makes anyway, compiling takes half of the time.
FLAGS = (
    "-O1", "-g", "-w", "-fPIC", "-shared", "-pthread", "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow", "-fno-sanitize-recover=all",
)  # fmt: skip
TRIALS = """
import ctypes, pathlib, sys
real, made = ctypes.CDLL, pathlib.Path(sys.argv[1])
def opened(name, *args, **more):
    own = made / pathlib.Path(str(name)).name
    return real(str(own if own.exists() else name), *args, **more)
ctypes.CDLL = opened
from moepack.pack.codec import exponent_fast, exponent_native
from moepack.runtime.kernels import affine_native, trial
assert affine_native.library._name == str(made / "_affine.so")
for level in range(affine_native.BEST + 1):
    print(affine_native.LEVELS[affine_native.use_level(level)], trial.trial())
for level in range(exponent_native.BEST + 1):
    print(exponent_native.LEVELS[exponent_native.use_level(level)], exponent_fast.trial())
"""


def runtimes():
    """The sanitisers' libraries that have to be loaded before all others; none where gcc does not bring them."""
    if COMPILER is None:
        return []
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    asked = [[COMPILER, f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in asked]
    return found if all(Path(path).is_absolute() for path in found) else []


@pytest.mark.timeout(1800)  # seconds, nearly all of them gcc's
@pytest.mark.skipif(not runtimes(), reason="gcc and its sanitisers are not here")
def test_the_libraries_do_nothing_undefined(tmp_path):
    """The faults: reads past an extent or an activation, shifts and sums without a defined result."""
    for extension in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]:
        library = tmp_path / f"{extension['name'].rpartition('.')[2]}.so"
        sources = [str(ROOT / source) for source in extension["sources"]]
        digest = f'-DMOEPACK_SOURCES="{trials._digest(Path(sources[0]).parent)}"'
        subprocess.run([str(COMPILER), *FLAGS, digest, *sources, "-o", str(library), "-lm"], check=True)
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(runtimes()), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(ROOT),
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    command = [sys.executable, "-c", TRIALS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 2 and lines[0] == "plain "
    assert all(line.endswith(" ") for line in lines), "no trial finds a difference"
