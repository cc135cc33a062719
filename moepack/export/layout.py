"""How a model's own checkpoints keep its tensors: under which names, and which rows of which matrix each holds.

transformers knows how to undo its loading (`save_pretrained` does). Here it undoes it on row numbers in place of
weights, so that a writer can take one expert at a time. No weight is read here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.calibrate.experts import parameter_names
from moepack.families.layouts import conversions_of
from moepack.families.model_class import meta_model
from moepack.pack.errors import CODE_ERRORS, InputError, in_a_line
from moepack.pack.safetensors_file import DTYPES
from moepack.pack.spec import DenseMatrix

from .files import Entries

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

_STORED = {getattr(torch, name): stored for stored, (_, name, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the checkpoint: rows of a matrix, or of its bias."""

    name: str
    shape: tuple[int, ...]
    matrix: int  # the matrix's index in its expert; 0 of a dense matrix
    bias: bool  # whether it is of the matrix's bias, [rows]
    expert: int | None  # None: all experts of the layer along the first axis
    rows: Tensor | slice  # int64, the rows of the matrix in their order here; a slice where they follow one another
    count: int  # of them
    transposed: bool  # whether it is [.., cols, rows]

    @property
    def linear(self) -> bool:
        """Whether it is the weight [rows, cols] of a Linear, for which formats have codes."""
        return not (self.bias or self.transposed or self.expert is None) and self.name.endswith(".weight")

    def cut(self, values: Tensor) -> Tensor:
        """This tensor, or an expert's part of it with a first axis of 1, from a matrix [rows, n] or a bias [rows]."""
        own = values[self.rows]
        own = own.mT.contiguous() if self.transposed else own
        return own[None] if self.expert is None else own


