"""What bits cost on both sides: of the same matrices and second moments, error and divergence by bits a weight.

moepack quantises by its default method from the moments; ggml's types get the moments' diagonal as importance, an
expert at a time, as llama.cpp's imatrix has it. Values that come back are compared, not kernels: llama.cpp also rounds
activations to 8 bits when it multiplies, which is left out here, in its favour.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.decoding import Mean
from benchmarks.quantise import ENOUGH, Case, generated
from moepack.pack.spec import Matrix, Version, version_names
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import DEFAULT, quantise_all
from moepack.quantize.moments import NEGLIGIBLE, PRIOR, shrink
from moepack.runtime.kernels.forms import resident_size

from .ggml_types import TYPES
from .worker import PeerError, Worker

OURS = ("w8", "w4", "w3", "w2")
THEIRS = ("Q8_0", "Q4_K", "IQ4_XS", "IQ4_NL", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XXS")
LENGTH = 256  # tokens of a window
Values = Callable[[Tensor, Tensor], Tensor]  # weights and moments to what comes back


@dataclass(frozen=True)
class Encoding:
    """One way to store weights, on either side."""

    who: str
    name: str
    bits: float
    values: Values
    block: int


class Watched:
    """Second moments of what the experts of one layer see, added up while the model runs.

    Attributes:
        module: the layer's experts, a transformers module that holds all of them in two tensors.
        sums: of gate and up's inputs and of down's, float32 [experts, cols, cols].
        counts: int64 [experts].
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        experts = module.gate_up_proj.shape[0]
        self.sums = [torch.zeros(experts, w.shape[2], w.shape[2]) for w in self.weights()]
        self.counts = torch.zeros(experts, dtype=torch.int64)

    def weights(self) -> list[Tensor]:
        """Gate and up's, and down's: [experts, rows, cols]."""
        return [self.module.gate_up_proj.data, self.module.down_proj.data]

    def see(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        hidden, index = arguments[0].reshape(-1, arguments[0].shape[-1]), arguments[1]
        for expert in index.unique().tolist():
            if expert >= len(self.counts):
                continue
            x = hidden[(index == expert).any(-1)]
            gate, up = torch.nn.functional.linear(x, module.gate_up_proj[expert]).chunk(2, dim=-1)
            act = module.act_fn(gate) * up
            self.sums[0][expert].addmm_(x.T, x)
            self.sums[1][expert].addmm_(act.T, act)
            self.counts[expert] += len(x)

    def moments(self, which: int) -> Tensor:
        """Mean second moments, [experts, cols, cols]; an expert with next to no tokens leans on the layer's."""
        total = self.sums[which].sum(0) / self.counts.sum()
        prior, out = PRIOR * total.shape[-1], []
        for e, count in enumerate(self.counts.tolist()):
            own = self.sums[which][e] / max(1, count)
            out.append(shrink(own, count, total, prior) if count < NEGLIGIBLE * prior else own)
        return torch.stack(out)


def watched(model: Any, ids: Tensor) -> list[Watched]:
    """Run the windows [windows, tokens] through the model and see what its experts see.

    Raises:
        PeerError: when the model does not keep its experts as expected.
    """
    layers = [Watched(m) for m in model.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]
    if not layers:
        raise PeerError(f"{type(model).__name__} does not keep its experts in gate_up_proj and down_proj")
    hooks = [layer.module.register_forward_pre_hook(layer.see) for layer in layers]
    with torch.inference_mode():
        for window in ids:
            model(window[None], logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return layers


def encodings(group_size: int, llama: Worker | None, scratch: Path) -> list[Encoding]:
    """Both sides' encodings, with what each takes of a matrix of 2,048 columns."""
    m, out = Matrix("m", 1024, 2048), []
    for name in OURS:
        if name in version_names():
            version = Version.of(name, group_size)
            bits = 8 * resident_size((m,), version) / m.weights
            out.append(Encoding("moepack", name, bits, partial(_ours, version), 1))
    if llama is not None:
        for name in THEIRS:
            out.append(
                Encoding("llama.cpp", name, TYPES[name].bits, partial(_theirs, llama, name, scratch), TYPES[name].block)
            )
    return out


def _ours(version: Version, weight: Tensor, moments: Tensor) -> Tensor:
    return dequantise(quantise_all(DEFAULT, weight, moments, [version])[version], version)


def _theirs(llama: Worker, name: str, scratch: Path, weight: Tensor, moments: Tensor) -> Tensor:
    importance = moments.diagonal(dim1=-2, dim2=-1)
    np.savez(scratch / "weights.npz", weight=weight.numpy(), importance=importance.numpy())
    llama.call("quantised", path=str(scratch / "weights.npz"), out=str(scratch / "values.npy"), encoding=name)
    return torch.from_numpy(np.load(scratch / "values.npy"))


def errors(case: Case, values: Tensor) -> list[float]:
    """Relative output errors on the held-out moments, one an expert."""
    wrong = case.weight - values
    lost = ((wrong @ case.held_out) * wrong).sum((1, 2))
    return (lost / ((case.weight @ case.held_out) * case.weight).sum((1, 2))).tolist()


def of_generated(shapes: Sequence[tuple[int, int]], every: Sequence[Encoding]) -> list[dict[str, Any]]:
    """Errors on generated matrices of true shape: a row an encoding."""
    cases = [generated(rows, cols) for rows, cols in shapes]
    out = []
    for e in every:
        if all(case.weight.shape[2] % e.block == 0 for case in cases):
            got = [x for case in cases for x in errors(case, e.values(case.weight, case.learn))]
            out.append({"model": "generated", "who": e.who, "encoding": e.name, "bits/weight": e.bits,
                        "error": statistics.geometric_mean(got)})  # fmt: skip
    return out


def of_model(
    checkpoint: Path, calibration: list[str], data: list[str], windows: tuple[int, int], every: Sequence[Encoding]
) -> list[dict[str, Any]]:
    """Errors and divergence on a trained model: a row an encoding.

    Matrices that no K-quant fits (rows that are not whole blocks of 256) stay as they are on both sides, where there
    are others; where there are none all are quantised, and encodings that do not fit are left out.

    Args:
        checkpoint: a small Qwen3-MoE, run in float32.
        calibration: texts for moments.
        data: texts for errors and divergence.
        windows: how many of each.
        every: the encodings.
    """
    from transformers import AutoModelForCausalLM

    from moepack.calibrate.data import calibration_windows, load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    tokenizer = load_tokenizer(checkpoint)
    learn = watched(model, calibration_windows(calibration, tokenizer, windows[0], LENGTH, 0).ids)
    ids = calibration_windows(data, tokenizer, windows[1], LENGTH, 0).ids
    held = watched(model, ids)
    reference = _log_probabilities(model, ids)
    widths = [w.shape[2] for w in learn[0].weights()]
    block = TYPES["Q4_K"].block if any(TYPES["Q4_K"].fits(n) for n in widths) else 1
    chosen = [i for i, n in enumerate(widths) if n % block == 0]
    parts = "gate and up" if chosen == [0] else "all experts' matrices"
    out = []
    for e in every:
        if any(widths[i] % e.block for i in chosen):
            continue
        got: list[float] = []
        kept = []
        for seen, later in zip(learn, held, strict=True):
            enough = later.counts >= ENOUGH
            for i in chosen:
                weight = seen.weights()[i]
                values = e.values(weight, seen.moments(i))
                case = Case(weight[enough], weight[enough], later.moments(i)[enough])
                got += errors(case, values[enough])
                kept.append((weight, weight.clone()))
                weight.copy_(values)
        divergence = _divergence(model, ids, reference)
        for weight, before in kept:
            weight.copy_(before)
        out.append(
            {
                "model": checkpoint.name,
                "quantised": parts,
                "who": e.who,
                "encoding": e.name,
                "bits/weight": e.bits,
                "error": statistics.geometric_mean(got),
                "KL, mnat": 1e3 * divergence.value,
                "+-": 1e3 * divergence.half,
            }
        )
    return out


def _log_probabilities(model: Any, ids: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [torch.log_softmax(model(window[None]).logits[0].float(), -1) for window in ids]


def _divergence(model: Any, ids: Tensor, reference: list[Tensor]) -> Mean:
    """Of the model's own distribution from the one it has now, nats a token, windows being the sample."""
    out = []
    with torch.inference_mode():
        for window, best in zip(ids, reference, strict=True):
            logs = torch.log_softmax(model(window[None]).logits[0].float(), -1)
            out.append(float((best.exp() * (best - logs)).sum(-1).mean()))
    return Mean.of(out)
