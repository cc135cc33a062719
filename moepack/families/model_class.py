"""The transformers class of a checkpoint's model: text alone, or text behind a vision or audio tower.

The configuration alone decides, so that the build, its estimate and the server choose the same class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moepack.pack.errors import CODE_ERRORS, InputError, in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

# Auto classes: the one whose class the checkpoint's `architectures` names is chosen, else the first with a class.
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")  # families' names for it


def auto_class(config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
    """The transformers auto class whose `from_config` and `from_pretrained` make a configuration's model.

    A configuration with a tower may have two models: Qwen3.5-MoE's is a text model to AutoModelForCausalLM, and the
    whole model to AutoModelForImageTextToText. The checkpoint's `architectures` names the right one.

    Raises:
        ValueError: when transformers has no class that generates text for the configuration.
    """
    import transformers

    named = set(getattr(config, "architectures", None) or ())
    found: list[type[_BaseAutoModelClass]] = []
    for name in _AUTO:
        auto = getattr(transformers, name, None)
        if auto is None or type(config) not in auto._model_mapping:
            continue
        classes = auto._model_mapping[type(config)]
        if named & {c.__name__ for c in (classes if isinstance(classes, tuple | list) else (classes,))}:
            found = [auto]
            break
        found.append(auto)
    if not found:
        raise ValueError(f"{config.model_type}: transformers has no class that continues a text")
    return found[0]


def decoder_layers(config: PreTrainedConfig) -> Any:
    """Return the number of decoder layers in a configuration, or None if it names none.

    LongCat-Flash has two attentions in a layer: `num_hidden_layers` counts attentions, and is made of `num_layers`.
    """
    text = config.get_text_config()
    made = isinstance(getattr(type(text), "num_hidden_layers", None), property)
    return getattr(text, "num_layers" if made else "num_hidden_layers", None)


def top_k(config: PreTrainedConfig) -> int:
    """Return the number of experts to which a layer sends a token, from a config."""
    named = (getattr(config.get_text_config(), name, None) for name in _TOP_K)
    return next((k for k in named if k and isinstance(k, int)), 8)


def check_top_k(config: PreTrainedConfig, most: int, where: str) -> None:
    """Raise InputError unless a config sends a token to between 1 and `most` experts, those of a layer."""
    for name in _TOP_K[:2]:
        if (k := getattr(config.get_text_config(), name, None)) is not None and not (type(k) is int and 1 <= k <= most):
            raise InputError(f"{where} has {name} {str(k)[:40]!r}, its layers have {most} experts")


def model_of(config: PreTrainedConfig, **options: object) -> Any:
    """Make a configuration's model by `from_config` with these options, with its experts named as in a bundle.

    Raises:
        ValueError: when transformers has no class that generates text for the configuration.
        InputError: for experts in a layout that is not supported.
    """
    from .layouts import adapt

    model = auto_class(config).from_config(config, **options)
    adapt(model)
    return model


def meta_model(config: PreTrainedConfig, where: object) -> Any:
    """Make a configuration's model in BF16 without weights, on the device meta.

    Raises:
        InputError: where transformers cannot; it names `where`.
    """
    import torch

    try:
        with torch.device("meta"):
            return model_of(config, dtype=torch.bfloat16)
    except CODE_ERRORS as error:
        raise InputError(f"{where}: transformers cannot build its model: {in_a_line(error)}") from error
