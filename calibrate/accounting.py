"""Say what becomes of every tensor of a checkpoint, from its name; anything that no rule names is refused.

A tensor is stored bit for bit or quantised, is a copy of the tensor to which the model ties its own, or is left out by
one of the rules here. The skeleton asks before a build reads weights, and so does `moepack verify --checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from moepack.families.mtp import mtp_tensors
from moepack.pack.errors import InputError

MTP = "a layer for multi-token prediction"
# Rules by which tensors that the model has no place for are left out: the reason, and the names that it holds for.
RULES: tuple[tuple[str, str], ...] = (
    ("a table of rotary embeddings, which the model computes", r"(^|\.)(inv_freq|cos_cached|sin_cached|rope\.freqs)$"),
    ("a mask of attention, which the model computes", r"\.(attn|attention|self_attn)\.(masked_)?bias$"),
    (
        "a scale of activations or of a cache, neither of which is quantised",
        r"\.(input|activation|k|v|q|kv|kv_cache|prob|softmax|k_proj\.output|v_proj\.output)_(activation_)?scale$",
    ),
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def left_out(
    name: str, unused: Iterable[str], used: Iterable[str], decoder_layers: int, ignored: Collection[str]
) -> dict[str, str]:
    """Return the reason for which each of `unused` is left out, by tensor.

    Args:
        name: the checkpoint's, for errors.
        unused: tensors that the model has no place for.
        used: tensors that it has a place for.
        decoder_layers: the number of the model's layers.
        ignored: patterns of names that the model's class in transformers says it ignores.

    Raises:
        InputError: for a tensor that no rule names.
    """
    unused = list(unused)
    reasons = dict.fromkeys(_multi_token(unused, used, decoder_layers), MTP)
    for tensor in unused:
        if tensor in reasons:
            continue
        reason = next((why for why, pattern in RULES if re.search(pattern, tensor)), None)
        if reason is None and any(re.search(pattern, tensor) for pattern in ignored):
            reason = "ignored by the model's class in transformers"
        if reason is None:
            raise InputError(f"{name}: {tensor} {_no_place(tensor, decoder_layers)}")
        reasons[tensor] = reason
    return reasons


def _multi_token(unused: Sequence[str], used: Iterable[str], decoder_layers: int) -> list[str]:
    """The tensors of MTP layers among `unused`.

    A numbered layer is one only if it has a tensor that no decoder layer has: a layer like the others, beyond the
    number that config.json gives, was lost rather than left out.
    """
    ordinary = {name[m.end() :] for name in used if (m := _LAYER.search(name))}
    found = mtp_tensors(unused, decoder_layers)
    own = {m[1] for name in found if (m := _LAYER.search(name)) and name[m.end() :] not in ordinary}
    return [name for name in found if not (m := _LAYER.search(name)) or m[1] in own or "mtp" in name[: m.start()]]


def _no_place(tensor: str, decoder_layers: int) -> str:
    number = _LAYER.search(tensor)
    if number and int(number[1]) >= decoder_layers:
        return f"is of a layer beyond the {decoder_layers} of config.json: correct its number of layers"
    return (
        "has no place in the model that config.json describes, and no rule leaves it out: correct config.json, "
        "upgrade transformers, or take the tensor out of the file"
    )


def one_source_each(name: str, targets: Mapping[str, Sequence[str]], converted: Mapping[str, bool]) -> None:
    """Refuse a parameter that a checkpoint has twice, for example as one tensor and as a tensor for each expert.

    `targets`: the tensors that make a parameter; `converted`: whether a tensor is converted, not just renamed.

    Raises:
        InputError: for a parameter with a tensor that is just renamed, and another.
    """
    for target, keys in targets.items():
        whole = [key for key in keys if not converted[key]]
        if whole and len(keys) > 1:
            other = next(key for key in keys if key != whole[0])
            raise InputError(f"{name}: {whole[0]} and {other} are both {target} of the model: take one of them out")
