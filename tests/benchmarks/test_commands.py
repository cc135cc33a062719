"""Every documented benchmark exists and runs in its quick form before a commit."""

import importlib.util
import re

import pytest
from support import ROOT

from moepack.pack.spec import KNOWN

DRAWS = {"draw"}  # measures nothing: tests/docs/test_documents.py runs it


def commands(text):
    """The benchmarks that a text names as commands."""
    return set(re.findall(r"python -m benchmarks\.([a-z_]+)", text)) - DRAWS


def test_documented_benchmarks_exist_and_run_with_everything():
    """Those of any page, which the table of docs/benchmarks.md lists: by `make benchmarks-quick`, or by the suite."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documented = set().union(*(commands(page.read_text()) for page in pages if page.name != "CHANGELOG.md"))
    table = (ROOT / "docs" / "benchmarks.md").read_text().split("## Every command")[1]
    loop = re.findall(r"^NAMES \?= ([a-z_\s\\]+?)\n\S", (ROOT / "Makefile").read_text(), re.M)[0]
    suite = "".join((ROOT / "tests" / "benchmarks" / f"test_{name}.py").read_text() for name in ("gpu", "gpu_day"))
    run = set(re.findall(r"[a-z_]+", loop)) | set(re.findall(r'"benchmarks\.([a-z_]+)",\s+"--quick"', suite))
    assert documented == run == commands(table)
    for name in run:
        spec = importlib.util.find_spec(f"benchmarks.{name}")
        assert spec is not None and spec.origin is not None, name
        assert not spec.submodule_search_locations or importlib.util.find_spec(f"benchmarks.{name}.__main__"), name


def test_bits_of_released_formats_follow_their_formulas():
    """Each formula of docs/formats.md gives what the encoding's sections take."""
    from benchmarks.tables.formats import COLS, FORMATS, bits, formats

    for version, group, _, formula in FORMATS:
        assert bits(version, group) == pytest.approx(eval(formula, {"c": COLS}), rel=1e-9), version
    assert {v for v, *_ in FORMATS} == {v.name for v in KNOWN if v.released}
    shown = [row.strip("| ").split(" | ")[-2] for row in formats().split("\n")[2:]]
    assert dict(zip([f"{v} {g}" for v, g, *_ in FORMATS], shown, strict=True)) == {
        "mxfp4 32": "4.25", "nvfp4 16": "4.5005", "mxfp8 32": "8.25", "fp8 128": "8.0156", "fp8 32": "8.0625",
        "fp8row 0": "8.0078", "int4 32": "4.5", "int4fp16 128": "4.1875", "int8 128": "8.125",
        "int8fp16 128": "8.1875",
    }  # fmt: skip
