"""Find a forward pass's arguments by name, however they were passed, and its KV cache in them or in its output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache, PreTrainedConfig

# Names of the KV cache among a pass's arguments and in its output: `cache` since transformers 5.24, the others before.
Given = dict[str, Any]  # a pass's arguments by name
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Arguments of attention functions that say what caches, masks and order of tokens say already, or what else to return.
SAID = (
    "dropout",
    "is_causal",
    "sliding_window",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "output_router_logits",
    "cache_position",
    "logits_to_keep",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


REGISTRY = "ALL_ATTENTION_FUNCTIONS"  # transformers' table of attention functions, as models' code names it


def own_forward(module: nn.Module) -> FunctionType | None:
    """Return a module's forward without decorators; None if it is not its class's, or no function of Python's."""
    function = inspect.unwrap(type(module).forward)
    if "forward" in module.__dict__ or not isinstance(function, FunctionType):
        return None
    return function


def attends_by_name(module: nn.Module) -> bool:
    """Whether a module's own code asks transformers' table for its attention function."""
    function = own_forward(module)
    if function is None or REGISTRY not in function.__code__.co_names:
        return False
    return hasattr(function.__globals__.get(REGISTRY), "get_interface")


def bound(signature: inspect.Signature, args: tuple[object, ...], kwargs: Given) -> Given:
    """Bind arguments to names, with defaults for the missing ones.

    If they do not fit the signature, return only those passed by name: the forward itself raises the error.
    """
    try:
        found = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    found.apply_defaults()
    given = dict(found.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name)
    return given


def without_self(forward: Callable[..., object]) -> inspect.Signature:
    """The signature of a method, taken from its class, without `self`."""
    whole = inspect.signature(forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def inputs(given: Given) -> Any:
    """A pass's input: token ids [batch, tokens], or embeddings [batch, tokens, hidden]; None without either."""
    found = given.get("input_ids")
    found = given.get("inputs_embeds") if found is None else found
    return found if found is not None and found.ndim >= 2 else None


def cache_of(given: Given) -> Cache | None:
    """The KV cache that a pass was given; None without one."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


@functools.cache
def _cache_name(kind: Any) -> str:
    taken = inspect.signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), CACHE_NAMES[0])


def with_cache(model: nn.Module, cache: Cache | None) -> dict[str, object]:
    """The keyword argument that passes a KV cache to a model's forward or `generate`."""
    kind: Any = type(model)
    return {_cache_name(kind): cache}


def cache_in(out: object) -> Cache | None:
    """The KV cache in the output object of a pass or of `generate`; None without one."""
    return next((getattr(out, name) for name in CACHE_NAMES if hasattr(out, name)), None)


def caches_in(out: object) -> list[Cache]:
    """The KV caches in a pass's output, which is a tuple or an output object."""
    found = out if isinstance(out, tuple) else (cache_in(out),)
    return [made for made in found if hasattr(made, "get_seq_length")]


def uses_cache(config: PreTrainedConfig, given: Given) -> bool:
    """Whether a pass that was given no KV cache creates one: by its `use_cache`, or else by the configuration."""
    wanted = given.get("use_cache")
    return bool(getattr(config.get_text_config(), "use_cache", True) if wanted is None else wanted)


def unknown_to_attention(given: Given) -> list[str]:
    """Return the further arguments of an attention function that may change its results: those set, and not in SAID."""
    return [n for n, value in given.items() if n not in SAID and value is not None and value is not False]
