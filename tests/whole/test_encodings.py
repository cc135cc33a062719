"""A new encoding is one file and a line of the kernels' table: `w6` of docs/extending/encoding.md, built and served."""

import pickle
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import ROOT, python, random_matrix

import moepack
from moepack.pack import encodings
from moepack.pack.encodings import base
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Matrix, Version, encoding_of, version_names
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.quantize import methods, rtn
from moepack.quantize.grid import dequantise as dequantise_batch
from moepack.reports.verify import verify
from moepack.runtime.kernels import forms, reference

MATRICES = (Matrix("gate_up", 34, 130, bias=True), Matrix("down", 20, 64))
KNOWN = ("bf16", "w8", "w4d5", "w4", "t3", "w3d4", "w3", "t2d3", "t2", "w2d3", "w2", "w1d2", "w1")
RECIPE = """
versions: [bf16, w6, w2]
quantize: {method: rtn, group_size: {w6: 32}, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""


def blocks():
    """The Python of the page: the new file, then the line of the kernels' table."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending" / "encoding.md").read_text(), re.DOTALL)


@pytest.fixture
def w6(tmp_path, monkeypatch):
    """The page's new file, in a folder that the encodings are looked for in."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "w6.py").write_text(blocks()[0])
    monkeypatch.setattr(encodings, "__path__", [*encodings.__path__, str(tmp_path / "more")])
    monkeypatch.setattr(base, "KNOWN", encodings.found(encodings.__path__))
    assert [n for n in version_names() if not encoding_of(n).released] == ["bf16", "w8", "w6", *KNOWN[2:]]
    yield Version.of("w6", 64)
    del sys.modules["moepack.pack.encodings.w6"]


@pytest.fixture
def in_table(w6, monkeypatch):
    """The page's line in the kernels' table, too."""
    monkeypatch.setattr(forms, "KERNELS", forms.KERNELS | eval(f"{{{blocks()[1]}}}", vars(forms)))
    return w6


def test_the_table():
    assert tuple(n for n in version_names() if not encoding_of(n).released) == KNOWN
    for e in base.KNOWN:
        made = Version.of(e.name)
        assert bool(made.holds) == (made.released or not e.planes) and sum(made.planes) == (e.bits if e.planes else 0)
        assert Version.read(made.record()) == made
        assert pickle.loads(pickle.dumps(made)) == made and hash(made) == hash(Version.of(e.name))
    assert Version.of("w4", 64) != Version.of("w4", 32)
    with pytest.raises(ValueError, match="does not know this form of w4"):
        Version.read(Version.of("w4").record() | {"bits": 5})
    assert Version.of("w3", 32).record() == {
        "name": "w3", "encoding": "affine", "bits": 3, "group_size": 32, "zero": "stored"
    }  # fmt: skip
    assert Version.of("bf16", 64).group_size == 0
    with pytest.raises(ValueError, match=rf"'w6' is unknown: there are bf16, .*w8, .*{', '.join(KNOWN[3:])}"):
        Version.of("w6")
    with pytest.raises(ValueError, match="w4: groups are of 128, 64, 32, not 48"):
        Version.of("w4", 48)


def test_pack_holds_it(w6):
    """All 64 codes come back, and its weights are scale * (code - zero), by pack's reference and by torch's."""
    values = [random_matrix(m, w6, seed) for seed, m in enumerate(MATRICES)]
    assert set(np.unique(values[0].codes)) == set(range(64))
    extent = w6.encode(MATRICES, values)[0]
    for i, (m, v, got) in enumerate(zip(MATRICES, values, w6.decode(MATRICES, extent), strict=True)):
        assert np.array_equal(got.codes, v.codes) and np.array_equal(got.scale, v.scale)
        assert v.zero is not None and got.zero is not None and np.array_equal(got.zero, v.zero)
        group = np.arange(m.cols) // 64
        scale = (v.scale.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        want = scale[:, group] * (v.codes.astype(np.float64) - v.zero.astype(np.float64)[:, group] / 4)
        assert np.array_equal(got.dequantise(w6).astype(np.float64), want)
        sections = {s.kind: s for s in w6.sections(MATRICES) if s.matrix == i}
        torchs = reference.dequantise(torch.from_numpy(extent), sections, m, w6, torch.float32)
        assert np.array_equal(torchs.numpy().astype(np.float64), want)


def test_a_quantiser_takes_it(w6):
    weight = torch.randn(1, 16, 128, generator=torch.Generator().manual_seed(0))
    error = [float((dequantise_batch(rtn.quantise(weight, v), v) - weight).norm()) for v in (w6, Version.of("w4", 64))]
    assert error[0] < error[1] / 3


def test_a_bundle_holds_it_and_a_cpu_serves_it(
    w6, demo_model, text, tmp_path, request,
    monkeypatch,
):  # fmt: skip
    """From recipe to logits by the page's two changes; without the table's line, a load says what the kernels know."""
    recipe = parse_recipe(RECIPE, "eight")
    assert [(v.name, v.bits, v.group_size) for v in recipe.version_specs()] == [
        ("bf16", 16, 0), ("w6", 6, 32), ("w2", 2, 64),
    ]  # fmt: skip
    build(demo_model, tmp_path / "bundle", recipe, [text])
    assert verify(tmp_path / "bundle") == []
    opened = open_bundle(tmp_path / "bundle")
    assert opened.manifest.version("w6") == Version.of("w6", 32)
    expert = opened.expert("w6", opened.layers[0].index, 3)
    assert len(np.unique(expert.decode()[0].codes)) > 50
    with pytest.raises(
        InputError,
        match=rf"no kernel knows the encoding w6: the kernels know bf16, .*w8, .*{', '.join(KNOWN[3:])}",
    ):
        moepack.load(tmp_path / "bundle", policy="static:w6")

    request.getfixturevalue("in_table")
    logits, ids = {}, torch.arange(40)[None]
    for name in ("bf16", "w6", "w2"):
        model = moepack.load(tmp_path / "bundle", policy=f"static:{name}")
        with torch.no_grad():
            logits[name] = model(ids).logits.float()
        if name == "w6":
            served = model.model.layers[opened.layers[0].index].mlp.experts._moepack.current
            assert served.of.backend == "reference"
            for m, (_, want) in enumerate(expert.numpy().items()):
                assert np.array_equal(served.weight(3, m, torch.float32).numpy(), want)
    error = [float((logits[name] - logits["bf16"]).norm()) for name in ("w6", "w2")]
    assert 0 < error[0] < error[1] / 4, "four bits more: a step of a sixteenth"
    monkeypatch.setattr(base, "KNOWN", tuple(e for e in base.KNOWN if e.name != "w6"))
    with pytest.raises(BundleError, match="not one of bf16, "):
        open_bundle(tmp_path / "bundle")


def test_mixed_versions_are_for_experts_alone(demo_model):
    with pytest.raises(InputError, match="dense: w2d3 is for experts alone"):
        parse_recipe("dense: [w2d3]", "recipe")
    with pytest.raises(InputError, match="dense: t3 is for experts alone: its codes are a trellis"):
        parse_recipe("dense: [t3]", "recipe")
    with pytest.raises(InputError, match=r"group_size.w2d3: 64 is not one of 128"):
        parse_recipe("versions: [w2d3]\nquantize: {group_size: {w2d3: 64}}", "recipe")


@pytest.mark.parametrize(("method", "bits"), [("gptq", 3), ("gptqmodel", 3), ("hqq", 2), ("rtn", 3)])
def test_every_method_gives_down_its_bits(method, bits):
    weight = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(0))
    version, moments = Version.of(f"w{bits - 1}d{bits}"), torch.eye(256)[None].repeat(2, 1, 1)
    made = methods.quantise_all(method, weight, moments, [version], matrix=1)[version]
    assert made.zero is not None and int(made.codes.max()) == 2**bits - 1 and made.scale.shape == (2, 32, 2)
    error = (dequantise_batch(made, version.at(1)) - weight).square().mean()
    assert float(error) < {3: 0.10, 2: 0.5}[bits]


def test_names_of_versions_need_no_numpy():
    code = "import sys; from moepack.pack.spec import Version; Version.of('w4'); print('numpy' in sys.modules)"
    assert python("-c", code) == "False\n"


def test_kernels_refuse_it_by_name(w6):
    known = "no kernel knows the encoding w6"
    with pytest.raises(InputError, match=known):
        forms.make_forms(MATRICES, w6)
    triton = pytest.importorskip("moepack.runtime.kernels.affine_triton")
    from moepack.runtime.kernels.routing_triton import sort

    form = replace(forms.make_forms(MATRICES, Version.of("w4", 64))[0], name="w6", bits=6)
    x, index = torch.zeros(1, 130), torch.zeros(1, 1, dtype=torch.int64)
    table = torch.zeros(1, dtype=torch.int64)
    geometry, *_ = sort(index, table, triton.DECODE.tokens)
    with pytest.raises(InputError, match=known):
        triton.product(MATRICES[0], [form], [0], table, geometry, x, torch.empty(1, 34), triton.DECODE)
