"""Which class a configuration's model is: the one its checkpoint names, text alone or with towers."""

import pytest
from transformers import AutoConfig

from moepack.families.model_class import auto_class


def config(model_type, *architectures):
    return AutoConfig.for_model(model_type, **({"architectures": list(architectures)} if architectures else {}))


@pytest.mark.parametrize(
    ("model_type", "named", "auto"),
    [
        ("qwen3_moe", (), "AutoModelForCausalLM"),
        ("qwen3_moe", ("Qwen3MoeForCausalLM",), "AutoModelForCausalLM"),
        ("qwen3_moe", ("SomebodysOwn",), "AutoModelForCausalLM"),
        ("qwen3_5_moe", ("Qwen3_5MoeForConditionalGeneration",), "AutoModelForImageTextToText"),
        ("qwen3_5_moe", ("Qwen3_5MoeForCausalLM",), "AutoModelForCausalLM"),
        ("qwen3_5_moe", (), "AutoModelForCausalLM"),
        ("qwen3_vl_moe", (), "AutoModelForImageTextToText"),
        ("llama4", ("Llama4ForConditionalGeneration",), "AutoModelForImageTextToText"),
        ("llama4_text", (), "AutoModelForCausalLM"),
    ],
)
def test_the_one_that_is_named(model_type, named, auto):
    assert auto_class(config(model_type, *named)).__name__ == auto


def test_no_text_no_class():
    with pytest.raises(ValueError, match="vit: transformers has no class that continues a text"):
        auto_class(config("vit"))
