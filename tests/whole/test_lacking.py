"""moepack where packages are missing that only some of its users have."""

import json
import re
import tomllib

import lacking
import pytest
import torch
from support import HELPERS, ROOT, python, refused

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

EXTRAS = {"lm_eval": "eval", "ray": "ray", "replicas": "ray", "gptqmodel": "gptqmodel", "serve": "serve"}


def found(where, *given, names):
    out = python(HELPERS / "lacking.py", where, *given, *names)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def whole_core(short_model, text, bundle, tmp_path_factory):
    """What the commands give with everything installed, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return lacking.core(tmp_path_factory.mktemp("whole"), str(short_model), str(text), str(bundle))
    finally:
        torch.set_num_threads(threads)


def test_without_any(short_model, text, bundle, tmp_path, whole_core):
    """Where there is nothing but the runtime and the server, and torch is a wheel for CPUs, which brings no Triton: the
    commands give the same, and those that need more end in a line that names the extra. No bundle was loaded there,
    because `attach` imported Triton through the graphs of decode steps."""
    (said,) = found(tmp_path / "all", short_model, text, bundle, names=("all",))
    told = said.pop("refusals")
    assert said == whole_core and said["serve"] in said["generate"] and len(said["made"]) > 3
    code, out, _ = told.pop("doctor")
    (problem,) = json.loads(out)["problems"]
    assert code == 1 and "(ModuleNotFoundError: import of triton" in problem and "pip install 'triton>=" in problem
    assert "llguidance, which is not installed on this server. Run: pip install 'moepack[serve]'" in told.pop("schema")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, result in told.items():
        extra = EXTRAS.get(name, "build")
        refused(result, f"pip install 'moepack[{extra}]'")
        brought = [re.split(r"[>=\[]", one)[0].replace("-", "_") for one in extras[extra]]
        assert any(library in result[2].replace("-", "_") for library in brought), (name, result[2])


def test_without_linux(short_model, text, bundle, tmp_path, whole_core):
    """The commands give the same without the calls, functions and files that Linux has and macOS has not. What a macOS
    lacks beside these, or does otherwise, is not tried."""
    out = python(HELPERS / "without_linux.py", tmp_path / "none", short_model, text, bundle)
    (said,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    refused = said.pop("refused")
    assert said == whole_core
    assert {"/proc/self/maps", "/proc/self/cgroup", "malloc_trim"} <= set(refused), refused
