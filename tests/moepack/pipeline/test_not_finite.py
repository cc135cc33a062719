"""A build of a checkpoint with a number that is not finite: every stage that reads it stops there, and names it."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support import RTN

from moepack.pack.errors import NotFiniteError
from moepack.pipeline import build as pipeline
from moepack.pipeline.recipe import parse_recipe

FILE = "model.safetensors"
RECIPE = parse_recipe("versions: [bf16, w4, w2]\n" + RTN.replace("64", "32"), "test")


@pytest.mark.parametrize(
    ("stage", "layer", "value"),
    (("build", 1, "nan"), ("build", 1, "inf"), ("build", 0, "nan"), ("calibrate", 1, "-inf")),
)
def test_a_build_stops_at_the_tensor(stage, layer, value, short_model, text, tmp_path):
    """A bundle was made of it without a word, and the next layer's activations were NaN."""
    name = f"model.layers.{layer}.mlp.experts.5.down_proj.weight"
    checkpoint = Path(shutil.copytree(short_model, tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / FILE)
    tensors[name].view(-1)[0] = float(value)
    save_file(tensors, checkpoint / FILE, {"format": "pt"})
    target, work = tmp_path / "bundle", tmp_path / "work"
    with pytest.raises(NotFiniteError) as error:
        if stage == "build":
            pipeline.build(checkpoint, target, RECIPE, [text], work=work)
        else:
            pipeline.calibrate(checkpoint, work, RECIPE, [text])
    assert str(error.value).startswith(f"{checkpoint}: {name}[0, 0] is {value}: the checkpoint is damaged")
    assert not target.exists()
