"""Bundles of the short model by each rule for zero points, made once a run. Read only."""

import pytest
from support import cli

from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
versions: [bf16, w8, w4, w3, w2, w1]
dense: [w8, w4]
quantize: {{method: gptq, group_size: 32, loss_tokens: 64, zeros: {}}}
calibration: {{samples: 4, length: 64, batch_size: 2}}
"""


@pytest.fixture(scope="session")
def of_zeros(short_model, text, made_once):
    """The bundle whose recipe says `zeros:` so."""

    def made(zeros):
        recipe = parse_recipe(RECIPE.format(zeros), "test")
        return made_once(f"zeros-{zeros}", lambda path: build(short_model, path, recipe, [text]))

    return made


@pytest.fixture
def asked(tmp_path):
    """Asks for an export of a bundle into `out`, by a command line; its exit code, stdout and stderr."""
    return lambda bundle, *words: cli("export", bundle, "-o", tmp_path / "out", "-q", *words)
