"""The types of models that generate text, for annotations: the class of each is made of its family's own."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from .forward_wrapper import ForwardWrapper
from .serving import Serving


class CausalModel(PreTrainedModel):
    """A plain checkpoint's model, or a bundle's."""

    _supports_logits_to_keep: Callable[[], bool]


class ServedModel(CausalModel):
    """A bundle's model, as `load` returns it."""

    moepack: Serving
    _moepack_wrapper: ForwardWrapper
