"""The plug-in that vLLM finds by its entry point (group `vllm.general_plugins`), in each of its processes.

This module imports nothing of vLLM. `register` may be called any number of times.
"""

from __future__ import annotations

import logging

from moepack.pack.errors import in_a_line
from moepack.runtime.planning.options import METHOD

log = logging.getLogger("moepack.engines")


def register() -> None:
    """Register the quantisation method that a bundle's config.json names.

    In a vLLM whose parts differ from those of 0.32, only log that: an error here would stop vLLM for every model.
    """
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from .vllm_config import BundleConfig

        register_quantization_config(METHOD)(BundleConfig)
    except Exception as error:  # parts that moved or changed raise errors of any class
        log.error(
            "this vLLM cannot serve bundles (%s): install vLLM 0.32, or serve what moepack export --to "
            "compressed-tensors writes; other models are served as before",
            in_a_line(error),
        )
