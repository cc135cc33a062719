"""Refuse to install where the links in moepack/ are files: Windows, and archives that keep no links (zip)."""

from pathlib import Path

from setuptools import setup

if not Path(__file__).with_name("moepack").joinpath("pack").is_dir():
    raise SystemExit("moepack/pack is a file, not a link to pack/: clone with git, or use the .tar.gz")
setup()
