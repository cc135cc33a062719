"""The files of a GGUF model: keys and values, tensors of ggml's types, in one file or split as llama.cpp does.

The gguf package writes what stands before the data. The data it would write in their order and at once; an export puts
them as they come, from several threads, and goes on where it was stopped.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import TensorInfo, WriterState

from moepack.pack.sections import align

from ..files import ExportDirectory, Files, cut

Type = GGMLQuantizationType
ALIGNMENT = GGUF_DEFAULT_ALIGNMENT
ARCHITECTURE = "general.architecture"
FILE = "model"

Metadata = Mapping[str, int | float | bool | str | Sequence[str] | Sequence[int]]


def block_of(kind: Type) -> int:
    """Weights of a type's block."""
    return GGML_QUANT_SIZES[kind][0]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: its type, and its shape with the columns last."""

    type: Type
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data. A row is whole blocks."""
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size


def headers(metadata: Metadata, parts: Sequence[Mapping[str, Tensor]]) -> list[bytes]:
    """All bytes before the data of each file, padded. The first file has the model's keys."""
    writer = GGUFWriter(None, str(metadata[ARCHITECTURE]))
    for key, value in metadata.items():
        if key != ARCHITECTURE and value != []:  # the writer has put the first, and takes no empty list
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    writer.tensors = [{name: TensorInfo(t.shape, t.type, t.bytes) for name, t in part.items()} for part in parts]
    files = [io.BytesIO() for _ in parts]
    writer.fout = cast("list[io.BufferedWriter]", files)
    writer.state = WriterState.EMPTY  # as if it had opened them
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return [file.getvalue() + bytes(-file.tell() % ALIGNMENT) for file in files]


def size_of(metadata: Metadata, tensors: Mapping[str, Tensor], most: int) -> int:
    """Bytes of the files of a model, each of at most `most`, but for one tensor that is larger."""
    heads = headers(metadata, _parts(tensors, most))
    return sum(map(len, heads)) + sum(align(t.bytes, ALIGNMENT) for t in tensors.values())


def open_files(
    work: ExportDirectory, folder: str, metadata: Metadata, tensors: Mapping[str, Tensor], most: int
) -> Files:
    """Create the GGUF files of a model, to be filled, in a folder of a working directory."""
    parts = _parts(tensors, most)
    count = len(parts)
    names = [f"{FILE}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)] if count > 1 else [f"{FILE}.gguf"]
    heads = dict(zip(names, headers(metadata, parts), strict=True))
    sizes = {file: {name: t.bytes for name, t in part.items()} for file, part in zip(names, parts, strict=True)}
    return Files(work, folder, sizes, heads.__getitem__, ALIGNMENT)


def _parts(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    return cut(tensors, lambda t: align(t.bytes, ALIGNMENT), most)
