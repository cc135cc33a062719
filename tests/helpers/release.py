"""The checks of a release: `release.py check WHEEL` reads its contents, `release.py try WHEEL` uses it (`make dist`).

A trial installs the wheel with its extras `build` and `serve` into a bare environment whose PATH holds no compiler, for
each Python that uv finds, runs examples/demo.py from a copy of examples/, and asks `moepack serve` one question.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LIBRARIES = frozenset(
    f"moepack/{name}.so" for name in ("pack/codec/_exponent", "quantize/_search", "runtime/kernels/_affine")
)
KINDS = (".py", ".md", ".yaml", ".c", ".h", ".html", ".typed")
MOST = 4 << 20  # bytes of a wheel: three times today's; an example, a picture or a bundle in it would be beyond
# Folders that a build runs in: what stands in a library of one machine means nothing on another.
_FOLDERS = re.compile(rb"(?:^|[^\w/.])(/(?:home|root|work|tmp|build|usr/local|opt)/[\w./+-]+)")
# hqq, of Python alone, comes as source; all else must be wheels.
_WHEELS = ("--only-binary", ":all:", "--no-binary", "hqq")
_NATIVE = (
    "from moepack.pack.codec import exponent_fast; import moepack.runtime.kernels.affine_native as a\n"
    "assert exponent_fast.engine_name() != 'NumPy'; print(a.BEST, a.__file__)"
)


def sources() -> set[str]:
    """The files of the package by their names in a wheel, but for the compiled ones."""
    out = set()
    for folder in ("moepack", "pack", "quantize", "calibrate", "runtime", "recipes"):
        inside = "" if folder == "moepack" else "moepack/"
        out |= {f"{inside}{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*") if p.suffix in KINDS}
    return out


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel's contents, a line each."""
    out, expected = [], sources() | LIBRARIES
    if not re.search(r"-py3-none-\w*linux\w*_\w+\.whl$", wheel.name):
        out.append(f"{wheel.name}: is not for every Python of one platform")
    if wheel.stat().st_size > MOST:
        out.append(f"{wheel.name}: {wheel.stat().st_size:,} bytes, more than {MOST:,}")
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
        own = {n for n in names if ".dist-info/" not in n}
        out += [f"{n}: is not in the wheel" for n in sorted(expected - own)]
        out += [f"{n}: does not belong in a wheel" for n in sorted(own - expected)]
        out += [
            f"{n}: leads out of the wheel" for n in sorted(names) if n.startswith("/") or ".." in PurePosixPath(n).parts
        ]
        for name in sorted(own & LIBRARIES):
            found = sorted({m.decode() for m in _FOLDERS.findall(archive.read(name))})
            out += [f"{name}: names {path}" for path in found]
    return out


def check(wheel: Path):
    """Print what is wrong with a wheel, and end with exit code 1 if anything is."""
    found = problems(wheel)
    print(*found, sep="\n", end="\n" * bool(found))
    if found:
        sys.exit(1)
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, contents as expected")


def interpreter(version: str) -> str | None:
    """The path of a Python of this version, as uv finds it on this machine; None if there is none."""
    command = [sys.executable, "-m", "uv", "python", "find", "--no-project", "--no-python-downloads", version]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or None


def ask(command: Sequence[str], path: str, body: dict[str, Any], **options):
    """Start a server of the model `m`, ask it once, and end it as an engine of containers would. Returns the answer."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if found := re.search(r"serving m at (http://\S+:\d+)", line):
                    break
            else:
                raise SystemExit(f"moepack serve ended: {said}")
            data = json.dumps({"model": "m", "ignore_eos": True, **body}).encode()
            request = urllib.request.Request(found[1] + path, data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                made = json.load(answer)
            process.terminate()
            assert process.wait(30) == 0
            return made
        finally:
            process.kill()


def chat(bundle: Path, environment: dict[str, str], work: Path) -> str:
    """Serve a bundle from the environment in `work`, send one chat, and return the answer's text."""
    (work / "chat.jinja").write_text("{{ messages[-1].content }}")  # the example's tokenizer has no template
    command = [str(work / "env/bin/moepack"), "serve", str(bundle), "--name", "m", "--port", "0"]
    command += ["--device-memory", "6MB", "--chat-template", "chat.jinja"]
    body = {"messages": [{"role": "user", "content": "The history of"}], "max_tokens": 8}
    made = ask(command, "/v1/chat/completions", body, env=environment, cwd=work)
    assert made["usage"]["completion_tokens"] == 8, made
    return str(made["choices"][0]["message"]["content"])


def try_on(python: str, wheel: Path) -> str:
    """Install the wheel for one Python where no compiler is, run the demo and the server, and say what was seen."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moepack-dist-") as folder:
        work, uv = Path(folder), (sys.executable, "-m", "uv")
        bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC", "CXX", "VIRTUAL_ENV")}
        bare |= {"PATH": str(work / "env" / "bin"), "PYTHONDONTWRITEBYTECODE": "1"}
        inside = str(work / "env" / "bin" / "python")

        def run(*command: str) -> str:
            done = subprocess.run(command, env=bare, cwd=work, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{python}: {' '.join(command)}\n{done.stdout}{done.stderr}")
            return done.stdout

        run(*uv, "venv", "-q", "--python", python, "env")
        assert not any(shutil.which(name, path=bare["PATH"]) for name in ("cc", "gcc", "clang", "c++", "g++"))
        run(*uv, "pip", "install", "-q", "--python", inside, *_WHEELS, f"moepack[build,serve] @ {wheel.as_uri()}")
        level, where = run(inside, "-c", _NATIVE).split()
        assert where.startswith(str(work)), where
        shutil.copytree(ROOT / "examples", work / "examples")
        shown = run(inside, "examples/demo.py")
        bf16, w2 = (re.search(rf"^\W*{name}\s.*", shown, re.M) for name in ("bf16", "w2"))
        assert bf16 and w2 and "promotions" in shown, shown
        said = chat(work / "demo-output" / "mini-qwen3-moe-bundle", bare, work)
        took = time.monotonic() - began
        version = run(inside, "-c", "import sys, torch; print(sys.version.split()[0], 'torch', torch.__version__)")
    return f"Python {version.strip()}: demo and server ran, kernels at level {level}, answer {said!r}, {took:.0f} s"


def try_all(wheel: Path):
    """Try the wheel on each of PYTHONS that is here, and say of each what happened. Ends with 1 if none was here."""
    tried = 0
    for version in PYTHONS:
        if (python := interpreter(version)) is None:
            print(f"Python {version}: not at hand, not tried", flush=True)
            continue
        print(try_on(python, wheel), flush=True)
        tried += 1
    if not tried:
        sys.exit("no Python was at hand")


if __name__ == "__main__":
    {"check": check, "try": try_all}[sys.argv[1]](Path(sys.argv[2]).resolve())
