"""Choosing a token: each rule by hand, and frequencies against the distribution."""

import math
from types import SimpleNamespace

import pytest
import torch

from moepack.server.batching.sampling import Sampler, Scored, draw, likeliest_of, scored
from moepack.server.options import Sampling

CPU = torch.device("cpu")
LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


@pytest.mark.parametrize(
    ("how", "tokens"),
    (
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.31}, {0, 1}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),  # of what top-k left: 0.5 of 0.95 is 0.526
        ({"temperature": 0.01}, {0}),
    ),
)
def test_what_may_be_drawn(how, tokens):
    """In 400 draws."""
    random = torch.Generator().manual_seed(1)
    assert {int(draw(LOGITS, Sampling(**how), random)) for _ in range(400)} == tokens


def test_frequencies():
    """At temperature 2 the chances are the square roots, normalised: within five standard errors of 4,000 draws."""
    random, n = torch.Generator().manual_seed(2), 4000
    counts = torch.zeros(4)
    for _ in range(n):
        counts[int(draw(LOGITS, Sampling(temperature=2.0), random))] += 1
    roots = torch.tensor([0.5, 0.3, 0.15, 0.05]).sqrt()
    for share, chance in zip((counts / n).tolist(), (roots / roots.sum()).tolist(), strict=True):
        assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / n)


def test_penalties_by_hand():
    """Tokens 1 twice and 2 once were generated: 1 loses 0.5 + 2 x 0.25, 2 loses 0.5 + 0.25."""
    sampler = Sampler(Sampling(temperature=0, presence=0.5, frequency=0.25), [0], CPU)
    for token in (1, 2, 1):
        assert sampler.choose(torch.eye(4)[token] * 9).token == token
    changed = sampler._changed(torch.tensor([1.0, 2.0, 3.0, 0.0]))
    assert changed.tolist() == [1.0, 1.0, 2.25, 0.0]


def test_repetition_by_hand():
    """Tokens of prompt (0) and answer (3): positive logits are divided, negative ones multiplied."""
    sampler = Sampler(Sampling(temperature=0, repetition=2.0), [0], CPU)
    assert sampler.choose(torch.tensor([0.0, 0.0, 0.0, 9.0])).token == 3
    assert sampler._changed(torch.tensor([4.0, 4.0, -4.0, -4.0])).tolist() == [2.0, 4.0, -4.0, -8.0]


def test_the_likeliest_of_several_are_found_at_once():
    """For samplers that take it, by their last logits; they choose it, and the others are as without it."""
    how = Sampling(temperature=0), Sampling(), Sampling(temperature=0, bias={1: 0.1}), Sampling(temperature=0)
    samplers = [*(Sampler(h, [0], CPU) for h in how), None, Sampler(Sampling(temperature=0, presence=0.1), [0], CPU)]
    logits = [torch.stack([x, x.roll(n)]) for n, x in enumerate([LOGITS] * 6)]
    assert likeliest_of(samplers, [*logits[:3], None, *logits[4:]]) == [0, None, None, None, None, None]
    found = likeliest_of(samplers, logits)
    assert found == [0, None, None, 3, None, None]
    for n in (0, 3):
        assert samplers[n].choose(logits[n][-1], found[n]) == samplers[n].choose(logits[n][-1])
        assert samplers[n].choose(logits[n][-1], 2).token == 2, "what is known is not looked for again"


def test_bias_and_mask():
    taken = []
    even = SimpleNamespace(is_done=False, allowed=lambda size: torch.arange(size) % 2 == 0, take=taken.append)
    sampler = Sampler(Sampling(temperature=0, bias={2: 5.0, 3: 50.0}), [], CPU, even)
    assert sampler.choose(LOGITS).token == 2 and taken == [2]


def test_logprobs_are_of_the_model_not_of_what_was_asked():
    sampler = Sampler(Sampling(temperature=0, bias={3: 100.0}, top_logprobs=2), [], CPU)
    found = sampler.choose(LOGITS)
    assert found.token == 3 and found.logprob == pytest.approx(math.log(0.05))
    assert [t for t, _ in found.top] == [0, 1] and found.top[0][1] == pytest.approx(math.log(0.5))
    assert scored(LOGITS, 1, None) == Scored(1) and scored(LOGITS, 1, 0).top == ()


def test_a_seed_is_a_sequences_own():
    def drawn(seed, between):
        one, other = Sampler(Sampling(seed=seed), [], CPU), Sampler(Sampling(seed=3), [], CPU)
        out = []
        for _ in range(20):
            for _ in range(between):
                other.choose(LOGITS)
            out.append(one.choose(LOGITS).token)
        return out

    assert drawn(5, 0) == drawn(5, 3) != drawn(6, 0)
    assert drawn(None, 0) != drawn(None, 0)
