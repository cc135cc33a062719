"""Bundles of the short model by each rule for zero points, made once a run. Read only."""

import pytest
from support import build_from, cli

RECIPE = """
versions: [bf16, w8, w4, w3, w2, w1]
dense: [w8, w4]
quantize: {{method: {method}, group_size: 32, loss_tokens: 64, zeros: {zeros}}}
calibration: {{samples: 4, length: 64, batch_size: 2}}
"""


@pytest.fixture(scope="session")
def of_zeros(short_model, text, made_once):
    """The bundle whose recipe says `zeros:` so."""

    def made(zeros):
        method = "gptq" if zeros == "fractional" else "rtn"  # which takes less time, and makes no fractions
        recipe = RECIPE.format(method=method, zeros=zeros)
        return made_once(f"zeros-{zeros}", lambda path: build_from(recipe, short_model, path, [text]))

    return made


@pytest.fixture
def asked(tmp_path):
    """Asks for an export of a bundle into `out`, by a command line; its exit code, stdout and stderr."""
    return lambda bundle, *words: cli("export", bundle, "-o", tmp_path / "out", "-q", *words)
