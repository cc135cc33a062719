"""The arguments of a forward pass by name, whether given by position or by name, and facts read from them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

# Names of a pass's cache, taken and returned: `cache` from transformers 5.24 on, the others before.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Bind arguments to names, with defaults for the others.

    Arguments that do not fit give the named ones alone: the forward itself raises the error.
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


def without_self(forward: Any) -> inspect.Signature:
    """The signature of a class's function without `self`."""
    whole = inspect.signature(forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def inputs(given: dict[str, Any]) -> Any:
    """A pass's input: [batch, tokens], or embeddings [batch, tokens, hidden]; None for neither."""
    found = given.get("input_ids")
    found = given.get("inputs_embeds") if found is None else found
    return found if found is not None and found.ndim >= 2 else None


def cache_of(given: dict[str, Any]) -> Any:
    """The cache that a pass continues."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


@functools.cache
def _cache_name(kind: Any) -> str:
    taken = inspect.signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), CACHE_NAMES[0])


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives a cache to a model's forward or `generate`."""
    kind: Any = type(model)
    return {_cache_name(kind): cache}


def cache_in(out: Any) -> Any:
    """The cache in the output object of a pass or a generation; None without one."""
    return next((getattr(out, name) for name in CACHE_NAMES if hasattr(out, name)), None)


def caches_in(out: Any) -> list[Any]:
    """The caches in a pass's result."""
    found = out if isinstance(out, tuple) else (cache_in(out),)
    return [made for made in found if hasattr(made, "get_seq_length")]


def uses_cache(config: Any, given: dict[str, Any]) -> bool:
    """Whether a pass without a cache creates one."""
    wanted = given.get("use_cache")
    return bool(getattr(config.get_text_config(), "use_cache", True) if wanted is None else wanted)
