"""The table of methods: what follows from it, and that a new quantiser is one function and one line."""

import re
import tomllib

import pytest
import torch
from support import ROOT, RTN, build_from, cli, documented, python, refused

from moepack.pack.errors import MissingExtraError
from moepack.pack.spec import Version, lossy
from moepack.quantize import methods
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import fallbacks, method_for, quantise
from moepack.reports.doctor import quantisers
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify

DOCUMENT = (ROOT / "docs" / "extending" / "quantiser.md").read_text()


@pytest.fixture
def absmax(tmp_path, monkeypatch):
    """The documented file, as a module beside the others, and the documented line."""
    documented("quantiser", "moepack.quantize.absmax", tmp_path)
    line = next(x for x in DOCUMENT.splitlines() if x.startswith("Method("))
    entry = eval(line.rstrip(","), {"Method": methods.Method, "in_file": methods.in_file})  # the documentation's own
    monkeypatch.setattr(methods, "METHODS", (*methods.METHODS, entry))


def test_a_new_quantiser_is_one_file_and_one_line(short_model, text, tmp_path, absmax):
    """Word by word as docs/extending/quantiser.md has it."""
    (recipe,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    recipe = recipe.replace("[bf16, w4, w2]", "[bf16, w4, w1]")
    build_from(recipe, short_model, tmp_path / "bundle", [text])
    assert verify(tmp_path / "bundle", short_model) == []
    facts = inspect(tmp_path / "bundle")
    assert facts["methods"] == {"bf16": {"none": 32}, "w4": {"absmax": 32}, "w1": {"absmax": 32}}
    assert 0 < facts["loss"]["w4"] < 0.05 < facts["loss"]["w1"] and quantisers()["absmax"] == "ready"
    weight = torch.randn(2, 4, 130, generator=torch.Generator().manual_seed(0))
    version = Version.of("w4", 64)
    made = quantise("absmax", weight, None, version)
    step = made.scale.float()[..., torch.arange(130) // 64]
    assert bool(((dequantise(made, version) - weight).abs() <= 0.54 * step).all()), "half a step, and BF16's rounding"


def test_numbers_are_part_of_the_bytes():
    assert ",".join(methods.numbered()) == "none,gptq,sign,hqq,rtn,gptqmodel,trellis"
    assert methods.named() == ("gptq", "hqq", "rtn", "gptqmodel")


def test_what_makes_a_version_and_what_may_replace_it():
    one, two = Version.of("w1", 64), Version.of("w2", 64)
    assert [method_for(m, one).name for m in ("gptq", "gptqmodel", "hqq", "rtn")] == ["sign", "sign", "hqq", "rtn"]
    assert method_for("gptq", two).name == "gptq"
    assert [m.name for m in fallbacks("gptq", two)] == ["rtn", "hqq"]
    assert [m.name for m in fallbacks("gptq", one)] == ["rtn"] and fallbacks("rtn", two) == ()
    with pytest.raises(ValueError, match="moments"):
        quantise("gptq", torch.ones(1, 1, 64), None, two)
    with pytest.raises(ValueError, match="unknown"):
        quantise("magic", torch.ones(1, 1, 64), None, two)


def test_the_table_imports_nothing_heavy():
    code = (
        "import sys, moepack.pipeline.recipe, moepack.quantize.methods\n"
        "print(sorted({'torch', 'numpy', 'gptqmodel', 'hqq', 'moepack.quantize.gptq'} & set(sys.modules)))"
    )
    assert python("-c", code).strip() == "[]"


def test_libraries_come_with_the_extra_that_they_name():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [x.name for x in methods.libraries() if f"{x.name}>={x.least}" not in extras[x.extra]] == []
    assert "moepack[build]" in extras["gptqmodel"] and len(methods.libraries()) == 2


def test_doctor_says_which_methods_lack_what(monkeypatch):
    """By method: its own library, its fallbacks', and what reads text."""
    assert set(quantisers()) == set(methods.named()) and set(quantisers().values()) == {"ready"}
    absent = {"gptqmodel"}
    monkeypatch.setattr("moepack.reports.doctor.installed", lambda name: name not in absent)
    found = quantisers()
    assert found.pop("gptqmodel") == "lacks gptqmodel: pip install 'moepack[gptqmodel]'"
    assert set(found.values()) == {"ready"}
    absent = {"hqq"}
    found = quantisers()
    assert found["gptq"] == "lacks hqq for experts with few tokens: pip install 'moepack[build]'"
    assert found["hqq"] == "lacks hqq: pip install 'moepack[build]'" and found["rtn"] == "ready"
    absent = {"datasets"}
    assert all(value.startswith("lacks datasets to read data sets") for value in quantisers().values())


def test_a_missing_library_is_named_before_calibration(monkeypatch, short_model, text, tmp_path):
    """hqq may be asked for the first expert with few tokens, after hours of calibration; no one-bit version asks it."""
    monkeypatch.setattr(methods, "installed", lambda name: None)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RTN.replace("rtn", "gptq"))
    asked = ("build", short_model, "-o", tmp_path / "out", "--work", tmp_path / "work", "--recipe", recipe, "-q")
    refused(cli(*asked, "--calibration", text), "hqq is not installed", "pip install 'moepack[build]'")
    assert not (tmp_path / "work" / "calibrate").exists()
    w1, w2, native = (Version.of(name, 32) for name in ("w1", "w2", "bf16"))
    methods.check_libraries("gptq", [w1])
    methods.check_libraries("rtn", [w1, w2])
    for name, library in (("gptq", "hqq"), ("hqq", "hqq"), ("gptqmodel", "gptqmodel")):
        with pytest.raises(MissingExtraError, match=f"^{library} "):
            methods.check_libraries(name, lossy([native, w2]))
