"""Write a bundle's weights in the forms of other programs."""

from .checkpoint import export_checkpoint
from .choice import Wanted
from .run import export

__all__ = ["Wanted", "export", "export_checkpoint"]
