"""Write a bundle's weights in the forms of other programs."""

from .checkpoint import export_checkpoint

__all__ = ["export_checkpoint"]
