"""The plug-in that vLLM finds by its entry point (group `vllm.general_plugins`), in each of its processes.

This module imports nothing of vLLM. `register` may be called any number of times.
"""

from __future__ import annotations

from moepack.runtime.planning.options import METHOD


def register() -> None:
    """Register the quantisation method that a bundle's config.json names."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .vllm_config import BundleConfig

    register_quantization_config(METHOD)(BundleConfig)
