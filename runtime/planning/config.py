"""Read a bundle's config.json through transformers, and report any fault in one line.

The file is untrusted input. Its digest is checked when the bundle is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepack.families.model_class import check_top_k, decoder_layers
from moepack.pack.config_counts import check_counts
from moepack.pack.errors import InputError
from moepack.pack.hub_errors import reason
from moepack.pack.manifest import CONFIG, Manifest


def read_config(bundle: str | Path, manifest: Manifest | None, **options: Any) -> Any:
    """Return the model's configuration.

    `bundle` is a directory or Hub id; `options` are those of `AutoConfig.from_pretrained`.

    Raises:
        InputError: when transformers rejects the configuration, or it does not fit the manifest.
    """
    import torch
    from transformers import AutoConfig

    check_config(bundle, **options)
    try:
        config = AutoConfig.from_pretrained(bundle, **options)
        layers = decoder_layers(config)
    except Exception as error:  # the classes that validation raises depend on transformers' version
        raise InputError(f"{bundle}: its config cannot be read: {reason(error)}") from None
    if not isinstance(config.dtype, torch.dtype | None):
        raise InputError(f"{bundle}: its config has no dtype that torch knows")
    names = [] if config.architectures is None else config.architectures
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{bundle}: its {CONFIG} has architectures that are no list of names")
    if manifest is None:
        return config
    check_top_k(config, max(layer.experts for layer in manifest.layers), f"{bundle}: its {CONFIG}")
    if isinstance(layers, int) and layers > manifest.model["decoder_layers"]:
        raise InputError(f"{bundle}: its {CONFIG} has {layers} layers, its manifest {manifest.model['decoder_layers']}")
    return config


def longest_context(config: Any) -> int | None:
    """The most tokens of a sequence that a configuration says its model takes; None where it names no such number."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def check_config(name: str | Path, **options: Any) -> None:
    """Check a model's configuration for absurd numbers before transformers builds anything from them.

    Raises:
        InputError: for an absurd number.
    """
    from transformers import PretrainedConfig

    try:
        document, _ = PretrainedConfig.get_config_dict(name, **options)
    except Exception:  # the next reader reports the fault
        return
    check_counts(f"{name}: its {CONFIG}", document)