class Layout:
    """The layout of a bundle's model. Raises InputError for a model whose loading transformers does not undo."""

    def __init__(self, bundle: Bundle) -> None:
        from transformers import AutoConfig

        self._lock = threading.Lock()  # transformers' conversions hold what they convert
        self._bundle = bundle
        self.config = AutoConfig.from_pretrained(bundle.path)
        del self.config.quantization_config
        self.model = meta_model(self.config, bundle.path)
        if conversions_of(self.model):
            raise self._bad("its experts are kept in a form that only moepack loads")

    def _bad(self, why: str) -> InputError:
        return InputError(f"{self._bundle.path}: {self.config.model_type} is not exported: {why}")

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors of some of the model's, by name. Names that the model does not know stay."""
        from transformers.core_model_loading import revert_weight_conversion

        own = {n: t for n, t in tensors.items() if n in self._names}
        try:
            with self._lock:
                made = revert_weight_conversion(self.model, own) if own else {}
        except CODE_ERRORS as error:
            raise self._bad(f"transformers cannot reverse its loading: {in_a_line(error)}") from error
        return made | {n: t for n, t in tensors.items() if n not in self._names}

    @cached_property
    def _names(self) -> set[str]:
        return set(self.model.state_dict())

    @cached_property
    def experts(self) -> Callable[[int], tuple[CheckpointTensor, ...]]:
        """Finds the tensors that hold the experts of the layer at a position; keeps those of one layer."""
        return lru_cache(maxsize=1)(self._experts)

    def _experts(self, position: int) -> tuple[CheckpointTensor, ...]:
        layer = self._bundle.layers[position]
        out = list[CheckpointTensor]()
        module: Any = self.model.get_submodule(layer.module)
        for m, pair in enumerate(parameter_names(module).values()):
            for bias, name in enumerate(n for n in pair if n is not None):
                rows = layer.matrices[m].rows
                tags = torch.arange(layer.experts * rows).reshape(layer.experts, rows)
                if not bias:
                    tags = tags[:, None] if module.is_transposed else tags[..., None]
                cols = 0 if bias else layer.matrices[m].cols
                found = self.revert({f"{layer.module}.{name}": tags})
                out += [self._piece(n, t, m, rows, cols) for n, t in found.items()]
        held = sum(p.count * (layer.experts if p.expert is None else 1) for p in out)
        if held != layer.experts * sum(m.rows * (1 + m.bias) for m in layer.matrices):
            raise self._bad("transformers saves rows of its experts twice, or not at all")
        return tuple(out)

    def _piece(self, name: str, tags: Tensor, matrix: int, rows: int, cols: int) -> CheckpointTensor:
        """Read where rows went. `cols` is 0 for a bias."""
        transposed = bool(cols) and tags.shape[-1] != 1
        flat = tags
        if cols:
            flat = tags[..., 0, :] if transposed else tags[..., 0]
        whole = flat.ndim == 2
        experts = flat // rows
        own = flat % rows
        first = own[0] if whole else own
        wanted = torch.arange(len(flat))[:, None] if whole else experts[:1]
        if flat.ndim > 2 or not bool((experts == wanted).all()) or not bool((own == first).all()):
            raise self._bad(f"{name} mixes rows of several experts")
        shape = (*flat.shape[:-1], *((cols, flat.shape[-1]) if transposed else (flat.shape[-1], cols)))
        shape = tuple(flat.shape) if not cols else shape
        expert = None if whole else int(experts[0])
        return CheckpointTensor(name, shape, matrix, not cols, expert, _span(first), len(first), transposed)

    def linear(self, dense: DenseMatrix) -> CheckpointTensor:
        """The tensor that holds a dense matrix. Raises InputError if that is not one Linear's weight of its own."""
        m = dense.matrix
        found = self.revert({f"{dense.module}.weight": torch.arange(m.rows)[:, None]})
        name, tags = next(iter(found.items()))
        if len(found) != 1 or tuple(tags.shape) != (m.rows, 1) or not name.endswith(".weight"):
            raise self._bad(f"its checkpoints do not keep {dense.module} as one matrix: leave --dense out")
        return CheckpointTensor(name, (m.rows, m.cols), 0, False, 0, _span(tags[:, 0]), m.rows, False)

    def groups(self, coded: Sequence[DenseMatrix]) -> Iterator[list[str]]:
        """Names of the bundle's tensors outside the experts, those together that the checkpoint may have joined.

        `coded` are matrices that a writer takes by itself; their biases are in the groups.
        """
        names = list(self._bundle.dense())
        left = {d.module for d in coded}
        for d in self._bundle.manifest.dense:
            names += [] if d.module in left else [f"{d.module}.weight"]
            names += [f"{d.module}.bias"] if d.matrix.bias else []
        out: dict[str, list[str]] = {}
        for name in names:
            numbered = re.match(r".*?\.\d+\.", name)
            out.setdefault(numbered[0] if numbered else name.rpartition(".")[0], []).append(name)
        yield from out.values()

    def outline(self, names: Sequence[str]) -> Entries:
        """The checkpoint's tensors of a group, as `groups` yields it."""
        dense = self._bundle.dense()
        made = dict[str, Tensor]()
        matrices = {d.module: d.matrix for d in self._bundle.manifest.dense}
        for name in names:
            module, _, leaf = name.rpartition(".")
            if name in dense:
                dtype = getattr(torch, DTYPES[dense.dtype(name)][1])
                shape = dense[name]
            else:
                m = matrices[module]
                dtype = torch.bfloat16
                shape = (m.rows,) if leaf == "bias" else (m.rows, m.cols)
            made[name] = torch.empty(shape, dtype=dtype, device="meta")
        return {n: (_STORED[t.dtype], tuple(t.shape)) for n, t in self.revert(made).items()}


def _span(rows: Tensor) -> Tensor | slice:
    begin = int(rows[0]) if len(rows) else 0
    return slice(begin, begin + len(rows)) if bool((rows == torch.arange(begin, begin + len(rows))).all()) else rows
