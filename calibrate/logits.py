"""How far a layer's quantised experts move the logits: one pass over the layers, a few windows of text.

A loss table measures an expert's own output. What of that error reaches the logits differs between layers by four times
and more, and no function of the layer's output tells it (docs/design/allocation.md). So for each layer and version, the
text goes through the model with this layer's experts at this version and all else as it is. Every variant takes its
activations from the exact run at its layer; from there on, all variants go through each layer while it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from .experts import replaced
from .forward import CalibrationPass
from .stream import StreamedModel

# of text: 768 tokens did as well as 6,144
WINDOWS = 16
LENGTH = 128
_TOKENS = 256  # tokens whose logits are in memory at once

Values = Callable[[int, int], Sequence[Tensor]]  # (layer, version's index) -> matrices [experts, rows, cols], float32


def probe(ids: Tensor) -> Tensor:
    """The text of the pass: the beginnings of evenly spaced calibration windows, int64 [windows, length]."""
    at = torch.linspace(0, len(ids) - 1, min(WINDOWS, len(ids))).long()
    return ids[at, :LENGTH].clone()


def divergences(
    stream: StreamedModel, ids: Tensor, versions: int, values: Values, advance: Callable[[int], None] = lambda n: None
) -> dict[int, list[float]]:
    """The mean divergence of the logits from the exact ones, nats a token, by layer, for each of its `versions`.

    Computed in float32, with the exact run and all variants in memory: ids [windows, length] times hidden size times
    (1 + layers * versions). `advance` is called with 1 after each layer. Logits are those of the output projection,
    before what some families do to them.
    """
    variants = [(layer, v) for layer in stream.expert_layers for v in range(versions)]
    walk = CalibrationPass(stream, ids.repeat(1 + len(variants), 1), len(ids), torch.float32)
    stream.load(None)
    stream.to_compute(None, torch.float32)
    walk.start()
    stream.free(None)
    for index in range(len(stream.layers)):
        stream.load(index)
        stream.to_compute(index, torch.float32)
        walk.run_batches(index, (i for i, (layer, _) in enumerate(variants, 1) if layer < index))
        for i, (layer, v) in enumerate(variants, 1):
            if layer == index:
                walk.fork(0, i)
                with replaced(stream.experts_module(index), values(layer, v)):
                    walk.run_batches(index, (i,))
        walk.run_batches(index, (0,))
        stream.free(index)
        advance(1)
    found = _at_head(stream, walk, len(variants))
    return {layer: found[i * versions : (i + 1) * versions] for i, layer in enumerate(stream.expert_layers)}


def _at_head(stream: StreamedModel, walk: CalibrationPass, variants: int) -> list[float]:
    stream.load(None)
    stream.to_compute(None, torch.float32)
    head = _head(stream)
    exact, *others = (walk.head_inputs(i).flatten(0, 1) for i in range(1 + variants))
    sums = torch.zeros(variants, dtype=torch.float64)
    with torch.inference_mode():
        for a in range(0, len(exact), _TOKENS):
            want = torch.log_softmax(head(exact[a : a + _TOKENS]).float(), -1)
            for i, hidden in enumerate(others):
                got = torch.log_softmax(head(hidden[a : a + _TOKENS]).float(), -1)
                sums[i] += (want.exp() * (want - got)).sum(-1).double().sum().cpu()
    stream.free(None)
    out: list[float] = (sums / len(exact)).clamp(min=0).tolist()
    return out


def _head(stream: StreamedModel) -> Callable[[Tensor], Tensor]:
    """The output projection, whose weight may be the embeddings': then only these are loaded."""
    model = stream.model
    head = stream.model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    tied = {
        key.removeprefix(f"{name}."): model.get_parameter(source)
        for key, source in model.all_tied_weights_keys.items()
        if key.startswith(f"{name}.")
    }

    def logits(x: Tensor) -> Tensor:
        found: Tensor = functional_call(head, tied, (x,))
        return found

    return logits
