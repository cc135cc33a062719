"""Families that differ in kind: GPTQ of a tiny random model, verified, and its versions against transformers' own."""

import pytest
import tiny_models
import torch
from support import build_from
from support import ids as token_ids

import moepack
from moepack.reports.verify import verify

RECIPE = """
quantize: {method: gptq, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


# Each differs in quantising or loading: plain, MLA behind a dense layer with shared experts, transposed matrices with
# biases. test_every_family.py builds and loads all that there are.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, demo_model, text, tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint = tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model)
    report = build_from(RECIPE, checkpoint, tmp_path / "bundle", [text])
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
