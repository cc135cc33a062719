"""What bits cost on both sides: of the same matrices and second moments, error and divergence by bits a weight.

moepack quantises by its default method from the moments; ggml's types get the moments' diagonal as importance, an
expert at a time, as llama.cpp's imatrix has it. Values that come back are compared, not kernels: llama.cpp also rounds
activations to 8 bits when it multiplies, which is left out here, in its favour.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, QK_K, GGMLQuantizationType
from torch import Tensor, nn

from benchmarks.common import Row
from benchmarks.decoding import Mean, divergence
from benchmarks.quantise import GROUP, LENGTH, generated, of_checkpoint
from moepack.pack.spec import Matrix, Version
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import DEFAULT, quantise_all

from .gguf_layout import ATTENTION, type_of
from .worker import PeerError, Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel


OURS = ("w8", "w4", "w3", "w2")
# As users run them, experts and attention: pairs of versions, and llama.cpp's mixes and their experts' type.
PAIRS = (("w4", "w8"), ("w4", "w4"), ("w2", "w8"), ("w2", "w4"))
SERVED = {"Q4_K_M": ("Q4_K_M", "Q4_K"), "Q2_K mix": ("Q2_K", "Q2_K")}
THEIRS = ("Q8_0", "Q6_K", "Q4_K", "IQ4_XS", "IQ4_NL", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XXS")
Values = Callable[[Tensor, Tensor], Tensor]  # weights and moments to what comes back


@dataclass(frozen=True)
class Encoding:
    """One way to store weights, on either side."""

    who: str
    name: str
    bits: float
    values: Values
    block: int


class WatchedLinear:
    """Second moments of what a matrix outside the experts sees, added up while the model runs.

    Attributes:
        module: the Linear.
        types: by mix of llama.cpp, the name of its type there.
    """

    def __init__(self, module: torch.nn.Linear, types: dict[str, str]) -> None:
        self.module = module
        self.types = types
        self._sum = torch.zeros(1, module.in_features, module.in_features)
        self._count = 0

    def see(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """A forward pre-hook."""
        x = arguments[0].reshape(-1, arguments[0].shape[-1])
        self._sum[0].addmm_(x.T, x)
        self._count += len(x)

    def moments(self) -> Tensor:
        """Mean second moments, [1, cols, cols]."""
        return self._sum / self._count


def watch(model: PreTrainedModel, ids: Tensor, linears: Sequence[WatchedLinear]) -> None:
    """Run the windows [windows, tokens] through the model and let matrices see their inputs."""
    hooks = [seen.module.register_forward_pre_hook(seen.see) for seen in linears]
    with torch.inference_mode():
        for window in ids:
            model(window[None], logits_to_keep=1)
    for hook in hooks:
        hook.remove()


def attention(model: PreTrainedModel) -> list[WatchedLinear]:
    """The matrices of a Qwen3's attention."""
    layers = model.model.layers
    out = []
    for i, layer in enumerate(layers):
        for part, name in ATTENTION.items():
            types = {mix: type_of(part, i, len(layers), mix) for mix, _ in SERVED.values()}
            out.append(WatchedLinear(getattr(layer.self_attn, name), types))
    return out


def encodings(llama: Worker | None, scratch: Path) -> list[Encoding]:
    """Both sides' encodings, with what each takes of a matrix of 2,048 columns."""
    m = Matrix("m", 1024, 2048)
    out = []
    for name in OURS:
        version = Version.of(name, GROUP)
        bits = 8 * version.resident_size((m,)) / m.weights
        out.append(Encoding("moepack", name, bits, partial(_ours, version), 1))
    if llama is not None:
        for name in THEIRS:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
            out.append(Encoding("llama.cpp", name, 8 * size / block, partial(_theirs, llama, name, scratch), block))
    return out


def _ours(version: Version, weight: Tensor, moments: Tensor) -> Tensor:
    return dequantise(quantise_all(DEFAULT, weight, moments, [version])[version], version)


def _theirs(llama: Worker, name: str, scratch: Path, weight: Tensor, moments: Tensor) -> Tensor:
    importance = moments.diagonal(dim1=-2, dim2=-1)
    np.savez(scratch / "weights.npz", weight=weight.numpy(), importance=importance.numpy())
    llama.call("quantised", path=str(scratch / "weights.npz"), out=str(scratch / "values.npy"), encoding=name)
    return torch.from_numpy(np.load(scratch / "values.npy"))


def of_generated(shapes: Sequence[tuple[int, int]], every: Sequence[Encoding]) -> list[Row]:
    """Errors on generated matrices of true shape: a row an encoding."""
    cases = [generated(rows, cols) for rows, cols in shapes]
    out = []
    for e in every:
        if all(case.weight.shape[2] % e.block == 0 for case in cases):
            got = [x for case in cases for x in case.errors(e.values(case.weight, case.learn))]
            row = {"model": "generated", "who": e.who, "encoding": e.name, "bits/weight": e.bits}
            out.append(row | {"error": statistics.geometric_mean(got)})
    return out


