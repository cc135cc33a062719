"""Recipes: shipped ones are valid and for models that exist, unknown keys are named with the nearest known one."""

import contextlib
import re
from dataclasses import replace

import pytest
from support import Notes

from moepack.pack.errors import InputError, MoepackError
from moepack.pack.spec import Version
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.recipe import load_recipe, parse_recipe, shipped, with_native, with_text, with_versions

EXPECTED = shipped()


@pytest.mark.parametrize("name", EXPECTED)
def test_shipped_recipes_are_valid(name):
    recipe = load_recipe(name)
    assert recipe.calibration.data and recipe.text
    fp8 = Version.of("fp8", 128)
    made = with_native(recipe, fp8, fp8) if "native" in recipe.versions else recipe
    assert [v.name for v in made.version_specs()] == list(made.versions)


_SIZES = re.compile(
    r"(\d+) layers of (\d+) experts, top-(\d+).*?hidden (\d+), expert (\d+).*?([\d,]+) GB of experts in BF16", re.S
)


@pytest.mark.parametrize("name", [n for n in EXPECTED if n not in ("default", "exportable", "trellis")])
def test_what_recipes_say_of_their_model(name):
    """Bytes are three matrices of every expert, and a token's experts are few; the text brings an expert several tokens
    a column of its widest matrix."""
    recipe = load_recipe(name)
    comment = re.sub(r"\n# ?", " ", recipe.text)
    found = _SIZES.search(comment)
    assert found, comment
    layers, experts, top_k, hidden, inner, size = (int(x.replace(",", "")) for x in found.groups())
    assert size == round(layers * experts * 3 * hidden * inner * 2 / 1e9)
    tokens = recipe.calibration.samples * recipe.calibration.length * top_k / experts
    assert tokens >= 4 * max(hidden, inner), tokens


def test_what_a_recipe_leaves_out():
    """Is exportable's, but for zeros; layers for multi-token prediction are dropped."""
    exportable, empty = load_recipe("exportable"), parse_recipe("", "x")
    assert (exportable.versions, replace(exportable.quantize, zeros="fractional")) == (empty.versions, empty.quantize)
    assert exportable.calibration.samples == empty.calibration.samples and exportable.allocation is None
    assert (parse_recipe("", "x").mtp, parse_recipe("mtp: keep", "x").mtp) == ("drop", "keep")
    assert {n for n in EXPECTED if "mtp:" in load_recipe(n).text} == {"deepseek-v3", "glm-4.5-air"}


def test_group_sizes_by_version():
    recipe = parse_recipe("quantize: {group_size: {w4: 128, w1: 32}}\nversions: [w1, bf16, w4, w2]", "x")
    found = [f"{v.name} {v.group_size}" for v in recipe.version_specs()]
    assert found == ["bf16 0", "w4 128", "w2 64", "w1 32"]


@pytest.mark.parametrize(
    ("text", "unused"),
    [
        ("versions: [bf16, w4d5]\nquantize: {group_size: 64}", "64"),
        ("versions: [native]\nquantize: {group_size: 32}", "32"),
        ("versions: [w4]\nquantize: {group_size: {w4: 32, w3: 32, w2: 64}}", "w3: 32, w2: 64"),
        ("versions: [w4d5, w4]\nquantize: {group_size: 64}", None),
        ("versions: [w4d5]\ndense: [w8]\nquantize: {group_size: {w8: 32}}", None),
        ("versions: [w4d5]", None),
    ],
)
def test_group_sizes_that_no_version_takes_are_said(text, unused, tmp_path):
    notes = Notes()
    with contextlib.suppress(MoepackError):  # no model is there
        estimate(tmp_path / "none", tmp_path / "b", parse_recipe(text, "x"), reporter=notes)
    said = f"quantize.group_size: no version of the recipe takes {unused}: leave it out, or add one later"
    assert notes.notes == ([said] if unused else [])


def test_a_version_of_one_group_size_leaves_others_theirs():
    """A mixed version has groups of 128 alone: versions that are added later have the recipe's groups all the same."""
    for text, before in (("{group_size: 32}", ("bf16", "w4")), ("{}", ("bf16",))):
        recipe = parse_recipe(f"versions: [{', '.join(before)}]\nquantize: {text}", "x")
        made = with_versions(recipe, [*recipe.version_specs(), Version.of("w2d3")], ())
        assert made.quantize == recipe.quantize and made.quantize.size("w2d3") == 128


@pytest.mark.parametrize(
    "said",
    ["", "mtp: keep", "quantize: {group_size: {w4: 128}}", "calibration: {data: [a.txt, {source: b, weight: 3}]}",
     "allocation: {average_bits: 7, dense: true}\ndense: [w8]"],
)  # fmt: skip
def test_a_recipe_without_its_text_has_one_written(said):
    recipe = parse_recipe(said, "x")
    assert with_text(recipe) is recipe
    for lost in ("", "versions: [w1]"):
        made = with_text(replace(recipe, text=lost))
        assert replace(made, text=said) == recipe and parse_recipe(made.text, "x") == made
    with pytest.raises(InputError, match="samples"):
        with_text(replace(recipe, calibration=replace(recipe.calibration, samples=0)))


BAD = {
    "versons: [w4]": "unknown key 'versons': did you mean 'versions'?",
    "quantize: {zzzz: 1}": "unknown key 'zzzz': known are method",
    "versions: [w7]": "unknown version 'w7': did you mean",
    "versions: [w4, w4]": "each version once",
    "versions: []": "at least one",
    "versions: w4": "must be a list",
    "quantize: {method: gtpq}": "'gtpq' is not one of gptq, hqq, rtn, gptqmodel",
    "dense: [w9]": "w9",
    "mtp: maybe": "mtp: 'maybe' is not one of drop, keep",
    "quantize: {group_size: 48}": "48 is not one of 128, 64, 32",
    "quantize: {group_size: {w4: 7}}": "group_size.w4: 7 is not",
    "calibration: {data: x}": "data: must be a list of names",
    "calibration: {data: [3]}": "data[0]: must be a mapping",
    "calibration: {data: [{weight: 2}]}": "data[0].source: must name a file",
    "calibration: {data: [{source: b, weight: 0}]}": "0 is not a number from 0.001 to 1000",
    "quantize: {zeros: whole}": "'whole' is not one of fractional, integer, symmetric",
    "quantize: {zeros: symmetric, method: hqq}": "hqq makes no symmetric codes: gptq and rtn do",
    "quantize: {refine: 2}": "refine: 2 is not true or false",
    "quantize: {refine: true, method: hqq}": "hqq fits nothing to tokens: gptq and gptqmodel do",
    "calibration: {seed: -1}": "-1 is not an integer",
    "calibration: {samples: 0}": "0 is not an integer of at least 1",
    "calibration: {dtype: float64}": "'float64' is not one of",
    "allocation: {}": "allocation.average_bits: None is not a number from 1 to 20",
    "allocation: {average_bits: 3, weight: bytes}": "'bytes' is not one of gates, logits",
    "- a": "must be a mapping",
    "a: [": "not YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_recipes(text):
    with pytest.raises(InputError) as error:
        parse_recipe(text, "mine.yaml")
    assert BAD[text] in str(error.value) and str(error.value).startswith("mine.yaml: ")
    assert "\n" not in str(error.value)


def test_unknown_names(tmp_path):
    with pytest.raises(InputError, match=r"did you mean 'qwen3-30b-a3b'"):
        load_recipe("qwen3-30b")
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe(str(tmp_path / "absent.yaml"))
