"""The table of methods: what follows from it, and that a new quantiser is one function and one line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import ROOT
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.quantize import methods
from moepack.quantize.grid import Quantised
from moepack.quantize.methods import Method, fallbacks, method_for, quantise
from moepack.reports.doctor import quantisers
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify


def sixteenths(weight: Tensor, moments: Tensor | None, versions: Sequence[Version]) -> dict[Version, Quantised]:
    """A quantiser for the test: every scale is a sixteenth, every zero point in the middle."""
    out = {}
    for v in versions:
        groups = -(-weight.shape[-1] // v.group_size)
        scale = torch.full((*weight.shape[:2], groups), 1 / 16, dtype=torch.bfloat16)
        middle = 2 ** (v.bits - 1)
        zero = torch.full(scale.shape, middle << (8 - v.bits), dtype=torch.uint8) if v.zero == "stored" else None
        codes = (weight * 16 + middle).round().clamp(0, 2**v.bits - 1).to(torch.uint8)
        out[v] = Quantised(codes, scale, zero)
    return out


def test_a_new_quantiser_is_one_function_and_one_line(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = "quantize: {method: toy, loss_tokens: 64}\ncalibration: {samples: 4, length: 64}\nversions: [bf16, w3, w1]"
    with pytest.raises(InputError, match="'toy' is not one of"):
        parse_recipe(recipe, "test")
    monkeypatch.setattr(methods, "METHODS", (*methods.METHODS, Method("toy", sixteenths)))
    build(demo_model, tmp_path / "bundle", parse_recipe(recipe, "test"), [text])
    assert verify(tmp_path / "bundle", demo_model) == []
    assert inspect(tmp_path / "bundle")["methods"] == {"bf16": {"none": 64}, "w3": {"toy": 64}, "w1": {"toy": 64}}
    assert quantisers()["toy"] == "ready"


def test_numbers_are_part_of_the_bytes() -> None:
    assert ",".join(methods.numbered()) == "none,gptq,sign,hqq,rtn,gptqmodel"
    assert methods.named() == ("gptq", "hqq", "rtn", "gptqmodel")


def test_entries_refer_to_entries() -> None:
    for entry in methods.METHODS:
        assert methods.get(entry.name) is entry, "names are unique"
        assert entry.one_bit is None or not methods.get(entry.one_bit).named
        assert not any(methods.get(name).needs_moments for name in entry.fallbacks)


def test_what_makes_a_version_and_what_may_replace_it() -> None:
    one, two = Version.of("w1", 64), Version.of("w2", 64)
    assert [method_for(m, one).name for m in ("gptq", "gptqmodel", "hqq", "rtn")] == ["sign", "sign", "hqq", "rtn"]
    assert method_for("gptq", two).name == "gptq"
    assert [m.name for m in fallbacks("gptq", two)] == ["rtn", "hqq"]
    assert [m.name for m in fallbacks("gptq", one)] == ["rtn"] and fallbacks("rtn", two) == ()
    with pytest.raises(ValueError, match="moments"):
        quantise("gptq", torch.ones(1, 1, 64), None, two)
    with pytest.raises(ValueError, match="unknown"):
        quantise("magic", torch.ones(1, 1, 64), None, two)


def test_the_table_imports_nothing_heavy() -> None:
    code = (
        "import sys, moepack.pipeline.recipe, moepack.quantize.methods\n"
        "print(sorted({'torch', 'numpy', 'gptqmodel', 'hqq', 'moepack.quantize.gptq'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_libraries_come_with_the_build_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["build"]
    assert {f"{x.name}>={x.least}" for x in methods.libraries()} <= set(extra)


def test_doctor_says_which_methods_lack_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """By method: its own library, its fallbacks', and what reads text."""
    assert set(quantisers()) == set(methods.named()) and set(quantisers().values()) == {"ready"}
    absent = {"gptqmodel"}
    monkeypatch.setattr("moepack.reports.doctor._installed", lambda name: name not in absent)
    found = quantisers()
    assert found.pop("gptqmodel") == "lacks gptqmodel: pip install 'moepack[build]'"
    assert set(found.values()) == {"ready"}
    absent = {"hqq"}
    found = quantisers()
    assert found["gptq"] == "lacks hqq for experts with few tokens: pip install 'moepack[build]'"
    assert found["hqq"] == "lacks hqq: pip install 'moepack[build]'" and found["rtn"] == "ready"
    absent = {"datasets"}
    assert all(value.startswith("lacks datasets to read text") for value in quantisers().values())
