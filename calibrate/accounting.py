"""Say what becomes of every tensor of a checkpoint, from names, dtypes and shapes; anything else is refused.

A tensor is stored bit for bit or quantised, is a copy of the tensor to which the model ties its own, or is left out by
a rule. The ledger is made and closed with the skeleton, before a build reads weights; `moepack verify --checkpoint`,
dry runs and exports use the same one.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from moepack.families.mtp import layer_of, mtp_layers
from moepack.pack.errors import CODE_ERRORS, InputError, in_a_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

    from .checkpoint import Checkpoint

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # that a parameter may have in a file
MTP = "a layer for multi-token prediction"
NO_WEIGHTS = "of an expert that has no weights"
IGNORED = "ignored by the model's class in transformers"
ZERO = "a bias of zeros, which the model does not add"
Shape = Sequence[int]
# Rules by which tensors that the model has no place for are left out: the reason, the names that it holds for, and the
# shapes: under such a name, another shape is another thing.
RULES: tuple[tuple[str, str, Callable[[Shape], bool]], ...] = (
    (
        "a table of rotary embeddings or positions, which the model computes",
        r"(^|\.)(inv_freq|cos_cached|sin_cached|rope\.freqs|position_ids)$",
        lambda shape: True,
    ),
    (
        "a mask of attention, which the model computes",
        r"\.(attn|attention|self_attn)\.(masked_)?bias$",
        lambda shape: not shape or (len(shape) > 2 and shape[-1] == shape[-2]),  # a bias that is added has one axis
    ),
    (
        "a scale of activations or of a cache, neither of which is quantised",
        r"\.(act|activation|input|input_global|output|[kvq]|kv|[kv]_cache|kv_cache|prob|prob_output|softmax)"
        r"_(activation_)?(scale|zero_point)$",
        lambda shape: sum(size > 1 for size in shape) < 2,  # a matrix is a weight
    ),
)


@dataclass
class Ledger:
    """Maps each weight of a checkpoint, by its name in the unquantised checkpoint, to its place in the model."""

    # Parameter -> the weights that it is made of. Several parameters made at once stand here as the first of them.
    targets: dict[str, list[str]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of each floating-point parameter: of its weights
    made: set[str] = field(default_factory=set)  # every parameter that weights make
    converted: set[str] = field(default_factory=set)  # those of `targets` whose weights are more than renamed
    ties: dict[str, str] = field(default_factory=dict)  # weight -> the parameter that the model ties to another
    turned: dict[str, str] = field(default_factory=dict)  # weight -> the parameter that it is, by a tied one's name
    left_out: dict[str, str] = field(default_factory=dict)  # weight -> the reason


def account(
    checkpoint: Checkpoint, model: PreTrainedModel, mapping: Sequence[WeightTransform], decoder_layers: int
) -> Ledger:
    """Find the place of every weight of a checkpoint in a model on the meta device.

    Args:
        mapping: transformers' renamings and conversions for the model.
        decoder_layers: the number of the model's layers.

    Raises:
        InputError: for the first tensor that is not accounted for: it has no place and no rule leaves it out, it has
            another shape or dtype than its place, another tensor has the same place, or one beside it is missing; and
            for a parameter that nothing is made of.
    """
    state = model.state_dict()
    ledger = Ledger()
    routes, unplaced = _routes(checkpoint, model, state, mapping, ledger)
    _tie(checkpoint, model.all_tied_weights_keys, routes, ledger)
    shapes = _Shapes(checkpoint, model, mapping)
    for target, route in routes.items():
        ledger.targets[target] = keys = list(itertools.chain(*route.values()))
        if None not in route:
            ledger.converted.add(target)
        made = shapes.of(target, route)
        dtype = _dtype(checkpoint, target, keys, state[target].is_floating_point())
        for name, shape in made.items():
            if name in ledger.made:
                raise InputError(f"{checkpoint.name}: {keys[0]} and another tensor are both {name}: take one out")
            if name not in state or shape != tuple(state[name].shape):
                raise InputError(f"{checkpoint.name}: {_another_shape(name, shape, state, keys)}")
            ledger.made.add(name)
            if dtype is not None:
                ledger.dtypes[name] = dtype
    _leave_out(checkpoint, model, unplaced, decoder_layers, ledger)
    lost = sorted(set(state) - ledger.made - set(model.all_tied_weights_keys))
    if lost:
        raise InputError(f"{checkpoint.name}: the checkpoint has nothing for {lost[0]}: it is not complete")
    return ledger


# A parameter's weights by the pattern of the conversion that makes the parameter of them; None: they are just renamed.
_Route = dict[str | None, list[str]]


def _routes(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    state: dict[str, Tensor],
    mapping: Sequence[WeightTransform],
    ledger: Ledger,
) -> tuple[dict[str, _Route], dict[str, str]]:
    """Find the route to each parameter; and of weights without a place in the model, their names as it would have them.

    Rows of experts without weights are left out here.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    routes: dict[str, _Route] = {}
    unplaced: dict[str, str] = {}
    for key in sorted(checkpoint.weights, key=_natural):  # renamings may depend on those before
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if target not in state:
            unplaced[key] = target
        elif _is_past_the_last(model, target, key):
            ledger.left_out[key] = NO_WEIGHTS
        else:
            routes.setdefault(target, {}).setdefault(pattern, []).append(key)
    for target, route in routes.items():
        every = list(itertools.chain(*route.values()))
        if None in route and len(every) > 1:
            first, other = sorted(every, key=lambda key: key not in route[None])[:2]
            raise InputError(f"{checkpoint.name}: {first} and {other} are both {target}: take one of them out")
    return routes, unplaced


