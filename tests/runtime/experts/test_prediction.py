"""The next layer's routing by its own router: every family's, without a trace in what transformers collects."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, random_model

from moepack.pack.errors import InputError
from moepack.runtime.experts.prediction import Prediction, tell_logits
from moepack.runtime.policies.reducers import GATES
from moepack.runtime.step.context import Step, opened

# The router of minimax_m2 takes the layer's correction; jamba has experts in every other layer.
MORE = {"minimax_m2": {"num_local_experts": 8}, "jamba": {"num_hidden_layers": 4}}


@pytest.mark.parametrize("family", dict.fromkeys((*FAMILIES, *MORE)))
def test_a_routers_answer_is_its_own(family):
    """Asked about what its own layer's experts read, each router says what it did: indices and weights."""
    model, layers = random_model(family, torch.float32, **MORE.get(family, {}))
    prediction, seen = Prediction(model, layers, (GATES,)), []
    for layer in layers:
        module = model.get_submodule(layer.module)
        module.register_forward_pre_hook(lambda _, args: seen.append(tuple(x.clone() for x in args)))
    with torch.inference_mode():
        model(torch.randint(1, 4000, (2, 9)))
    assert len(seen) == len(layers) > 1
    for position, (hidden, index, weights) in enumerate(seen):
        with torch.inference_mode():
            asked = prediction._routers[position].ask(hidden, index.shape[1])
        assert torch.equal(asked.index.sort(-1).values, index.sort(-1).values)
        assert asked.logits is not None and asked.logits.shape == (18, layers[position].experts)
        torch.testing.assert_close(asked.gates.sort(-1).values.float(), weights.sort(-1).values.float())


def test_counts_gates_and_hits_by_hand():
    """Layer 1 is predicted from what layer 0's experts read; padding does not count, nor what is no expert."""
    model, layers = random_model("qwen3_moe", torch.float32)
    prediction = Prediction(model, layers, (GATES,))
    hidden, mask = torch.randn(3, 64), torch.tensor([1, 0, 1])
    gates = (hidden @ model.model.layers[1].mlp.gate.weight.T).softmax(-1)
    want = gates.topk(2, -1)
    weights = want.values / want.values.sum(-1, keepdim=True)
    counts, sums = prediction.ahead(0, hidden, torch.zeros(3, 2, dtype=torch.long), mask)
    assert counts is not None and counts.sum() == 4
    for e in range(8):
        here = (want.indices == e) & (mask[:, None] == 1)
        assert counts[e] == int(here.sum()) and sums[GATES][e] == pytest.approx(float(weights[here].sum()))
    chosen = want.indices.clone()
    chosen[0, 1] = next(e for e in range(8) if e not in want.indices[0])
    assert prediction.ahead(1, hidden, chosen, mask) == (None, {}), "behind the last layer there is none"
    assert prediction.hits.tolist() == [0, 3] and prediction.choices.tolist() == [0, 4]
    assert prediction.rates() == [None, 0.75]
    prediction.ahead(1, hidden, chosen, mask)
    assert prediction.choices.tolist() == [0, 4], "nothing had been predicted for it"


def test_what_transformers_collects_of_routers_stays_as_it_was():
    model, layers = random_model("qwen3_moe", torch.float32)
    ids = torch.randint(1, 4000, (1, 9))
    with torch.inference_mode():
        plain = model(ids, output_router_logits=True).router_logits
    prediction = Prediction(model, layers, (GATES,))
    module = model.get_submodule(layers[0].module)
    module.register_forward_pre_hook(lambda _, args: prediction.ahead(0, args[0], args[1], None) and None)
    with torch.inference_mode():
        asked = model(ids, output_router_logits=True).router_logits
    assert len(asked) == len(plain) == 2 and all(torch.equal(a, b) for a, b in zip(asked, plain, strict=True))


def test_routers_that_cannot_be_asked_are_refused_by_name():
    for change, word in (
        (lambda block: delattr(block, "gate"), "has no router beside it"),
        (lambda block: setattr(block, "gate", Odd()), "takes temperature"),
        (lambda block: setattr(block, "gate", Silent()), "cannot be asked|not understood"),
    ):
        model, layers = random_model("qwen3_moe", torch.float32)
        change(model.model.layers[1].mlp)
        with pytest.raises(InputError, match=word) as refused:
            Prediction(model, layers, (GATES,))
        assert "model.layers.1.mlp.experts" in str(refused.value) and "prefetch=no" in str(refused.value)


class Odd(torch.nn.Linear):
    """Wants to be told more."""

    def __init__(self):
        super().__init__(64, 8)

    def forward(self, hidden, temperature):
        return super().forward(hidden)


class Silent(torch.nn.Linear):
    """Says nothing."""

    def __init__(self):
        super().__init__(64, 8)

    def forward(self, hidden):
        return None


def test_logits_alone_are_enough():
    """A plain linear layer: softmax and top k, as equation 6 has it."""
    model, layers = random_model("qwen3_moe", torch.float32)
    model.model.layers[1].mlp.gate = torch.nn.Linear(64, 8, bias=False)
    prediction, hidden = Prediction(model, layers, (GATES,)), torch.randn(1, 64)
    counts, sums = prediction.ahead(0, hidden, torch.zeros(1, 2, dtype=torch.long), None)
    want = model.model.layers[1].mlp.gate(hidden).softmax(-1).topk(2, -1)
    assert counts is not None
    assert np.flatnonzero(counts).tolist() == sorted(want.indices[0].tolist())
    assert sums[GATES].sum() == pytest.approx(float(want.values.sum()))


class Shares(torch.nn.Linear):
    """Returns the distribution, as Gemma's routers do, or without `tells` the choice alone."""

    tells = True

    def forward(self, hidden):
        shares = super().forward(hidden).softmax(-1)
        chosen = shares.topk(2, -1)
        return (shares, *chosen) if self.tells else (*chosen,)


def test_routers_tell_the_running_step_their_logits():
    """Of the router that returns shares, numbers whose softmax is these; outside a step, no step is told."""
    model, layers = random_model("qwen3_moe", torch.float32)
    key = object()
    gates = [layer.mlp.gate for layer in model.model.layers]
    model.model.layers[1].mlp.gate = gates[1] = Shares(64, 8, bias=False)
    tell_logits(model, layers, key)
    hidden = torch.randn(3, 64)
    with torch.inference_mode(), opened(Step(key)) as step:
        for position, gate in enumerate(gates):
            gate(hidden)
            assert step.logits is not None and step.logits[0] == position
            logits = hidden @ gate.weight.T
            torch.testing.assert_close(step.logits[1].softmax(-1), logits.softmax(-1))
            assert (position == 1) != torch.allclose(step.logits[1], logits, atol=1e-4)
    gates[0](hidden)
    assert step.logits[0] == 1
    gates[1].tells = False
    Prediction(model, layers, (GATES,))
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts has a router that returns no logits"):
        tell_logits(model, layers, key)
