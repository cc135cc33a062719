"""compressed-tensors: INT4 and INT8 packed in words, INT8, FP8, MXFP8, MXFP4 and NVFP4, mixed by groups of modules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from moepack.pack.errors import InputError

from . import fp8
from .encoded import Encoded, StoredPart
from .parts import ACTIVATIONS, Document, Scheme, Shape, Tensors, block_size, group_size, need, option, part, there

SCALES = {"BF16": "", "F16": "fp16"}  # dtypes of the scales of integers, and what they add to the encoding's name


@dataclass(frozen=True)
class ConfigGroup:
    """A config group that quantises weights."""

    targets: tuple[str, ...]  # names of modules, "re:" and an expression for them, or names of classes
    make: Callable[[Tensors, str, Document], Encoded]  # reads a module's weight
    weights: Document  # its QuantizationArgs

    def rank(self, module: str) -> int:
        """Rank how specifically this group matches a module: 2 by name or regex, 1 by class, 0 no match."""
        for target in self.targets:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return 2
        return int(any("." not in t and not t.startswith("re:") for t in self.targets))


def read(document: Document, quantization: Document) -> Scheme:
    """The reader, by `config_groups` and their `format`."""
    option(quantization, "quantization_status", ("compressed",), "compressed")
    sparsity = quantization.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise InputError(f"says sparsity_config {sparsity!r}: moepack reads no sparse weights")
    if quantization.get("transform_config"):
        raise InputError("has a transform_config: moepack reads no rotated weights")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise InputError("has no config_groups")
    made = [_group(g, quantization.get("format")) for g in groups.values() if g.get("weights") is not None]
    if not made:
        raise InputError("has no config group with weights")
    return partial(find, made)


def _group(group: Document, default: object) -> ConfigGroup:
    targets = group.get("targets")
    weights = group["weights"]
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets) or not isinstance(weights, dict):
        raise InputError("has a config group without targets")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error:
            raise InputError(f"has a target that is not a valid regular expression: {target!r}") from None
    form = option({"format": group.get("format") or default}, "format", tuple(_FORMATS))
    make, kind, bits = _FORMATS[form]
    kind = weights.get("type", "int") if form == "naive-quantized" else kind
    option(weights, "type", (kind,), "int")
    option(weights, "num_bits", bits, 8)
    if kind == "float":
        option(weights, "symmetric", (True,), True)
    return ConfigGroup(tuple(targets), _signed if (form, kind) == ("naive-quantized", "int") else make, weights)


def find(groups: list[ConfigGroup], tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights with a `weight_packed`, or with a `weight_scale`; others are stored as they are, in `ignore` or not."""
    for name in tensors:
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
        elif name.endswith(".weight") and f"{name}_scale" in tensors:
            module = name.removesuffix(".weight")
        else:
            continue
        ranks = [g.rank(module) for g in groups]
        group = groups[0] if len(groups) == 1 else groups[ranks.index(max(ranks))]
        if len(groups) > 1 and not max(ranks):
            raise InputError(f"{name} is quantised, but no target of config.json's config_groups names it")
        yield f"{module}.weight", group.make(tensors, module, group.weights)


def _codes(tensors: Tensors, name: str) -> StoredPart:
    if name not in tensors:
        raise InputError(f"{name} is missing, which config.json's format needs")
    return part(tensors, name)


def _zeros(
    tensors: Tensors, module: str, weights: Document, dtype: str, shape: Shape, codes: StoredPart
) -> StoredPart | None:
    """The zero points of integers, which symmetric ones do not have."""
    name = f"{module}.weight_zero_point"
    if not option(weights, "symmetric", (True, False), True):
        return need(tensors, name, (dtype,), [shape], codes)
    if name in tensors:
        raise InputError(f"{name} is stored, but config.json says that {module}.weight is symmetric")
    return None


def _columns(weights: Document) -> int:
    if option(weights, "strategy", ("group", "channel", None)) == "channel":
        return 0
    return group_size(weights)


