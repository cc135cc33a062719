"""Ways of quantising a layer's experts at one version, and the walk over the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import ExpertWeights, replaced
from moepack.calibrate.forward import CalibrationPass, Observation
from moepack.calibrate.gather import gather_batch
from moepack.calibrate.stream import StreamedModel
from moepack.pack.spec import Version
from moepack.quantize.expert_batch import RIDGE, ExpertBatch, Settings, expert_batches, quantise_batch
from moepack.quantize.grid import Quantised, dequantise, grouped, zero_values

Values = tuple[Tensor, Tensor]  # both matrices of some experts, float32 [experts, rows, cols]
Pair = tuple[Quantised, Quantised]
Learn = Callable[[ExpertBatch, Version, Pair], Values]
FEW = 256  # tokens; an expert with fewer learns from the layer's as well
STEPS, TOKENS = 200, 256  # of learning, and an expert's in a step


@dataclass(frozen=True)
class Way:
    """One way."""

    name: str
    propagates: bool = False  # whether layers read what the quantised layers before them make, not the exact inputs
    exact_targets: bool = False  # with `propagates`: gate and up make of these inputs what they made of the exact ones
    refines: bool = False  # the recipe's `quantize.refine`
    learn: Learn | None = None  # what makes the values from the build's own codes; None takes these
    library: Callable[[Path, Tensor, Version], list[Values]] | None = None  # what makes all layers' values instead


def by_autoround(checkpoint: Path, ids: Tensor, version: Version) -> list[Values]:
    """AutoRound's values (Cheng et al., arXiv 2309.05516): rounding and ranges learned layer by layer.

    With its own 200 steps of 8 windows, stored zero points, in float32; attention and router stay as they are.
    """
    from auto_round import AutoRound  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    made, _ = AutoRound(
        model, AutoTokenizer.from_pretrained(checkpoint), bits=version.bits, group_size=version.group_size, sym=False,
        iters=STEPS, seqlen=ids.shape[1], nsamples=len(ids), batch_size=8, dataset=[row[None] for row in ids],
        device_map="cpu", amp=False, enable_torch_compile=False, ignore_layers="self_attn",
    ).quantize()  # fmt: skip
    out = []
    for layer in made.model.layers:
        experts = list(layer.mlp.experts.children())
        experts = [e for e in experts if hasattr(e, "down_proj")]
        first = [torch.cat([e.gate_proj.weight, e.up_proj.weight]).detach().float() for e in experts]
        out.append((torch.stack(first), torch.stack([e.down_proj.weight.detach().float() for e in experts])))
    return out


def of_model(checkpoint: Path, ids: Tensor, version: Version, way: Way) -> list[Values]:
    """The values of all layers' experts after calibration on `ids` [windows, length], in float32."""
    if way.library is not None:
        return way.library(checkpoint, ids, version)
    streams = [StreamedModel(open_checkpoint(checkpoint)) for _ in range(1 + way.exact_targets)]
    walks = []
    for stream in streams:
        walk = CalibrationPass(stream, ids, 16, torch.float32)
        stream.load(None)
        stream.to_compute(None, torch.float32)
        walk.start()
        stream.free(None)
        walks.append(walk)
    out = []
    for index in range(len(streams[0].layers)):
        exact = _seen(streams[1], walks[1], index) if way.exact_targets else None
        stream, walk = streams[0], walks[0]
        _, weights = stream.split(index, stream.load(index))
        stream.to_compute(index, torch.float32)
        before = [hidden.clone() for hidden in walk.hidden] if way.propagates else []
        seen = walk.run_layer(index)
        assert seen is not None and weights is not None
        values = _layer(stream.experts_module(index), weights, (seen, exact), version, way)
        if way.propagates:
            for hidden, kept in zip(walk.hidden, before, strict=True):
                hidden.copy_(kept)
            with replaced(stream.experts_module(index), values):
                walk.run_layer(index)
        stream.free(index)
        out.append(values)
    return out


def _seen(stream: StreamedModel, walk: CalibrationPass, index: int) -> Observation:
    stream.load(index)
    stream.to_compute(index, torch.float32)
    seen = walk.run_layer(index)
    stream.free(index)
    assert seen is not None
    return seen


