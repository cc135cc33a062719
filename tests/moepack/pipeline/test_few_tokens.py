"""Experts that few calibration tokens reach are counted, and said; and the mixture of texts that a recipe asks for."""

from support import Notes, build_from, tree

import moepack
from moepack.pack.tables import FEW_TOKENS
from moepack.pipeline import build as pipeline
from moepack.pipeline.few_tokens import advice
from moepack.pipeline.recipe import TextSource, parse_recipe
from moepack.reports.inspect import inspect, render

RECIPE = """
versions: [w4]
quantize: {method: rtn, loss_tokens: 64}
calibration: {samples: 6, length: 32, batch_size: 4}
"""


def test_who_stays_short_is_said(short_model, text, tmp_path):
    notes = Notes()
    build_from(RECIPE, short_model, tmp_path / "b", [text], reporter=notes)
    facts = inspect(tmp_path / "b")
    assert facts["calibration_tokens"] == 6 * 32
    # Six windows bring 384 tokens to a layer's 16 experts: most are below what losses need.
    tables = moepack.open(tmp_path / "b").calibration()
    few = sum(int((t.tokens < 256).sum()) for t in tables.layers)
    assert FEW_TOKENS == 256 and few > 16
    said = {"below": 256, "experts": few}
    assert facts["few_tokens"] == said == moepack.open(tmp_path / "b").manifest.provenance["calibration"]["few_tokens"]
    assert any(n.startswith(f"{few} of 32 experts were reached by fewer than 256 tokens") for n in notes.notes)
    assert f"{few} experts had fewer than 256" in str(render(facts).caption)
    assert f"{few} of 32 experts had fewer than 256" in (tmp_path / "b" / "README.md").read_text()


def test_nothing_is_said_where_all_have_enough():
    assert advice({}, 64) == ""
    assert "3 of 1,024 experts" in (said := advice({2: 1, 7: 2}, 1024)) and "layer 7: 2" in said


def test_weights_of_a_recipe_reach_the_windows(short_model, text, evaluation, tmp_path):
    mixed = f"calibration: {{data: [{{source: '{text}', weight: 3}}, '{evaluation}'], samples: 8, length: 32}}"
    recipe = parse_recipe(f"versions: [w4]\nquantize: {{method: rtn, loss_tokens: 64}}\n{mixed}", "x")
    assert recipe.calibration.data == (TextSource(str(text), 3.0), TextSource(str(evaluation), 1.0))
    pipeline.build(short_model, tmp_path / "b", recipe)
    calibration = moepack.open(tmp_path / "b").manifest.provenance["calibration"]
    assert calibration["windows"] == [6, 2] and calibration["sources"] == [text.name, evaluation.name]
    pipeline.build(short_model, tmp_path / "c", recipe, [evaluation])
    assert moepack.open(tmp_path / "c").manifest.provenance["calibration"]["windows"] == [8]
    assert tree(tmp_path / "b") != tree(tmp_path / "c")
