"""The arguments of a forward pass by their names, however they were given; and what can be read from them."""

from __future__ import annotations

import inspect
from typing import Any


def bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the defaults of those that were not given.

    Of arguments that do not fit, the named ones: the forward itself will say what is wrong.
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
    """The signature of a class's function as its objects have it."""
    whole = inspect.signature(forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def inputs(given: dict[str, Any]) -> Any:
    """What a pass reads: [batch, tokens], or embeddings [batch, tokens, hidden]; None where it is neither."""
    found = given.get("input_ids")
    found = given.get("inputs_embeds") if found is None else found
    return found if found is not None and found.ndim >= 2 else None


def cache_of(given: dict[str, Any]) -> Any:
    """The cache that a pass goes on with."""
    cache = given.get("past_key_values")
    return given.get("cache_params") if cache is None else cache


def caches_in(out: Any) -> list[Any]:
    """The caches that a pass's result holds."""
    found = out if isinstance(out, tuple) else (getattr(out, "past_key_values", None),)
    return [made for made in found if hasattr(made, "get_seq_length")]


def uses_cache(config: Any, given: dict[str, Any]) -> bool:
    """Whether a pass without a cache makes one."""
    wanted = given.get("use_cache")
    return bool(getattr(config.get_text_config(), "use_cache", True) if wanted is None else wanted)
