"""Sizes from a model's configuration, for outputs that were not measured."""

from types import SimpleNamespace

import torch
from transformers import AutoConfig

from moepack.runtime.planning.outputs import Outputs


def heads(config):
    head = SimpleNamespace(out_features=32)
    model = SimpleNamespace(config=config, dtype=torch.bfloat16, get_output_embeddings=lambda: head)
    return Outputs.of(model, 8, all_logits=False).heads


def test_the_heads_of_layers_that_differ_are_the_most():
    """transformers refuses to read a number that layers have of their own, and with it went any budget."""
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, num_attention_heads=4)
    assert heads(config) == 4
    config.per_layer_config = {1: {"num_attention_heads": 6}}
    assert heads(config) == 6
