"""The files of an export: tensors put in any order, whole files kept until the last, gone on with after a stop."""

from .shards import Entries, Files, TensorFiles, cut, sharded, tensor_bytes, tensor_file_bytes
from .work import Work, working

__all__ = ["Entries", "Files", "TensorFiles", "Work", "cut", "sharded", "tensor_bytes", "tensor_file_bytes", "working"]
