"""The wheel: every module, recipe and document is in it, and it works without the repository. The container's text."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import tomllib
import venv
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import release
from lacking import ABSENT
from support import HELPERS, ROOT, python

from moepack.pack.spec import FORMAT_VERSION
from moepack.shared.version import __version__

pytest.importorskip("setuptools", minversion="77", reason="a wheel is built with it, here without fetching it")


def made(call, source, out, **environment):
    """What a function of setuptools' build backend makes of the sources."""
    code = f"import sys, setuptools.build_meta as b, os; os.chdir(sys.argv[1]); print('MADE', b.{call}(sys.argv[2]))"
    said = python("-c", code, source, out, env={**os.environ, **environment})
    return out / next(line.split()[1] for line in said.splitlines() if line.startswith("MADE"))


def unpack_wheel(work, compiler):
    """The wheel's content, built from a copy of the sources so that nothing is left in the repository."""
    source = work / "source"
    source.mkdir()
    for name in ("moepack", "pack", "quantize", "calibrate", "runtime", "recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    linker = f"{compiler} -shared -s"  # as `make dist`
    with zipfile.ZipFile(made("build_wheel", source, work, CC=compiler, LDSHARED=linker, CFLAGS="-g0")) as archive:
        archive.extractall(work / "unpacked")
    return work / "unpacked"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    work = tmp_path_factory.mktemp("wheel")
    quick = work / "cc"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')  # optimising takes a minute
    quick.chmod(0o755)
    return unpack_wheel(work, shlex.quote(str(quick)))


def test_everything_is_in_the_wheel(unpacked):
    """And nothing else: no tests, no folder of the machine that built it. One wheel is for every Python."""
    (wheel,) = unpacked.parent.glob("*.whl")
    assert release.problems(wheel) == []


def test_the_wheel_serves_without_what_builds_and_tests(unpacked, bundle, tmp_path):
    """Without the repository, the packages of the build extra, or a module that builds; and its recipes are there."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    absent = (*ABSENT, "openai", "pytest")
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
    body = {"prompt": "The history of", "max_tokens": 4}
    answer = release.ask([sys.executable, "-c", code], "/v1/completions", body, cwd=tmp_path)
    assert answer["usage"]["completion_tokens"] == 4


def test_without_a_compiler_it_installs_and_numpy_runs_the_codec(tmp_path):
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


def test_a_clone_imports_itself():
    """The root folders are in `moepack/` by relative links: a clone needs no install to be imported."""
    code = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]  # this environment's own\n"
        f"import moepack; assert moepack.__file__.startswith({str(ROOT)!r}), moepack.__file__\n"
        "from moepack.pack.codec import exponent_fast\n"
        f"assert exponent_fast.__file__.startswith({str(ROOT)!r}), exponent_fast.__file__"
    )
    python("-c", code, cwd=ROOT, env=None)


def test_the_source_distribution_builds_the_same_wheel(unpacked, tmp_path):
    """Links become folders in it: every module stands there once."""
    with tarfile.open(made("build_sdist", unpacked.parent / "source", tmp_path)) as archive:
        members = [m for m in archive.getmembers() if "/moepack/" in m.name]
    assert not any(m.issym() or m.islnk() for m in members)
    found = {m.name.partition("/")[2] for m in members if m.name.endswith((".py", ".c", ".h", ".yaml"))}
    wanted = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.suffix in (".py", ".c", ".h", ".yaml")}
    assert found == wanted


@pytest.mark.parametrize("how", ["installed", "editable"])
def test_a_client_is_checked_strictly(how, unpacked, tmp_path):
    """mypy finds moepack and its types (py.typed) in an environment, and what a client does wrong. torch is not there:
    mypy reads its types for minutes."""
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    if how == "installed":
        shutil.copytree(unpacked, packages, dirs_exist_ok=True)
    else:
        with zipfile.ZipFile(made("build_editable", unpacked.parent / "source", tmp_path, CC="false")) as wheel:
            wheel.extractall(packages)
        assert not list(packages.glob("__editable___*.py")), "an import hook, which no type checker follows"
    shutil.copy(HELPERS / "inputs" / "typed_client.py", tmp_path / "client.py")
    environment = ("--python-executable", tmp_path / "venv" / "bin" / "python")
    said = python("-m", "mypy", "--strict", *environment, "client.py", cwd=tmp_path, env=None)
    assert said.startswith("Success: no issues found in 1 source file")


def test_one_version_everywhere():
    """The newest release in the changelog is this version, and both documents name the format that is written."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\d+\.\d+\.\d+)(?:, not yet released)?\n\nBundles of format (\d+)", changes, re.M)
    assert newest and newest.start() == changes.index("\n## ") + 1, "the first heading is a version, then its format"
    title = re.match(r"# The moepack bundle format, version (\d+)\n", (ROOT / "pack" / "FORMAT.md").read_text())
    assert newest[1] == __version__ and title
    assert int(newest[2]) == int(title[1]) == FORMAT_VERSION


# --- the container: no engine is at hand, so its text is held to what it promises


def stages():
    """The instructions of each stage of the Containerfile."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.M).replace("\\\n", " ")
    out = []
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        out += [[]] if word == "FROM" else []
        out[-1].append((word, rest.strip()))
    return out


def test_the_container_is_slim_and_not_root():
    install, last = stages()
    assert all(stage[0][1].split()[0] == "docker.io/library/python:3.13-slim" for stage in (install, last))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.search(r"moepack\[(\w+)\]", dict(install[-1:])["RUN"])
    assert asked and asked[1] == "serve" and "serve" in extras
    words = " ".join(rest for word, rest in (*install, *last) if word == "RUN")
    assert not re.search(r"apt|gcc|build-essential|--trusted-host|latest", words), "no compiler in either stage"
    assert words.count("--only-binary :all:") == words.count("pip install") == 2
    assert [rest for word, rest in last if word in ("COPY", "ADD")] == ["--from=install /opt/moepack /opt/moepack"]
    made = re.search(r"useradd --uid (\d+)", dict(last)["RUN"])
    assert made and dict(last)["USER"] == made[1] != "0"
    after = [word for word, _ in last][[word for word, _ in last].index("USER") :]
    assert not {"RUN", "COPY", "ADD"} & set(after)
    assert (ROOT / ".dockerignore").read_text().split() == ["*", "!dist/*.whl"]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_health(status, code):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    asked = []
    check = json.loads(dict(stages()[-1])["HEALTHCHECK"].partition("CMD ")[2])
    assert dict(stages()[-1])["EXPOSE"] == "8000" and ":8000/" in check[2]
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code_text = check[2].replace(":8000/", f":{server.server_port}/")
        done = subprocess.run([sys.executable, "-S", "-c", code_text], capture_output=True)
        server.shutdown()
    assert (done.returncode, asked) == (code, ["/health"])
