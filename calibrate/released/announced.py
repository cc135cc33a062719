"""The version that keeps experts as released, by config.json alone: the tensors are not known yet."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.pack.errors import InputError
from moepack.pack.spec import LOSSLESS, Version, encoding_of

from .find import quantization_of, read_scheme
from .parts import Document

_MODELOPT = {"NVFP4": "nvfp4", "FP8": "fp8row", "MXFP8": "mxfp8"}
# What compressed-tensors calls a format -> the version, where the format alone decides.
_PACKED = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4", "mxfp8-quantized": "mxfp8"}


def announced_version(where: object, document: Document) -> Version:
    """The version that keeps the experts of a checkpoint as they were released; BF16 if they are not quantised.

    `document` is its config.json, `where` its name in errors. Scales of GPTQ and AWQ count as FP16. Raises InputError
    for a quantisation that is not read, and where only the tensors would tell the version, or none keeps its groups.
    """
    read_scheme(where, document)  # refuses what is not read
    found = quantization_of(document)
    if not found:
        return Version.of(LOSSLESS)
    found = found if isinstance(found, dict) else {"quant_method": found}
    try:
        return _version(document, found)
    except (KeyError, ValueError, TypeError, AttributeError):
        are = f"{where}: config.json alone does not tell the version of experts quantised as {_in_words(found)}"
        raise InputError(f"{are}, or none keeps them") from None


def _version(document: Document, found: Document) -> Version:
    method = found["quant_method"]
    if method in ("mxfp4", "mxfp8"):
        return _of(method)
    if method in ("fp8", "fbgemm_fp8"):
        fp4 = "fp4" in (found.get("expert_dtype"), document.get("expert_dtype"))
        return _of("mxfp4") if fp4 else _fp8(found.get("weight_block_size"))
    if method == "modelopt":
        return _of(_MODELOPT[found["quant_algo"]])
    if method == "compressed-tensors":
        made = {
            _compressed(g["weights"], g.get("format") or found.get("format")) for g in found["config_groups"].values()
        }
        (version,) = made
        return version
    return _integers(f"{found['bits']}fp16", found["group_size"])


def _compressed(weights: Document, form: str | None) -> Version:
    if form in _PACKED:
        return _of(_PACKED[form])
    if weights["type"] == "float":
        return _fp8(weights.get("block_structure") if weights.get("strategy") == "block" else None)
    group = 0 if weights.get("strategy") == "channel" else weights["group_size"]
    return _integers(weights["num_bits"], group, weights.get("symmetric", True))


def _integers(kind: object, group: int, symmetric: bool = False) -> Version:
    """Integers with a scale for `group` columns, or with one a row (0 or -1), which stands in the widest groups."""
    return _of(f"int{kind}", max(group, 0), symmetric)


def _of(name: str, group: int = 0, symmetric: bool = False) -> Version:
    sizes = encoding_of(name).group_sizes
    return Version.of(name, sizes[0] if len(sizes) == 1 else group, symmetric=symmetric)


def _fp8(block: Sequence[int] | None) -> Version:
    """FP8 with a scale for blocks of rows and columns, or with one a row or matrix."""
    if block is None:
        return _of("fp8row")
    rows, cols = block
    return _of("mxfp8") if (rows, cols) == (1, 32) else _of("fp8", cols)


def _in_words(found: Document) -> str:
    keys = ("quant_method", "quant_algo", "format", "bits", "group_size", "weight_block_size")
    return ", ".join(f"{k} {found[k]}" for k in keys if k in found)
