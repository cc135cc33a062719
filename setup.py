"""What pyproject.toml cannot say: the C libraries are none of Python's modules, so one wheel serves every Python 3.

Refuses to install where the links in moepack/ are files: Windows, and archives that keep no links (zip).
"""

from __future__ import annotations

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


class Wheel(bdist_wheel):
    """Names a wheel by its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """As py3-none-linux_x86_64."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel})
