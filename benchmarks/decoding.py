"""How a model goes on with real text: a prompt at once, then token by token, the text's own tokens being put in.

So every policy decodes the same tokens, and its logits are compared with another run's one by one. Decides nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.families.arguments import cache_in, with_cache
from moepack.reports.intervals import clustered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moepack.runtime.served_model import CausalModel


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of one workload, int64 [windows, length]."""

    name: str
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and half the width of its 95 % interval, the windows being the sample: a window's tokens go together."""

    value: float
    half: float

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        """Of one value a window."""
        found = clustered(values, [1] * len(values))
        return Mean(found.mean, found.high - found.mean)


@dataclass(slots=True)
class Decoded:
    """What one session gave.

    Attributes:
        nll: [windows], mean negative log-likelihood of the tokens after the prompt, nats, by text.
        kl: [windows], mean Kullback-Leibler divergence of the reference's distribution from this one's, nats a token.
        logs: the log-probabilities themselves, float32 [tokens, vocabulary] a window, where they are kept.
        ttft: seconds of each prompt's pass.
        tpot: seconds of each pass over one token.
    """

    nll: dict[str, list[float]] = field(default_factory=dict)
    kl: dict[str, list[float]] = field(default_factory=dict)
    logs: list[Tensor] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)

    def perplexity(self, text: str) -> float:
        """Of the tokens after the prompts."""
        return math.exp(statistics.fmean(self.nll[text]))

    def divergence(self) -> Mean:
        """Over all windows."""
        return Mean.of([x for row in self.kl.values() for x in row])


def divergence(best: Tensor, logs: Tensor) -> float:
    """Mean divergence of one distribution from another, nats a token, of log-probabilities [tokens, vocabulary]."""
    return float((best.exp() * (best - logs)).sum(-1).mean())


class Reading:
    """Passes of one sequence with a cache: from the next tokens, [1, tokens], to logits. `given` goes to each pass."""

    def __init__(self, model: CausalModel | PreTrainedModel, **given: object) -> None:
        self._model = model
        self._given = given
        self.cache: Any = None

    def __call__(self, ids: Tensor) -> Tensor:
        """A pass."""
        kept = {} if self.cache is None else with_cache(self._model, self.cache)
        out = self._model(input_ids=ids, use_cache=True, **self._given, **kept)
        self.cache = cache_in(out)
        logits: Tensor = out.logits
        return logits


def decode(model: PreTrainedModel, texts: Sequence[Text], prompt: int, reference: Decoded | None = None) -> Decoded:
    """Go through all windows in order.

    Args:
        model: a causal language model.
        texts: one after another: the workload shifts between them.
        prompt: tokens of a window that are read at once.
        reference: a run over the same windows that kept its log-probabilities; without it, this run keeps them.
    """
    out = Decoded()
    windows = 0
    with torch.inference_mode():
        for text in texts:
            out.nll[text.name], out.kl[text.name] = [], []
            for ids in text.ids:
                logs = torch.log_softmax(_window(model, ids, prompt, out), -1)
                target = ids[prompt:].unsqueeze(1)
                out.nll[text.name].append(-logs.gather(1, target).mean().item())
                if reference is None:
                    out.logs.append(logs)
                else:
                    out.kl[text.name].append(divergence(reference.logs[windows], logs))
                windows += 1
    return out


def _window(model: PreTrainedModel, ids: Tensor, prompt: int, out: Decoded) -> Tensor:
    """Logits before each token after the prompt, float32 [tokens, vocabulary]."""
    run = Reading(model, logits_to_keep=1)
    logits = []
    for part in (ids[:prompt], *ids[prompt:-1].split(1)):
        began = time.perf_counter()
        logits.append(run(part[None])[0, -1].float())
        spent = out.ttft if len(logits) == 1 else out.tpot
        spent.append(time.perf_counter() - began)
    return torch.stack(logits)


def timed(run: Callable[[Tensor], Tensor], parts: Sequence[list[int]]) -> list[float]:
    """Seconds of a pass of `Reading` over each part of a text."""
    spent = []
    with torch.inference_mode():
        for part in parts:
            ids = torch.tensor([part])
            began = time.perf_counter()
            run(ids)
            spent.append(time.perf_counter() - began)
    return spent