def _packed(tensors: Tensors, module: str, weights: Document) -> Encoded:
    codes = _codes(tensors, f"{module}.weight_packed")
    bits = int(weights.get("num_bits", 8))
    group = _columns(weights)
    *lead, words = codes.shape
    scale_name = f"{module}.weight_scale"
    if scale_name not in tensors:
        raise InputError(f"{codes.name} has no {scale_name}: the checkpoint is not complete")
    groups = tensors[scale_name].shape[-1] if group and tensors[scale_name].shape else 1
    cols = groups * group if group else words * 32 // bits
    if codes.dtype != "I32" or math.ceil(cols * bits / 32) != words:
        got = f"{codes.dtype} {list(codes.shape)}"
        raise InputError(f"{codes.name} is {got}; {cols} columns of {bits} bits need I32 of {cols * bits / 32:g} words")
    g_idx = there(tensors, module, ("weight_g_idx",))
    if weights.get("actorder") in ("group", True) and not g_idx:
        raise InputError(f"{codes.name} has no {module}.weight_g_idx, which actorder group needs")
    scale = need(tensors, scale_name, tuple(SCALES), [(*lead, groups)], codes)
    *batch, rows = lead
    zeros = _zeros(tensors, module, weights, "I32", (*batch, math.ceil(rows * bits / 32), groups), codes)
    rest = (*there(tensors, module, ("weight_shape", *ACTIVATIONS)), *g_idx)
    version = f"int{bits}{SCALES[scale.dtype]}"
    own = g_idx[0] if g_idx else None
    return Encoded(version, group, (*lead, cols), "plain", codes, scale, zeros, g_idx=own, leftovers=rest)


def _signed(tensors: Tensors, module: str, weights: Document) -> Encoded:
    codes = _codes(tensors, f"{module}.weight")
    if codes.dtype != "I8":
        raise InputError(f"{codes.name} is {codes.dtype}, but config.json says 8-bit integers")
    group = _columns(weights)
    *lead, cols = codes.shape
    shape: Shape = (*lead, math.ceil(cols / group) if group else 1)
    scale = need(tensors, f"{module}.weight_scale", tuple(SCALES), [shape], codes)
    zeros = _zeros(tensors, module, weights, "I8", shape, codes)
    rest = there(tensors, module, ACTIVATIONS)
    return Encoded(f"int8{SCALES[scale.dtype]}", group, codes.shape, "signed", codes, scale, zeros, leftovers=rest)


def _float(tensors: Tensors, module: str, weights: Document, mx: bool = False) -> Encoded:
    codes = _codes(tensors, f"{module}.weight")
    if codes.dtype != "F8_E4M3":
        raise InputError(f"{codes.name} is {codes.dtype}, but config.json says 8-bit floats")
    strategy = option(weights, "strategy", ("group",) if mx else ("tensor", "channel", "group", "block"), "tensor")
    block = None
    if strategy == "block":
        block = block_size(weights, "block_structure")
    elif strategy == "group":
        block = (1, option(weights, "group_size", (fp8.MX,)) if mx else group_size(weights))
    return fp8.fp8(tensors, codes, f"{module}.weight_scale", block)


def _fp4(tensors: Tensors, module: str, weights: Document, nv: bool) -> Encoded:
    codes = _codes(tensors, f"{module}.weight_packed")
    if codes.dtype != "U8":
        raise InputError(f"{codes.name} is {codes.dtype}, not U8: two 4-bit floats a byte")
    option(weights, "group_size", (fp8.NV if nv else fp8.MX,))
    outer = f"{module}.weight_global_scale" if nv else ""
    return fp8.fp4(tensors, codes, f"{module}.weight_scale", outer, divides=nv)


# format -> what reads a weight in it, and the type and numbers of bits that it has
_FORMATS: dict[str, tuple[Callable[..., Encoded], str, tuple[int, ...]]] = {
    "pack-quantized": (_packed, "int", (4, 8)),
    "int-quantized": (_signed, "int", (8,)),
    "naive-quantized": (_float, "float", (8,)),
    "float-quantized": (_float, "float", (8,)),
    "mxfp8-quantized": (partial(_float, mx=True), "float", (8,)),
    "mxfp4-pack-quantized": (partial(_fp4, nv=False), "float", (4,)),
    "nvfp4-pack-quantized": (partial(_fp4, nv=True), "float", (4,)),
}
