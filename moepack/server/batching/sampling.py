"""Choose a token from logits: penalties, bias, a grammar's mask, temperature, top-k, top-p, min-p.

Each request has a random generator of its own: the same seed and logits give the same tokens, whatever other
requests run.

A row of logits whose greatest is NaN or infinite chooses no token. That is decided on the device, beside the choice, so
both come to the host in one number.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.errors import NotFiniteError
from moepack.runtime.checked_logits import NO_LOGITS, finite_rows
from moepack.server.options import Sampling

from .grammar import JsonMask

NEVER = -9999.0  # OpenAI's log probability of what has none; JSON has no infinity
NONE = -1  # in place of a token, of logits that are not finite


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its natural log probability under the model's own logits, before penalties, bias and mask."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log probabilities, the likeliest first


def scored(logits: Tensor, token: int, top: int | None) -> Scored:
    """Score a token under `logits` [vocabulary], and list the `top` likeliest tokens. None computes no probability.

    A token that is ruled out has NEVER. Raises NotFiniteError for logits whose greatest is NaN or infinite.
    """
    if top is None:
        return Scored(token)
    logs = torch.log_softmax(logits.float(), dim=-1).clamp_(min=NEVER)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, indices = logs.topk(min(top, len(logs)))
        best = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    own, most = torch.stack([logs[token], logs.max()]).tolist()
    if not math.isfinite(most):
        raise NotFiniteError("the model", NO_LOGITS)
    return Scored(token, own, best)


class Sampler:
    """Choose the tokens of one sequence."""

    def __init__(
        self, how: Sampling, prompt: Sequence[int], device: torch.device, mask: JsonMask | None = None
    ) -> None:
        self._how = how
        self._mask = mask
        self._prompt = frozenset(prompt) if how.repetition != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._random: torch.Generator | None = None
        if how.temperature > 0:
            self._random = torch.Generator(device)
            self._random.manual_seed(secrets.randbits(63) if how.seed is None else how.seed)

    @property
    def is_done(self) -> bool:
        """Whether the grammar is complete."""
        return self._mask is not None and self._mask.is_done

    @property
    def is_likeliest(self) -> bool:
        """Whether the next token is the likeliest by the model's own logits."""
        how = self._how
        changes = self._mask is not None or how.presence or how.frequency or how.bias or how.repetition != 1.0
        return self._random is None and not changes

    def choose(self, logits: Tensor, likeliest: int | None = None) -> Scored:
        """Choose the next token from logits [vocabulary]. `likeliest` is theirs, if `is_likeliest` and it is known.

        Raises NotFiniteError for logits whose greatest is NaN or infinite.
        """
        how = self._how
        token = likeliest
        if token is None:
            changed = self._changed(logits)
            chosen = greatest(changed) if self._random is None else draw(changed, how, self._random)
            if changed is not logits:  # a mask may hide a NaN
                chosen = torch.where(finite_rows(logits), chosen, NONE)
            token = int(chosen)
        if token == NONE:
            raise NotFiniteError("the model", NO_LOGITS)
        if how.presence or how.frequency or how.repetition != 1.0:
            self._counts[token] += 1
        if self._mask is not None:
            self._mask.take(token)
        return scored(logits, token, how.top_logprobs)

    def _changed(self, logits: Tensor) -> Tensor:
        """Apply penalties, bias and mask; without any, return `logits` itself."""
        how = self._how
        device = logits.device
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


def likeliest_of(samplers: Sequence[Sampler | None], logits: Sequence[Tensor | None]) -> list[int | None]:
    """Return the likeliest tokens by the last of sequences' logits, where samplers want them; wait for a GPU once.

    The token of logits that are not finite is NONE.
    """
    out: list[int | None] = [None] * len(logits)
    pairs = enumerate(zip(samplers, logits, strict=True))
    wanted = {n: x[-1] for n, (s, x) in pairs if s is not None and s.is_likeliest and x is not None}
    if wanted:
        found = greatest(torch.stack([*wanted.values()])).tolist()
        for n, token in zip(wanted, found, strict=True):
            out[n] = token
    return out


def greatest(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits, [.., vocabulary]: the first of equal ones, and NONE if not finite."""
    most, token = logits.max(-1)  # a NaN is the greatest
    return torch.where(_finite(most), token, NONE)


def _finite(values: Tensor) -> Tensor:
    return values - values == 0


def draw(logits: Tensor, how: Sampling, random: torch.Generator) -> Tensor:
    """Draw a token from logits [vocabulary] at a temperature above 0, limited by top-k, then top-p, then min-p.

    Returns an integer on their device: NONE for logits that are not finite.
    """
    logits = logits.float() / how.temperature
    if 0 < how.top_k < len(logits):
        logits, tokens = logits.topk(how.top_k)
    elif how.top_p < 1:
        logits, tokens = logits.sort(descending=True)
    else:
        tokens = None
    chances = torch.softmax(logits, dim=-1)
    most = chances.max()  # NaN if a logit is, or the greatest is infinite
    chances = chances.nan_to_num_(1.0)  # a draw from NaN would end a GPU's process
    if how.top_p < 1:  # drop tokens after the likelier ones have summed to top_p, never the likeliest
        beyond = chances.cumsum(-1) - chances >= how.top_p
        beyond[0] = False
        chances = chances.masked_fill(beyond, 0.0)
    if how.min_p > 0:
        chances = chances.masked_fill(chances < how.min_p * most, 0.0)
    at = torch.multinomial(chances, 1, generator=random)[0]
    return torch.where(_finite(most), at if tokens is None else tokens[at], NONE)