def _natural(key: str) -> list[tuple[int, int, str]]:
    parts = ((part.isdecimal(), part) for part in key.split("."))
    return [(0, len(part.lstrip("0")), part) if number else (1, 0, part) for number, part in parts]


def _is_past_the_last(model: PreTrainedModel, target: str, key: str) -> bool:
    """Whether a tensor belongs to an expert without weights, for which some checkpoints have tensors."""
    module: Any = model.get_submodule(target.rpartition(".")[0])
    numbers = re.findall(r"\.experts\.(\d+)\.", key) if getattr(module, "experts_without_weights", 0) else []
    return bool(numbers) and int(numbers[-1]) >= module.num_experts


def _tie(checkpoint: Checkpoint, tied: Mapping[str, str], routes: dict[str, _Route], ledger: Ledger) -> None:
    for target, source in tied.items():
        route = routes.pop(target, None)
        if route is None:
            continue
        keys = list(itertools.chain(*route.values()))
        if source in routes:
            ledger.ties |= dict.fromkeys(keys, target)
        elif None in route:  # transformers then ties the other way round
            routes[source] = route
            ledger.turned |= dict.fromkeys(keys, source)
        else:
            raise InputError(f"{checkpoint.name}: {keys[0]} is there without {source}, to which the model ties it")