def _layer(
    module: Any, weights: ExpertWeights, saw: tuple[Observation, Observation | None], version: Version, way: Way
) -> Values:
    settings, (seen, exact) = Settings("gptq", (version,), refine=way.refines), saw
    parts = list[Values]()
    for some in expert_batches(weights.layer, settings):
        batch = gather_batch(module, weights.select(some), some, seen, settings, torch.device("cpu"))
        if exact is not None:
            _towards(batch, exact)
        made = next(iter(list(quantise_batch(batch, settings))))[0].quantised
        learn = way.learn or (lambda _, v, pair: (dequantise(pair[0], v.at(0)), dequantise(pair[1], v.at(1))))
        parts.append(learn(batch, version, made))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _towards(batch: ExpertBatch, exact: Observation) -> None:
    """Change gate and up so that they make of a batch's inputs what they made of the exact ones (least squares)."""
    for i in range(len(batch.experts)):
        tokens = batch.tokens[i].learn
        if len(tokens) >= FEW:
            x = batch.gather(tokens)
            batch.weights[0][i].addmm_(batch.weights[0][i].clone(), _predictor(exact.inputs[tokens].float() - x, x))


def _predictor(wanted: Tensor, given: Tensor) -> Tensor:
    """The matrix M for which M g is the best guess at w, over rows of `wanted` [tokens, n] and `given` [tokens, m]."""
    moments = given.T @ given
    ridge = (RIDGE + FEW / len(given)) * moments.diagonal().mean()
    solved: Tensor = torch.linalg.solve(moments + ridge * torch.eye(len(moments)), given.T @ wanted)
    return solved.T


def tokens_of(batch: ExpertBatch, i: int) -> tuple[Tensor, Tensor]:
    """The tokens that an expert learns from, and their gates; some of the layer's beside, if they are few."""
    own, gates = batch.tokens[i].learn, batch.tokens[i].learn_gates
    if len(own) >= FEW:
        return own, gates
    more = batch.common[:FEW]
    return torch.cat([own, more]), torch.cat([gates, torch.full((len(more),), batch.tokens[i].gate_square ** 0.5)])


class _Round(torch.autograd.Function):
    """Rounding to codes whose gradient passes through (the straight-through estimator)."""

    @staticmethod
    def forward(_: object, latent: Tensor, top: int) -> Tensor:
        return latent.round().clamp(0, top)

    @staticmethod
    def backward(_: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def learned(codes: float, scales: float) -> Learn:
    """Learn codes and scales by gradient, at these rates (Adam, falling to 0), from the build's own as the start.

    What falls is each expert's squared error, gate weights included, over its squared output.
    """

    def learn(batch: ExpertBatch, version: Version, pair: Pair) -> Values:
        latent = [q.codes.float().requires_grad_() for q in pair]
        factor = [torch.ones_like(q.scale, dtype=torch.float32).requires_grad_() for q in pair]

        def value(m: int) -> Tensor:
            own, q = version.at(m), pair[m]
            rounded: Tensor = _Round.apply(latent[m], (1 << own.bits) - 1)
            zero = zero_values(q.scale, q.zero, own.bits)[..., None]
            scaled = (grouped(rounded, own.group_size) - zero) * (q.scale.float() * factor[m])[..., None]
            return scaled.flatten(-2)[..., : rounded.shape[-1]]

        adam = torch.optim.Adam([{"params": latent, "lr": codes}, {"params": factor, "lr": scales}], betas=(0.9, 0.95))
        falling = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / STEPS)
        for x, gates in _drawn(batch):
            values = value(0), value(1)
            loss = torch.zeros(())
            for i in range(len(batch.experts)):
                first, second = batch.biases[i]
                with torch.no_grad():
                    want = batch.forward.out(batch.act(i, x[i]), batch.weights[1][i], second)
                got = batch.forward.out(batch.forward.act(x[i], values[0][i], first), values[1][i], second)
                loss = loss + (gates[i] * (got - want)).square().sum() / (gates[i] * want).square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            falling.step()
        return value(0).detach(), value(1).detach()

    return learn


def _drawn(batch: ExpertBatch) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """The inputs [TOKENS, hidden] and gates [TOKENS, 1] of every expert in each step, drawn by chance."""
    g = torch.Generator().manual_seed(0)
    own = [tokens_of(batch, i) for i in range(len(batch.experts))]
    for _ in range(STEPS):
        at = [torch.randint(len(tokens), (TOKENS,), generator=g) for tokens, _ in own]
        yield (
            [batch.gather(tokens[i]) for (tokens, _), i in zip(own, at, strict=True)],
            [gates[i][:, None] for (_, gates), i in zip(own, at, strict=True)],
        )


WAYS = (
    Way("as built"),
    Way("on the outputs of quantised layers", propagates=True),
    Way("the same, towards exact outputs", propagates=True, exact_targets=True),
    Way("down on what quantised gate and up make", refines=True),
    Way("scales learned", learn=learned(0, 5e-4)),
    Way("codes and scales learned", learn=learned(1e-2, 5e-4)),
    Way("AutoRound", library=by_autoround),  # pip install auto-round
)
