"""Every family: build, verify, load and evaluate a tiny random model, through transformers' own modules."""

import pytest
import tiny_models
import torch
from support import Notes, build_from
from support import ids as token_ids

import moepack
from moepack.reports.evaluate import evaluate
from moepack.reports.verify import verify
from moepack.runtime.planning.options import LoadOptions

RECIPE = """
quantize: {{method: {}, group_size: 32, loss_tokens: 64}}
calibration: {{samples: 4, length: 64, batch_size: 2}}
"""


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


# Each differs in quantising or loading: plain, MLA behind a dense layer with shared experts, transposed matrices with
# biases. test_every_family.py builds and loads all that there are.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, demo_model, text, evaluation, tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint = tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model)
    report = build_from(RECIPE.format("gptq"), checkpoint, tmp_path / "bundle", [text])
    assert report.calibration_tokens == 4 * 64
    made = report.methods["w2"]  # of random weights GPTQ's grid and HQQ's come close at w4, and the better one is kept
    assert made.get("gptq", 0) > sum(made.values()) / 2, report.methods
    assert verify(tmp_path / "bundle", checkpoint) == []

    ids = token_ids(40, 1, 2)
    # In float32, because in BF16 a router's level choices flip with each instruction set (test_every_family compares
    # BF16 with the choices given).
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        want = plain(ids).logits
        errors = [
            relative(moepack.load(tmp_path / "bundle", dtype=torch.float32, policy=f"static:{v}")(ids).logits, want)
            for v in ("bf16", "w4", "w2", "w1")
        ]
    assert errors[0] <= 1e-4 and errors == sorted(errors), errors

    score = evaluate(tmp_path / "bundle", [str(evaluation)], LoadOptions(policy="static:w4"), length=32, samples=8)
    assert score.tokens == 8 * 31 and score.perplexity > 1 and score.policy == "static:w4"


def test_another_dtype_is_rounded_and_said_so(demo_model, text, tmp_path):
    """A float32 checkpoint: experts are held rounded to BF16, everything else in float32 as it was."""
    from safetensors import safe_open

    from moepack.pack.reader import open_bundle

    checkpoint = tiny_models.save_tiny("olmoe", tmp_path / "checkpoint", demo_model, dtype=torch.float32)
    notes = Notes()
    build_from(RECIPE.format("rtn"), checkpoint, tmp_path / "bundle", [text], reporter=notes)
    assert any("rounded" in n for n in notes.notes)
    assert open_bundle(tmp_path / "bundle").manifest.model["expert_dtype"] == "F32"
    with safe_open(tmp_path / "bundle" / "model.safetensors", framework="pt") as f:
        assert f.get_slice("model.embed_tokens.weight").get_dtype() == "F32"
    assert verify(tmp_path / "bundle", checkpoint) == []
