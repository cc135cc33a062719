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
from moepack.runtime.planning.sizes import DEVICE_MEMORY

KEYWORDS = ("policy", "device_memory", "host_memory", "host_rate", "host_threads")
WORKLOAD = ("kv_tokens", "batch", "prefill_tokens", "all_logits")
_kind: Any = PreTrainedModel
_original = _kind.from_pretrained.__func__


@functools.wraps(_original)
def _from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
    from .plugin import HUB, Asked, MoepackConfig, asked

    given = kwargs.get("quantization_config")
    ours = isinstance(given, MoepackConfig) or kwargs.keys() & set(KEYWORDS)
    if ours or (os.environ.get(DEVICE_MEMORY) and kwargs.keys() & set(WORKLOAD)):
        if not isinstance(given, MoepackConfig | None):
            raise InputError(f"policy and device_memory are for bundles, and so is no {type(given).__name__}")
        mine = given.get_loading_attributes() if given is not None else {}
        mine |= {name: kwargs.pop(name) for name in KEYWORDS if name in kwargs}
        workload = {**mine.pop("workload", {}), **{name: kwargs.pop(name) for name in WORKLOAD if name in kwargs}}
        kwargs["quantization_config"] = MoepackConfig(**mine, workload=workload)
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    experts = kwargs.get("experts_implementation") or getattr(kwargs.get("config"), "_experts_implementation", None)
    before = asked.set(Asked(str(name), {name: kwargs[name] for name in HUB if name in kwargs}, experts))
    try:
        return _original(cls, *args, **kwargs)
    finally:
        asked.reset(before)


_kind.from_pretrained = classmethod(_from_pretrained)
