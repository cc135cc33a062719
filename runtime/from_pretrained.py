"""Teaches transformers' `from_pretrained` the keywords `policy` and `device_memory`, which it would hand to the model,
and lets the plug-in know what it was asked for.

Imported right after `transformers.modeling_utils` is (`moepack.hook` sees to that).
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from moepack.pack.errors import InputError
from moepack.runtime.planning.options import DEVICE_MEMORY, SERVED, WORKLOAD

KEYWORDS = set(SERVED) - set(WORKLOAD)
_kind: Any = PreTrainedModel
_original = _kind.from_pretrained.__func__


@functools.wraps(_original)
def _from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
    from .plugin import HUB, Asked, MoepackConfig, asked

    given = kwargs.get("quantization_config")
    ours = isinstance(given, MoepackConfig) or kwargs.keys() & KEYWORDS
    if ours or (os.environ.get(DEVICE_MEMORY) and kwargs.keys() & set(WORKLOAD)):
        if not isinstance(given, MoepackConfig | None):
            raise InputError(f"policy and device_memory are for bundles, and so is no {type(given).__name__}")
        mine = {} if given is None else given.given
        asks = {name: kwargs.pop(name) for name in SERVED if name in kwargs}
        kwargs["quantization_config"] = MoepackConfig(**{**mine, **asks})
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    experts = kwargs.get("experts_implementation") or getattr(kwargs.get("config"), "_experts_implementation", None)
    before = asked.set(Asked(str(name), {name: kwargs[name] for name in HUB if name in kwargs}, experts))
    try:
        return _original(cls, *args, **kwargs)
    finally:
        asked.reset(before)


_kind.from_pretrained = classmethod(_from_pretrained)
