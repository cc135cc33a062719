"""Choose a format's reader by config.json's quantization_config, and let it find the encoded weights among headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.safetensors_file import TensorEntry

from . import compressed, fp8, gptq, modelopt, mxfp4
from .encoded import Encoded
from .parts import Document, Scheme

# A format's `quant_method` -> what makes its reader of the configuration (the whole document, and its quantization).
_METHODS: dict[str, Callable[[Document, Document], Scheme]] = {
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
    "mxfp8": fp8.read,
    "mxfp4": mxfp4.read,
    "compressed-tensors": compressed.read,
    "modelopt": modelopt.read,
    "gptq": gptq.read,
    "awq": gptq.read_awq,
}


def read_scheme(where: object, document: Document) -> Scheme | None:
    """The reader for a config.json's `quantization_config`; None if it has none.

    Raises InputError for a format, or an option of it, that moepack does not read.
    """
    quantization = quantization_of(document)
    if not quantization:
        return None
    if isinstance(quantization, str):
        quantization = {"quant_method": quantization}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    make = _METHODS.get(method) if isinstance(method, str) else None
    if make is None:
        why = f"moepack reads {', '.join(_METHODS)}: give it one of these, or the checkpoint this was made from"
        raise InputError(f"{where}: is already quantised ({method}); {why}")
    try:
        return make(document, quantization)
    except InputError as error:
        raise InputError(f"{where}: quantization_config {error}") from None


def quantization_of(document: Document) -> Any:
    """A config.json's `quantization_config`, which models with a tower may have in `text_config` (Kimi-K2.5)."""
    text = document.get("text_config")
    own = text.get("quantization_config") if isinstance(text, dict) else None
    return document.get("quantization_config") or own


def find_encoded(where: object, scheme: Scheme | None, tensors: Mapping[str, TensorEntry]) -> dict[str, Encoded]:
    """The encoded weights among a checkpoint's tensors, by the names that they would have unquantised.

    Raises InputError for a tensor that is missing, has another dtype or shape, or belongs to two weights, and if the
    configuration names a format that no tensor has.
    """
    if scheme is None:
        return {}
    out: dict[str, Encoded] = {}
    owner: dict[str, str] = {}
    try:
        for weight, encoded in scheme(tensors):
            for name in encoded.names:
                if owner.setdefault(name, weight) != weight:
                    raise InputError(f"{name} belongs to both {owner[name]} and {weight}")
            if weight in out or (weight in tensors and weight not in encoded.names):
                raise InputError(f"{weight} is stored twice, also as {encoded.codes_in.name}")
            out[weight] = encoded
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if not out:
        raise InputError(f"{where}: config.json says that weights are quantised, but no tensor is stored so")
    return out
