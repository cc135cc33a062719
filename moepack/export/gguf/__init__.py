"""Files for llama.cpp."""

from .target import TARGET

__all__ = ["TARGET"]
