"""The gated delta rule against float64, at sizes that divide nothing, with states that go from call to call."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu, softplus

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
from moepack.runtime.kernels import affine_native as native
from moepack.runtime.kernels.delta_native import DeltaRule, DeltaSizes, DeltaWeights, Lies

SIZES = [
    DeltaSizes(1, 1, 3, 5, 2),
    DeltaSizes(2, 3, 20, 37, 4),
    DeltaSizes(3, 1, 65, 33, 3),
    DeltaSizes(2, 2, 128, 128, 4),
]
EPSILON = 1e-6


class Layer:
    """A layer with random weights, whose projections lie one after another in one tensor, or each in its own."""

    def __init__(self, sizes, sigmoid, own_decays, joined):
        self.sizes, self.sigmoid, self.own_decays, self.joined = sizes, sigmoid, own_decays, joined
        self.draw = torch.Generator().manual_seed(0)
        heads, k, v = sizes.state
        self.cols = [sizes.keys * k, sizes.keys * k, heads * v, heads * v, heads, heads]
        steps = [k, k, sizes.shared * v, sizes.shared * v, sizes.shared, sizes.shared]
        starts = [sum(self.cols[:i]) for i in range(6)]
        places = [
            Lies(0, a, s) if joined else Lies(i, 0, s) for i, (a, s) in enumerate(zip(starts, steps, strict=True))
        ]
        self.filter, self.norm = self.random(*sizes.window), self.random(v)
        self.scale, self.bias = self.random(heads).float().exp(), self.random(heads).float()
        of = DeltaWeights(self.filter, self.norm, EPSILON, sigmoid, self.scale, self.bias)
        if own_decays:
            places, of = places[:5], replace(of, scale=None, bias=None)
        self.rule = DeltaRule(sizes, places, of)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.draw).bfloat16()

    def inputs(self, tokens):
        parts = [self.random(tokens, cols) for cols in self.cols]
        heads, k, _ = self.sizes.state
        logs = -torch.rand(tokens, heads, k, generator=self.draw) if self.own_decays else None
        return parts, logs

    def run(self, parts, logs, *given):
        return self.rule.run([torch.cat(parts, 1)] if self.joined else parts, *given, logs=logs)

    def wanted(self, parts, logs, window, state):
        """One sequence in float64; `window` and `state` move on."""
        sizes = self.sizes
        heads, k_dim, v_dim = sizes.state
        q, k, v, gate, rate, decay = (p.double() for p in parts)
        mixed = torch.cat((window.double(), torch.cat((q, k, v), 1).T), 1)
        window.copy_(mixed[:, -sizes.width :])
        made = torch.nn.functional.conv1d(mixed[None, :, 1:], self.filter.double()[:, None], groups=len(mixed))[0]
        q, k, v = silu(made).T.split([sizes.keys * k_dim, sizes.keys * k_dim, heads * v_dim], 1)
        q, k = (x.reshape(len(x), sizes.keys, k_dim).repeat_interleave(sizes.shared, 1) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        v, gate = v.reshape(-1, heads, v_dim), gate.reshape(-1, heads, v_dim)
        if logs is None:
            by = (-self.scale.double() * softplus(decay + self.bias.double())).exp()[:, :, None].expand(k.shape)
        else:
            by = logs.double().exp()
        out = []
        for t in range(len(q)):
            state *= by[t][:, :, None]
            add = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * rate[t].sigmoid()[:, None]
            state += k[t][:, :, None] * add[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[t] * k_dim**-0.5))
        y = torch.stack(out)
        y = self.norm.double() * y * (y.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        return (y * (gate.sigmoid() if self.sigmoid else silu(gate))).flatten(1)


@pytest.mark.parametrize("level", range(native.BEST + 1))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("own_decays", "joined"), [(False, True), (True, False)])
def test_sequences_against_float64(sizes, own_decays, joined, level):
    """Three sequences in each of three calls, of one token, of a few, of a block and more, each from its own state."""
    native.use_level(level)
    layer = Layer(sizes, own_decays, own_decays, joined)
    windows, states = layer.random(3, *sizes.window), layer.random(3, *sizes.state).float()
    right_windows, right_states = windows.double(), states.double()
    for lengths in ((1, 40, 7), (1, 1, 1), (33, 1, 2)):
        parts, logs = layer.inputs(sum(lengths))
        first = [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
        apart = (windows[:1], windows[1:]), (states[:1], states[1:])  # as rows of the server and a batch give them
        got = layer.run(parts, logs, first, *apart)
        for n, (a, b) in enumerate(itertools.pairwise(first)):
            mine = None if logs is None else logs[a:b]
            want = layer.wanted([p[a:b] for p in parts], mine, right_windows[n], right_states[n])
            assert ((got[a:b] - want).abs() <= 2**-8 * want.abs() + 1e-5 * want.abs().max()).all()  # rounded to BF16
        assert torch.equal(windows.double(), right_windows)
        assert (states - right_states).norm() < 3e-6 * right_states.norm()


def test_a_prompt_is_its_tokens_one_by_one():
    """Over 1,500 tokens; and neither the number of threads nor other sequences of a call change a bit."""
    sizes = DeltaSizes(2, 2, 24, 40, 4)
    layer = Layer(sizes, False, False, True)
    parts, _ = layer.inputs(1500)
    start = layer.random(1, *sizes.window), layer.random(1, *sizes.state).float()
    made = []
    for steps, threads in (([1500], 1), ([1500], 2), ([1] * 1500, 1)):
        window, state = (t.clone() for t in start)
        out = []
        at = 0
        for n in steps:
            few = [torch.cat([p[at : at + n] for p in parts], 1)]
            out.append(layer.rule.run(few, (0, n), (window,), (state,), threads=threads))
            at += n
        made.append((torch.cat(out), window, state))
    (whole, window, state), threaded, single = made
    assert all(map(torch.equal, (whole, window, state), threaded))
    assert torch.equal(window, single[1])
    assert (state - single[2]).norm() < 1e-5 * state.norm()
    assert (whole.float() - single[0].float()).norm() < 1e-3 * whole.float().norm()
    both = [torch.cat([torch.cat([p[:9] for p in parts], 1)] * 2)]
    windows, states = (t.repeat(2, *(1,) * (t.dim() - 1)) for t in start)
    twice = layer.rule.run(both, (0, 9, 18), (windows,), (states,))
    assert torch.equal(twice[:9], twice[9:]) and torch.equal(twice[:9], whole[:9]) and torch.equal(states[0], states[1])


def test_what_does_not_fit_is_refused():
    sizes = SIZES[1]
    layer = Layer(sizes, False, False, True)
    parts, _ = layer.inputs(4)
    window, state = layer.random(1, *sizes.window), layer.random(1, *sizes.state).float()
    before = window.clone(), state.clone()
    for given, match in (
        (((0, 3), (window,), (state,)), "projection"),
        (((0, 2, 4), (window,), (state,)), "1 windows"),
        (((0, 4), (window,), (state.double(),)), "a state is"),
        (((0, 4), (window[:, :, 1:],), (state,)), "a state is"),
    ):
        with pytest.raises(ValueError, match=match):
            layer.run(parts, None, *given)
    with pytest.raises(ValueError, match="logarithms"):
        layer.run(parts, torch.zeros(4, *sizes.state[:2]), (0, 4), (window,), (state,))
    with pytest.raises(ValueError, match="do not fit"):
        DeltaRule(sizes, [Lies(0, 0, 1)] * 6, DeltaWeights(layer.filter, layer.norm, EPSILON, False))
    assert torch.equal(window, before[0]) and torch.equal(state, before[1])