def of_model(
    checkpoint: Path, calibration: list[str], data: list[str], windows: tuple[int, int], every: Sequence[Encoding]
) -> list[Row]:
    """Errors and divergence on a trained model: a row an encoding, then what users run, attention quantised as well.

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

    from moepack.calibrate.text.windows import calibration_windows
    from moepack.families.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    experts = [m for m in model.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]
    if not experts:
        raise PeerError(f"{type(model).__name__} does not keep its experts in gate_up_proj and down_proj")
    tokenizer = load_tokenizer(checkpoint)
    linears = attention(model)
    watch(model, calibration_windows(calibration, tokenizer, windows[0], LENGTH, 0).ids, linears)
    ids = calibration_windows(data, tokenizer, windows[1], LENGTH, 0).ids
    reference = log_probabilities(model, ids)
    own: list[Tensor] = [m.get_parameter(name).data for m in experts for name in ("gate_up_proj", "down_proj")]
    widths = [weight.shape[2] for weight in own[:2]]
    block = QK_K if any(n % QK_K == 0 for n in widths) else 1
    chosen = [i for i, n in enumerate(widths) if n % block == 0]
    parts = "gate and up" if chosen == [0] else "all experts' matrices"
    weights = [weight for i, weight in enumerate(own) if i % 2 in chosen]
    every_case = enumerate(of_checkpoint(checkpoint, calibration, data, windows))
    cases = [case for i, case in every_case if i % 2 in chosen]
    fitting = {(e.who, e.name): e for e in every if not any(widths[i] % e.block for i in chosen)}
    out = []
    values = dict[tuple[str, str], list[Tensor]]()
    divergences = dict[tuple[str, str], list[float]]()
    for key, e in fitting.items():
        values[key] = [e.values(case.weight, case.learn) for case in cases]
        got = [x for case, made in zip(cases, values[key], strict=True) for x in case.errors(made)]
        with replaced(weights, values[key]):
            divergences[key] = divergence_of(model, ids, reference)
        row = {"model": checkpoint.name, "quantised": parts, "who": e.who, "encoding": e.name, "bits/weight": e.bits}
        out.append({**row, "error": statistics.geometric_mean(got), **_shown(divergences[key])})
    beside = [one.module.weight.data for one in linears]
    for name, key, encodings in _served(fitting, linears):
        if any(weight.shape[1] % e.block for weight, e in zip(beside, encodings, strict=True)):
            continue
        pairs = zip(linears, encodings, strict=True)
        fitted = [e.values(one.module.weight.data[None], one.moments())[0] for one, e in pairs]
        with replaced([*weights, *beside], [*values[key], *fitted]):
            found = divergence_of(model, ids, reference)
        size = fitting[key].bits * sum(w.numel() for w in weights)
        size += sum(e.bits * w.numel() for e, w in zip(encodings, beside, strict=True))
        row = {"model": checkpoint.name, "quantised": f"{parts}, attention", "who": key[0], "encoding": name}
        row["bits/weight"] = size / sum(w.numel() for w in (*weights, *beside))
        row |= _shown(found)
        mean = statistics.fmean(divergences[key])
        more = Mean.of([a - b for a, b in zip(found, divergences[key], strict=True)])
        out.append({**row, "added, %": 100 * more.value / mean, "added +-": 100 * more.half / mean})
    return out


def _served(
    every: Mapping[tuple[str, str], Encoding], linears: Sequence[WatchedLinear]
) -> Iterator[tuple[str, tuple[str, str], list[Encoding]]]:
    """What users run, of the encodings that fit: name, key of the experts' encoding, attention's, a matrix each."""
    for version, dense in PAIRS:
        if ("moepack", version) in every and ("moepack", dense) in every:
            yield f"{version}, dense {dense}", ("moepack", version), [every["moepack", dense]] * len(linears)
    for name, (mix, kind) in SERVED.items():
        if ("llama.cpp", kind) in every:
            yield name, ("llama.cpp", kind), [every["llama.cpp", one.types[mix]] for one in linears]


@contextmanager
def replaced(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """The weights with these values, and as they were again afterwards."""
    before = [weight.clone() for weight in weights]
    try:
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
        yield
    finally:
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)


def _shown(divergences: Sequence[float]) -> dict[str, float]:
    mean = Mean.of(divergences)
    return {"KL, mnat": 1e3 * mean.value, "+-": 1e3 * mean.half}


def _logs(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Log-probabilities of a window's tokens, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        return torch.log_softmax(model(window[None]).logits[0].float(), -1)


def log_probabilities(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Those of every window [windows, tokens]."""
    return [_logs(model, window) for window in ids]


def divergence_of(model: PreTrainedModel, ids: Tensor, reference: list[Tensor]) -> list[float]:
    """Of the model's own distribution from the one it has now, nats a token, by window."""
    return [divergence(best, _logs(model, window)) for window, best in zip(ids, reference, strict=True)]
