"""Llama-4: a whole model is built and its tower kept, and what is refused; test_adapted runs its blocks."""

import pytest
import torch
from support import build_from
from support import ids as token_ids
from tiny_models import _BASE, copy_tokenizer

import moepack
from moepack.families.model_class import model_of
from moepack.pack.errors import InputError

RECIPE = """
versions: [bf16, w4]
quantize: {method: gptq, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def text_config(**own):
    from transformers import Llama4TextConfig

    given = {"intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
    return Llama4TextConfig(**{**_BASE, **given, **own})


def test_several_experts_a_token_are_refused():
    with pytest.raises(InputError, match="llama4_text with num_experts_per_tok 2"):
        model_of(text_config(num_experts_per_tok=2), dtype=torch.bfloat16)


def test_the_whole_model_and_its_tower(demo_model, text, tmp_path):
    """The checkpoint's own class, text and images, comes back, with the tower's tensors as they were."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    config = Llama4Config(text_config=text_config().to_dict(), vision_config=vision)
    torch.manual_seed(0)
    plain = Llama4ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "experts" in name:
                parameter.normal_(0, 0.1)
    plain.save_pretrained(tmp_path / "checkpoint")
    copy_tokenizer(demo_model, tmp_path / "checkpoint")
    report = build_from(RECIPE, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    assert report.methods["w4"]["gptq"] >= 4  # of 8; those with few tokens keep the best of three
    assert moepack.open(tmp_path / "bundle").manifest.model["architecture"] == "Llama4ForConditionalGeneration"
    ours = moepack.load(tmp_path / "bundle", policy="static:bf16", dtype=torch.float32)
    plain = Llama4ForConditionalGeneration.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    ids = token_ids(20, 1, 2)
    with torch.inference_mode():
        want, got = plain(input_ids=ids).logits, ours(input_ids=ids).logits
    assert float((got - want).norm() / want.norm()) <= 1e-3
    held = dict(ours.named_parameters())
    tower = [n for n, _ in plain.named_parameters() if "vision_model" in n or "projector" in n]
    assert len(tower) > 10 and all(torch.equal(held[n], plain.get_parameter(n)) for n in tower)
    out = ours.generate(ids[:1, :8], max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 11)


def test_a_router_that_is_asked_ahead():
    """As policies that fetch ahead do: what it answers is read as scores."""
    from moepack.calibrate.experts import describe
    from moepack.runtime.experts.prediction import Prediction

    torch.manual_seed(0)
    model = model_of(text_config(), dtype=torch.float32)
    names = [f"model.layers.{i}.feed_forward.experts" for i in range(2)]
    layers = [describe(i, name, model.get_submodule(name)) for i, name in enumerate(names)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    router = model.model.layers[1].feed_forward.router
    asked = Prediction(model, layers, ())._routers[1].ask(x, 1)
    assert asked.index.reshape(-1).tolist() == router(x)[1].argmax(-1).tolist()
