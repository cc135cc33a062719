"""Weights that a released checkpoint stores as codes and scales: read as native encodings, decoded, and written back.

One module a format says which tensors hold a weight (from config.json and headers); encoded.py reads and restores them.
What a bundle makes of the codes is not decided here.
"""

from .encoded import DAMAGED, Encoded, StoredPart
from .find import find_encoded, read_scheme

__all__ = ["DAMAGED", "Encoded", "StoredPart", "find_encoded", "read_scheme"]
