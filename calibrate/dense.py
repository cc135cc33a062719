"""Find a model's dense matrices that may have versions, and collect their second moments in calibration.

Two second moments of a matrix's inputs are kept: of tokens to learn from, and of held-out windows. With the latter the
matrix's error is the trace of a product and needs no outputs. Matrices with the same input (q, k, v) share both.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moepack.pack.errors import NotFiniteError
from moepack.pack.spec import LOSSLESS, MAX_EXTENT, PAGE, DenseMatrix, Matrix, Version, is_dense

from .finite import not_finite

if TYPE_CHECKING:
    from .stream import StreamedModel

HELD_OUT = 4  # one window in four is held out
TOKENS = 1 << 16  # approximate number to learn from: bounds the time; its effect on the error is not measured
SPARE = 16  # the fewest tokens to learn from, per column
# Share of a matrix's relative error that reaches its block's output if other operations follow. On tiny-qwen3-moe at 4
# bits, by KL divergence against o's and the experts' errors of the same layer: q 0.39, k 0.49, v 0.44, geometric means
# over six layers.
PASSED = 0.4


def dense_matrices(stream: StreamedModel) -> tuple[DenseMatrix, ...]:
    """List the decoder layers' Linears outside experts and routers in model order, then an untied output projection.

    Small Linears and those kept in float32 are left out."""
    model = stream.model
    tied = set(model.all_tied_weights_keys)
    head = model.get_output_embeddings()
    inside = tuple(f"{layer.module}." for layer in stream.expert_layers.values())
    out: list[DenseMatrix] = []
    for name, module in model.named_modules():
        layer = stream.layer_of(name)
        if type(module) is not torch.nn.Linear or (layer is None and module is not head) or name.startswith(inside):
            continue
        rows, cols = module.weight.shape
        matrix = Matrix("weight", rows, cols, module.bias is not None)
        weight = f"{name}.weight"
        fits = is_dense(name, rows, cols) and matrix.weights * 2 + 64 * PAGE <= MAX_EXTENT
        owned = weight not in tied and stream.is_low_precision(weight)
        if fits and owned:
            out.append(DenseMatrix(layer, name, matrix))
    return tuple(sorted(out, key=lambda m: len(stream.layers) if m.layer is None else m.layer))


def native_dense(stream: StreamedModel) -> Version:
    """The version that keeps the most weights of dense matrices as released; bf16 if none does.

    A version that experts have in other groups is none: a recipe has one group size for both.
    """
    own = stream.native
    weights = Counter[Version]()
    for matrix in dense_matrices(stream):
        version = stream.dense_versions.get(matrix.module)
        if version is not None and (version == own or version.name != own.name):
            weights[version] += matrix.matrix.weights
    return max(weights, key=weights.__getitem__, default=Version.of(LOSSLESS))


@dataclass(frozen=True)
class DenseMoments:
    """Second moments of the inputs of the dense matrices of a part (a decoder layer, or all else)."""

    # `learn`, `held`: for each group of matrices with the same input, E[x x^T] over tokens to learn from and held-out
    # tokens, float32 [cols, cols]; without held-out windows, `held` is `learn`.
    learn: tuple[Tensor, ...]
    held: tuple[Tensor, ...]
    group: Mapping[str, int]  # module -> index of its group; modules that were never called are missing
    # Module -> the mean square that a relative error of 1 is taken to add to an element of the hidden state: the mean
    # square of the output of the matrix's block (attention, the MLP), times PASSED unless the matrix makes that output.
    # For the output projection it is the mean square of its input.
    signal: Mapping[str, float]
    tokens: int  # tokens that went through the part

    def of(self, module: str) -> tuple[Tensor, Tensor]:
        """Return the moments that a matrix is fitted to, and the moments that its error is measured on."""
        return self.learn[self.group[module]], self.held[self.group[module]]


class DenseWatch:
    """Collects second moments of the inputs of one part's dense matrices while batches go through the part."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        blocks: Mapping[str, nn.Module],
        windows: int,
        length: int,
        sums: bool = True,
    ) -> None:
        """`modules`: the matrices' Linears by name; `blocks`: by the same names, the block (attention, MLP) of each.

        Without `sums` it only sees which modules are called; all share one moment of zero, float32 [1, 1]."""
        self._modules = modules
        self._blocks = blocks
        self._windows = windows
        self._length = length
        # For each group (same input): sums of x x^T over tokens to learn from and held-out ones, and their numbers.
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._counts: list[list[int]] = []
        self._of: dict[str, int] = {}
        self._owner: dict[int, str] = {}  # group -> the module at which the group's inputs are summed
        self._now: list[tuple[weakref.ref[Tensor], int]] = []
        self._power: dict[int, tuple[float, int]] = {}
        self._made: list[tuple[weakref.ref[Tensor], str]] = []
        self._last: set[str] = set()  # modules whose output is their block's
        self._first = 0  # windows of the finished batches
        self._makes_sums = sums
        if not sums:
            self._sums = [(torch.zeros(1, 1), torch.zeros(1, 1))]
            self._counts = [[0, 0]]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect the moments of the modules' inputs inside the context."""
        hooks = []
        for name, m in self._modules.items():
            hooks.append(m.register_forward_pre_hook(lambda m, args, n=name: self._read(n, args[0])))
            hooks.append(m.register_forward_hook(lambda m, args, out, n=name: self._made.append((weakref.ref(out), n))))
        for block in {id(b): b for b in self._blocks.values()}.values():
            hooks.append(block.register_forward_hook(lambda m, args, out: self._added(id(m), out)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def batch(self, windows: int) -> None:
        """Note that a batch of `windows` windows has ended."""
        self._first += windows
        self._now.clear()
        self._made.clear()

    def _read(self, name: str, x: Tensor) -> None:
        if not self._makes_sums:
            self._of[name] = 0
            return
        group = self._of.get(name)
        if group is None:
            group = next((g for ref, g in self._now if ref() is x), len(self._sums))
            if group == len(self._sums):
                empty = torch.zeros(x.shape[-1], x.shape[-1], device=x.device)
                self._sums.append((empty, empty.clone()))
                self._counts.append([0, 0])
                self._owner[group] = name
                self._now.append((weakref.ref(x), group))
            self._of[name] = group
        if self._owner[group] != name:
            return
        flat = x.detach().reshape(-1, x.shape[-1])
        wanted = max(TOKENS, SPARE * flat.shape[1]) * HELD_OUT // (HELD_OUT - 1)
        step = max(1, self._windows * self._length // wanted)
        at = torch.arange(0, len(flat), step, device=flat.device)
        held = (self._first + at // self._length) % HELD_OUT == HELD_OUT - 1
        for i, tokens in enumerate((at[~held], at[held])):
            part = flat[tokens].float()
            self._sums[group][i].addmm_(part.T, part)
            self._counts[group][i] += len(tokens)

    def _added(self, block: int, out: Tensor | tuple[Tensor, ...]) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        self._last |= {name for ref, name in self._made if ref() is tensor}
        total, count = self._power.get(block, (0.0, 0))
        self._power[block] = total + float(tensor.detach().float().square().sum()), count + tensor.numel()

    @torch.inference_mode()
    def moments(self) -> DenseMoments:
        """Divide the collected sums in place to give the moments: call this once."""
        pairs = list(zip(self._sums, self._counts, strict=True))
        learn = tuple(sums[0].div_(max(1, n)).cpu() for sums, (n, _) in pairs)
        held = tuple(sums[1].div_(n).cpu() if n else m for (sums, (_, n)), m in zip(pairs, learn, strict=True))
        for name, group in self._of.items():
            if not_finite(learn[group]) or not_finite(held[group]):
                raise NotFiniteError(name, "reads inputs whose squares are beyond float32 in calibration")
        signal = {}
        for name, group in self._of.items():
            total, count = self._power.get(id(self._blocks.get(name)), (0.0, 0))
            if count:
                signal[name] = total / count * (1.0 if name in self._last else PASSED)
            else:
                signal[name] = float(learn[group].diagonal().mean())
        return DenseMoments(learn, held, dict(self._of), signal, self._first * self._length)


def watch_part(
    stream: StreamedModel, matrices: Sequence[DenseMatrix], windows: int, length: int, sums: bool = True
) -> DenseWatch:
    """Make the DenseWatch of a part's matrices. A block is a direct child of a decoder layer."""
    modules = {m.module: stream.model.get_submodule(m.module) for m in matrices}
    blocks = {}
    for m in matrices:
        if m.layer is not None:
            inner = m.module.removeprefix(f"{stream.prefix}.{m.layer}.")
            blocks[m.module] = stream.layers[m.layer].get_submodule(inner.split(".")[0])
    return DenseWatch(modules, blocks, windows, length, sums)


def save_moments(moments: DenseMoments) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Convert moments to the tensors and metadata that `load_moments` reads."""
    tensors = {f"learn.{i}": m for i, m in enumerate(moments.learn)}
    tensors |= {f"held.{i}": m for i, m in enumerate(moments.held)}
    facts = {"group": dict(moments.group), "signal": dict(moments.signal), "tokens": moments.tokens}
    return tensors, {"facts": json.dumps(facts)}


def load_moments(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> DenseMoments:
    """Read the result of `save_moments`."""
    facts = json.loads(metadata["facts"])
    learn, held = (tuple(tensors[f"{k}.{i}"] for i in range(len(tensors) // 2)) for k in ("learn", "held"))
    return DenseMoments(learn, held, facts["group"], facts["signal"], facts["tokens"])
