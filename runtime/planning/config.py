"""A bundle's config.json as transformers reads it: whatever is wrong with it is said in one line.

The file was written by somebody else. Its digest is checked by who opens the bundle. Decides nothing about the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepack.pack.config_counts import check_counts
from moepack.pack.errors import InputError, in_a_line
from moepack.pack.manifest import CONFIG, Manifest

TOP_K = ("num_experts_per_tok", "num_experts_per_token")  # experts of a token, by families' names for it


def read_config(bundle: str | Path, manifest: Manifest | None, **options: Any) -> Any:
    """The model's configuration.

    Args:
        bundle: a bundle's directory or Hub id.
        manifest: the bundle's, where it is here.
        options: of `AutoConfig.from_pretrained`.

    Raises:
        InputError: when transformers does not take it, or it is not that of this bundle's model.
    """
    import torch
    from transformers import AutoConfig

    check_config(bundle, **options)
    try:
        config = AutoConfig.from_pretrained(bundle, **options)
        layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    except Exception as error:  # which classes its validation raises depends on transformers' version
        raise InputError(f"{bundle}: its config cannot be read: {in_a_line(error)}") from None
    if not isinstance(config.dtype, torch.dtype | None):
        raise InputError(f"{bundle}: its config has no dtype that torch knows")
    if not all(isinstance(name, str) for name in _listed(config.architectures)):
        raise InputError(f"{bundle}: its {CONFIG} has architectures that are no list of names")
    if manifest is None:
        return config
    most = max(layer.experts for layer in manifest.layers)
    for name in TOP_K:
        if (k := getattr(config.get_text_config(), name, None)) is not None and not (type(k) is int and 1 <= k <= most):
            raise InputError(f"{bundle}: its {CONFIG} has {name} {str(k)[:40]!r}, its layers have {most} experts")
    if isinstance(layers, int) and layers > manifest.model["decoder_layers"]:
        raise InputError(f"{bundle}: its {CONFIG} has {layers} layers, its manifest {manifest.model['decoder_layers']}")
    return config


def check_config(name: str | Path, **options: Any) -> None:
    """See that a model's configuration has no absurd numbers, before transformers reads it, or its tokenizer, by them.

    Args:
        name: a directory or Hub id.
        options: of `AutoConfig.from_pretrained`.

    Raises:
        InputError: when it has.
    """
    from transformers import PretrainedConfig

    try:
        document, _ = PretrainedConfig.get_config_dict(name, **options)
    except Exception:  # what is to be read of it next says what is wrong
        return
    check_counts(f"{name}: its {CONFIG}", document)


def _listed(value: Any) -> list[Any]:
    """What stands in a list, or nothing for None; anything else is an item by itself, which is no name."""
    return value if isinstance(value, list) else [] if value is None else [None]
