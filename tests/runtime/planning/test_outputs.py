"""Sizes from a model's configuration, for outputs that were not measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from moepack.runtime.planning.outputs import Outputs


def heads(config: PretrainedConfig) -> int:
    head = SimpleNamespace(out_features=32)
    model: Any = SimpleNamespace(config=config, dtype=torch.bfloat16, get_output_embeddings=lambda: head)
    return Outputs.of(model, 8, all_logits=False).heads


def test_the_heads_of_layers_that_differ_are_the_most() -> None:
    """transformers refuses to read a number that layers have of their own, and with it went any budget."""
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, num_attention_heads=4)
    assert heads(config) == 4
    config.per_layer_config = {1: {"num_attention_heads": 6}}
    assert heads(config) == 6
