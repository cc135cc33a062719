"""The files of an export: tensors put in any order, whole files kept until the last, gone on with after a stop."""

from .shards import Entries, Files, TensorFiles, Workers, cut, sharded, tensor_bytes, tensor_file_bytes
from .work import ExportDirectory, working

__all__ = [
    "Entries",
    "ExportDirectory",
    "Files",
    "TensorFiles",
    "Workers",
    "cut",
    "sharded",
    "tensor_bytes",
    "tensor_file_bytes",
    "working",
]
