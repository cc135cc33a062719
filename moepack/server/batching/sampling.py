"""From logits to a token: penalties, bias, a grammar's mask, temperature, top-k, top-p, min-p. Knows no request.

A request's randomness is its own: the same seed and the same logits give the same tokens, whatever else is served.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moepack.server.options import Sampling


class Mask(Protocol):
    """What a grammar allows next."""

    def allowed(self, vocabulary: int) -> Tensor:
        """Bool [vocabulary]."""

    def take(self, token: int) -> None:
        """This token was chosen."""

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end may follow."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and how likely it was, before anything was done to the logits: natural logarithms.

    Attributes:
        top: the likeliest tokens with theirs, the likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def scored(logits: Tensor, token: int, top: int | None) -> Scored:
    """A token with its logarithmic probability under `logits` [vocabulary]."""
    if top is None:
        return Scored(token)
    logs = torch.log_softmax(logits.float(), dim=-1)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, indices = logs.topk(min(top, len(logs)))
        best = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return Scored(token, float(logs[token]), best)


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, how: Sampling, prompt: Sequence[int], device: torch.device, mask: Mask | None = None) -> None:
        self._how, self._mask = how, mask
        self._prompt = frozenset(prompt) if how.repetition != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._random: torch.Generator | None = None
        if how.temperature > 0:
            self._random = torch.Generator(device)
            self._random.manual_seed(secrets.randbits(63) if how.seed is None else how.seed)

    @property
    def is_done(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._mask is not None and self._mask.is_done

    def choose(self, logits: Tensor) -> Scored:
        """The next token, from logits [vocabulary]."""
        how = self._how
        token = self._choose(logits)
        if how.presence or how.frequency or how.repetition != 1.0:
            self._counts[token] += 1
        if self._mask is not None:
            self._mask.take(token)
        return scored(logits, token, how.top_logprobs)

    def _choose(self, logits: Tensor) -> int:
        changed = self._changed(logits)
        if self._random is None:
            return int(changed.argmax())
        return draw(changed, self._how, self._random)

    def _changed(self, logits: Tensor) -> Tensor:
        """Logits after penalties, bias and mask; the same where there are none."""
        how, device = self._how, logits.device
        if self._counts or self._prompt or how.bias or self._mask is not None:
            logits = logits.float().clone()
        if how.repetition != 1.0 and (seen := [*self._prompt | self._counts.keys()]):
            at = torch.tensor([t for t in seen if t < len(logits)], device=device)
            now = logits[at]
            logits[at] = torch.where(now > 0, now / how.repetition, now * how.repetition)
        if self._counts and (how.presence or how.frequency):
            at = torch.tensor([*self._counts], device=device)
            times = torch.tensor([*self._counts.values()], device=device, dtype=torch.float32)
            logits[at] -= how.presence + how.frequency * times
        for token, bias in how.bias.items():
            logits[token] += bias
        if self._mask is not None:
            logits[~self._mask.allowed(len(logits)).to(device)] = -torch.inf
        return logits


def draw(logits: Tensor, how: Sampling, random: torch.Generator) -> int:
    """A token from logits [vocabulary] at a temperature above 0, limited by top-k, then top-p, then min-p."""
    logits = logits.float() / how.temperature
    if 0 < how.top_k < len(logits):
        logits, tokens = logits.topk(how.top_k)
    elif how.top_p < 1:
        logits, tokens = logits.sort(descending=True)
    else:
        tokens = None
    chances = torch.softmax(logits, dim=-1)
    if how.top_p < 1:  # those before which less than top_p lies: the likeliest always
        beyond = chances.cumsum(-1) - chances >= how.top_p
        beyond[0] = False
        chances = chances.masked_fill(beyond, 0.0)
    if how.min_p > 0:
        chances = chances.masked_fill(chances < how.min_p * chances.max(), 0.0)
    at = int(torch.multinomial(chances, 1, generator=random))
    return at if tokens is None else int(tokens[at])
