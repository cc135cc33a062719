"""The wheel: every module, recipe and document is in it, and it works without the repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
from support import ROOT, python


def made(call: str, source: Path, out: Path, **environment: str) -> Path:
    """What a function of setuptools' build backend makes of the sources."""
    code = f"import sys, setuptools.build_meta as b, os; os.chdir(sys.argv[1]); print('MADE', b.{call}(sys.argv[2]))"
    said = python("-c", code, source, out, env={**os.environ, **environment})
    return out / next(line.split()[1] for line in said.splitlines() if line.startswith("MADE"))


def unpack_wheel(work: Path, compiler: str) -> Path:
    """The wheel's content, built from a copy of the sources so that nothing is left in the repository."""
    source = work / "source"
    source.mkdir()
    for name in ("moepack", "pack", "quantize", "calibrate", "runtime", "recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    with zipfile.ZipFile(made("build_wheel", source, work, CC=compiler)) as archive:
        archive.extractall(work / "unpacked")
    return work / "unpacked"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    quick = work / "cc"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')  # optimising takes a minute
    quick.chmod(0o755)
    return unpack_wheel(work, shlex.quote(str(quick)))


def test_everything_is_in_the_wheel(unpacked: Path) -> None:
    expected = set()
    for folder in ("moepack", "pack", "quantize", "calibrate", "runtime", "recipes"):
        kinds = (".py", ".md", ".yaml", ".c", ".h", ".html", ".typed")
        files = [p for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
        inside = "" if folder == "moepack" else "moepack/"
        expected |= {f"{inside}{p.relative_to(ROOT)}" for p in files}
    found = {str(p.relative_to(unpacked)) for p in (unpacked / "moepack").rglob("*") if p.is_file()}
    compiled = {f for f in found if f.endswith(".so")}
    assert {f.split(".")[0] for f in compiled} == {"moepack/pack/codec/_exponent", "moepack/runtime/kernels/_affine"}
    assert found - compiled == expected


def test_the_wheel_serves_without_what_builds_and_tests(unpacked: Path, bundle: Path, tmp_path: Path) -> None:
    """Without the repository, the packages of the build extra, or a module that builds; and its recipes are there."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    absent = ("gptqmodel", "hqq", "datasets", "matplotlib", "pytest", "openai", "ray", "scipy")
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        f"sys.path.insert(0, {str(unpacked)!r})\n"
        "from moepack.cli import main\n"
        f"import moepack; assert moepack.__file__.startswith({str(unpacked)!r})\n"
        f"sys.argv = ['moepack', 'serve', {str(bundle)!r}, '--name', 'm', '--port', '0', '--device-memory', '5MB']\n"
        "try: main()\n"
        "finally:\n"
        "    assert not [m for m in sys.modules if m.startswith(('moepack.quantize', 'moepack.calibrate'))]\n"
        "    from moepack.pipeline.recipe import load_recipe; load_recipe('default')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving m at http://127.0.0.1:(\d+)", line):
                break
        else:
            pytest.fail(said)
        body = json.dumps({"model": "m", "prompt": "The history of", "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{found[1]}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_without_a_compiler_it_installs_and_numpy_runs_the_codec(tmp_path: Path) -> None:
    unpacked = unpack_wheel(tmp_path, compiler="false")
    assert not list(unpacked.rglob("*.so"))
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r})\n"
        "import numpy as np\n"
        "from moepack.pack.codec import exponent, exponent_fast\n"
        "bits = np.arange(9000).astype(np.uint16)\n"
        "assert np.array_equal(exponent_fast.encode(bits), exponent.encode(bits))\n"
        "assert np.array_equal(exponent_fast.decode(exponent_fast.encode(bits), 9000), bits)\n"
        "print(exponent_fast.__file__.startswith(sys.path[0]), exponent_fast.engine_name())"
    )
    assert python("-c", code, cwd=tmp_path, env=None).split() == ["True", "NumPy"]


def test_a_clone_imports_itself() -> None:
    """The root folders are in `moepack/` by relative links: a clone needs no install to be imported."""
    code = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]  # this environment's own\n"
        f"import moepack; assert moepack.__file__.startswith({str(ROOT)!r}), moepack.__file__\n"
        "from moepack.pack.codec import exponent_fast\n"
        f"assert exponent_fast.__file__.startswith({str(ROOT)!r}), exponent_fast.__file__"
    )
    python("-c", code, cwd=ROOT, env=None)


def test_the_source_distribution_builds_the_same_wheel(unpacked: Path, tmp_path: Path) -> None:
    """Links become folders in it: every module stands there once."""
    with tarfile.open(made("build_sdist", unpacked.parent / "source", tmp_path)) as archive:
        members = [m for m in archive.getmembers() if "/moepack/" in m.name]
    assert not any(m.issym() or m.islnk() for m in members)
    found = {m.name.partition("/")[2] for m in members if m.name.endswith((".py", ".c", ".h", ".yaml"))}
    wanted = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.suffix in (".py", ".c", ".h", ".yaml")}
    assert found == wanted
