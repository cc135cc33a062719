"""Adapt experts that transformers does not run through its experts interface, or that a layer has beside others.

`LAYOUTS` maps their classes to the files here that adapt them. Other models stay unchanged.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig
    from transformers.core_model_loading import WeightTransform

_MODELS = "transformers.models"
# Class of a module -> file here; its `behind_interface(module, config)` changes the module to one that the interface
# runs. "interface" serves experts that differ from the interface's own by nothing but their code.
LAYOUTS = {
    f"{_MODELS}.dbrx.modeling_dbrx.DbrxExperts": "dbrx",
    f"{_MODELS}.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeMoeBlock": "ernie4_5_vl_moe",
    f"{_MODELS}.llama4.modeling_llama4.Llama4TextMoe": "llama4",
    f"{_MODELS}.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": "longcat_flash",
    f"{_MODELS}.step3p7.modeling_step3p7.Step3p7Experts": "interface",
}


# Biases by which a router chooses. Their checkpoints have them in float32; some families' classes do not say so, and
# transformers would round them to BF16, by which other experts are chosen.
_IN_FLOAT32 = "e_score_correction_bias"


def adapt(model: Any) -> None:
    """Make a model's experts run through transformers' experts interface, and its routers' biases load in float32.

    Idempotent.

    Raises:
        InputError: for a configuration that is not supported.
    """
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if any(name.rpartition(".")[2] == _IN_FLOAT32 for name, _ in tensors):
        kept = getattr(model, "_keep_in_fp32_modules_strict", None)  # what only a whole model has
        model._keep_in_fp32_modules_strict = {*(kept or ()), _IN_FLOAT32}
    conversions: list[WeightTransform] = []
    for name, module in list(model.named_modules()):
        kind = type(module)
        if (file := LAYOUTS.get(f"{kind.__module__}.{kind.__qualname__}")) is None:
            continue
        family = import_module(f".{file}", __package__)
        family.behind_interface(module, _config(model, name))
        if not conversions and hasattr(family, "conversions"):
            conversions = family.conversions(module)
            model._moepack_conversions = conversions


def conversions_of(model: nn.Module) -> list[WeightTransform]:
    """Return the conversions that transformers' loader needs, in addition to its own, for an adapted model."""
    return list(getattr(model, "_moepack_conversions", ()))


def _config(model: nn.Module, name: str) -> PreTrainedConfig | None:
    """The configuration of the nearest module around one that has a model's configuration."""
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            return config
    return getattr(model, "config", None)
