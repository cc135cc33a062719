"""What pyproject.toml cannot say: the C libraries are none of Python's modules, so one wheel serves every Python 3.

Refuses to install where the links in moepack/ are files: Windows, and archives that keep no links (zip).
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

if not Path(__file__).with_name("moepack").joinpath("pack").is_dir():
    raise SystemExit("moepack/pack is a file, not a link to pack/: clone with git, or use the .tar.gz")


class Libraries(build_ext):
    """Builds shared libraries for ctypes: no name of theirs has a version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """`moepack.pack.codec._exponent` is `moepack/pack/codec/_exponent.so`."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        """Compile with -O3 for x86-64, where these loops are measured, and with -O2 for other processors.

        The compiler is asked what it compiles for, because it may be a cross-compiler (CC).
        """
        command = [*getattr(self.compiler, "compiler_so", ["cc"]), "-dumpmachine"]
        try:
            target = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            target = ""
        for extension in self.extensions:
            files = sorted(Path(extension.sources[0]).parent.glob("*.[ch]"))
            digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
            extension.define_macros.append(("MOEPACK_SOURCES", f'"{digest}"'))  # pack/trials.py compares it
            optimised = "-O3" if target.startswith("x86_64") else "-O2"
            # Nobody reads floating-point exceptions; if they counted, GCC would make no AVX2 loop of a conditional.
            extension.extra_compile_args += [optimised, "-fno-trapping-math"]
        super().build_extensions()


class Wheel(bdist_wheel):
    """Names a wheel by its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """As py3-none-linux_x86_64."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel})