class _Shapes:
    """Finds the shapes of what weights make, by transformers' conversions of tensors without values.

    A conversion of weights of the same shapes is tried once, for all layers.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, mapping: Sequence[WeightTransform]) -> None:
        from transformers.core_model_loading import WeightConverter

        self._checkpoint = checkpoint
        self._model = model
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        self._known: dict[Hashable, dict[str, tuple[int, ...]]] = {}

    def of(self, target: str, route: _Route) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that a route makes, `target` among them, by name."""
        if None in route:
            return {target: self._checkpoint.shape(route[None][0])}
        patterns = {pattern: keys for pattern, keys in route.items() if pattern is not None}
        if len({id(self._of_pattern[pattern]) for pattern in patterns}) > 1:
            first, other = (keys[0] for keys in list(patterns.values())[:2])
            raise InputError(f"{self._checkpoint.name}: {first} and {other} are both {target}: take one of them out")
        self._check_numbers(target, patterns)
        shapes = tuple((pattern, tuple(map(self._checkpoint.shape, keys))) for pattern, keys in patterns.items())
        numbers = re.findall(r"\d+", target)
        known = re.sub(r"\d+", "#", target), shapes
        if known not in self._known:
            made = self._convert(target, patterns)
            if any(re.findall(r"\d+", name) != numbers for name in made):
                return made
            self._known[known] = {re.sub(r"\d+", "#", name): shape for name, shape in made.items()}
        parts = ((name.split("#"), shape) for name, shape in self._known[known].items())
        return {
            "".join(itertools.chain(*itertools.zip_longest(between, numbers, fillvalue=""))): shape
            for between, shape in parts
        }

    def _convert(self, target: str, patterns: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
        converter: Any = copy.deepcopy(self._of_pattern[next(iter(patterns))])
        first = next(iter(patterns.values()))[0]
        for pattern, keys in patterns.items():
            for key in keys:
                tensor = torch.empty(self._checkpoint.shape(key), dtype=torch.bfloat16, device="meta")
                converter.add_tensor(target, key, pattern, tensor)
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except CODE_ERRORS as error:
            for keys in patterns.values():
                shapes = {key: list(self._checkpoint.shape(key)) for key in keys}
                usual, _ = Counter(map(str, shapes.values())).most_common(1)[0]
                for key, shape in shapes.items():
                    if str(shape) != usual:
                        others = f"those beside it, of {target}, are {usual}"
                        raise InputError(f"{self._checkpoint.name}: {key} is {shape}, {others}") from None
            raise InputError(f"{self._checkpoint.name}: {first} cannot be converted: {in_a_line(error)}") from None
        one = ((name, value[0] if isinstance(value, list) else value) for name, value in made.items())
        return {name: tuple(tensor.shape) for name, tensor in one}

    def _check_numbers(self, target: str, patterns: Mapping[str, Sequence[str]]) -> None:
        """Refuse a gap among weights that differ by one number, as experts do: transformers would close it up."""
        most = max(len(keys) for keys in patterns.values())
        for keys in patterns.values():
            rows = [re.split(r"(?<=\.)(\d+)(?=\.)", key) for key in keys]
            varying = [i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1]
            if len({len(row) for row in rows}) != 1 or len(varying) != 1 or not varying[0] % 2:
                continue
            (at,) = varying
            numbers = {row[at] for row in rows}
            lost = next((i for i in range(max(most, len(numbers))) if str(i) not in numbers), None)
            if lost is not None:
                name = "".join([*rows[0][:at], str(lost), *rows[0][at + 1 :]])
                raise InputError(f"{self._checkpoint.name}: {name} is missing, and {keys[-1]} is there, of {target}")


def _dtype(checkpoint: Checkpoint, target: str, keys: Sequence[str], floating: bool) -> torch.dtype | None:
    """The dtype that holds a floating-point parameter's weights, bit for bit; None of one that is not.

    Raises InputError for weights whose dtype would lose their values, or is that of codes without scales.
    """
    found = {checkpoint.dtype(key): key for key in reversed(keys)}
    for name, key in found.items():
        if (name in FLOATS) != floating and (floating or name.startswith(("F", "BF"))):
            kinds = f"numbers in {', '.join(FLOATS)}" if floating else "integers"
            raise InputError(f"{checkpoint.name}: {key} is {name}, and {target} takes {kinds}")
    if not floating:
        return None
    return FLOATS[next(iter(found))] if len(found) == 1 else torch.float32


def _another_shape(name: str, shape: tuple[int, ...], state: Mapping[str, Tensor], keys: Sequence[str]) -> str:
    if name not in state:
        return f"{keys[-1]} makes {name}, for which the model has no place"
    what = f"{keys[-1]} and {len(keys) - 1} others make {name}, which" if len(keys) > 1 else name
    return f"{what} has shape {shape}, its config says {tuple(state[name].shape)}"


def _leave_out(
    checkpoint: Checkpoint, model: PreTrainedModel, unplaced: Mapping[str, str], decoder_layers: int, ledger: Ledger
) -> None:
    config = model.config.get_text_config().to_dict()
    used = {key for keys in ledger.targets.values() for key in keys}
    multi_token = set(mtp_layers(unplaced, used, decoder_layers, config))
    # A class names the MTP layers of its released models by their numbers, for example `model.layers.61.*`. In another
    # model such a number is a decoder layer's, so these patterns count for nothing: `mtp_layers` knows MTP layers.
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [pattern for pattern in patterns if not re.search(r"layers\\?\.\d", pattern)]
    for key, target in unplaced.items():
        reason = next(_reasons(checkpoint, key, target, multi_token, used, ignored), None)
        if reason is None:
            raise InputError(f"{checkpoint.name}: {key} {_no_place(key, decoder_layers)}")
        ledger.left_out[key] = reason


def _reasons(
    checkpoint: Checkpoint, key: str, target: str, multi_token: set[str], used: set[str], ignored: Iterable[str]
) -> Iterator[str]:
    if key in multi_token:
        yield MTP
    if (why := _rule(key, checkpoint.shape(key))) is not None:
        yield why
    if any(re.search(pattern, name) for pattern in ignored for name in (key, target)):
        yield IGNORED
    # Packers of GPTQ write one for every matrix.
    if key.endswith(".bias") and f"{key.removesuffix('bias')}weight" in used and checkpoint.is_zero(key):
        yield ZERO


def _rule(tensor: str, shape: Shape) -> str | None:
    return next((why for why, pattern, fits in RULES if re.search(pattern, tensor) and fits(shape)), None)


def _no_place(key: str, decoder_layers: int) -> str:
    if (layer_of(key) or 0) >= decoder_layers:
        return f"is of a layer beyond the {decoder_layers} of config.json: correct its number of layers"
    return (
        "has no place in the model that config.json describes, and no rule leaves it out: correct config.json, "
        "upgrade transformers, or take the tensor out of the file"
    )
