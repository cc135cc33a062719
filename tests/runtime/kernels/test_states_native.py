"""The gated delta rule and Mamba-2 against float64, at sizes that divide nothing, states that go from call to call."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import conv1d, silu, softplus

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
from moepack.runtime.kernels import affine_native as native
from moepack.runtime.kernels.delta_native import DeltaRule, DeltaSizes, DeltaWeights, Lies
from moepack.runtime.kernels.mamba_native import Mamba, MambaSizes, MambaWeights, scan

DELTA = [
    DeltaSizes(1, 1, 3, 5, 2),
    DeltaSizes(2, 3, 20, 37, 4),
    DeltaSizes(3, 1, 65, 33, 3),
    DeltaSizes(2, 2, 128, 128, 4),
]
MAMBA = [MambaSizes(1, 5, 3, 1, 2, 1), MambaSizes(6, 20, 37, 2, 3, 2), MambaSizes(4, 64, 128, 1, 4, 1)]
EPSILON = 1e-6


class Layer:
    """Random weights and states; a token's inputs are rows of several tensors, some of which may be None."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.draw = torch.Generator().manual_seed(0)
        self.filter = self.random(*sizes.window)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.draw).bfloat16()

    def start(self, sequences):
        return self.random(sequences, *self.sizes.window), self.random(sequences, *self.sizes.state).float()

    def convolved(self, x, window, bias=None):
        """Convolve one sequence in float64; `window` moves on."""
        mixed = torch.cat((window.double(), x.T), 1)
        window.copy_(mixed[:, -self.sizes.width :])
        return silu(conv1d(mixed[None, :, 1:], self.filter.double()[:, None], bias, groups=len(mixed))[0]).T


class DeltaLayer(Layer):
    """Projections lie one after another in one tensor, or each in its own, where decays are given and sigmoids gate."""

    def __init__(self, sizes, own_decays=False):
        super().__init__(sizes)
        self.own_decays = own_decays
        heads, k, v = sizes.state
        self.cols = [sizes.keys * k, sizes.keys * k, heads * v, heads * v, heads, heads]
        steps = [k, k, sizes.shared * v, sizes.shared * v, sizes.shared, sizes.shared]
        self.norm = self.random(v)
        self.scale, self.bias = self.random(heads).float().exp(), self.random(heads).float()
        of = DeltaWeights(self.filter, self.norm, EPSILON, own_decays, self.scale, self.bias)
        if own_decays:
            places = [Lies(i, 0, s) for i, s in enumerate(steps[:5])]
            of = replace(of, scale=None, bias=None)
        else:
            places = [Lies(0, sum(self.cols[:i]), s) for i, s in enumerate(steps)]
        self.rule = DeltaRule(sizes, places, of)

    def inputs(self, tokens):
        parts = [self.random(tokens, cols) for cols in self.cols]
        heads, k, _ = self.sizes.state
        logs = -torch.rand(tokens, heads, k, generator=self.draw) if self.own_decays else None
        return [*parts, logs]

    def run(self, inputs, *given, **more):
        *parts, logs = inputs
        return self.rule.run(parts if self.own_decays else [torch.cat(parts, 1)], *given, logs=logs, **more)

    def wanted(self, inputs, window, state):
        sizes = self.sizes
        heads, k_dim, v_dim = sizes.state
        *parts, logs = inputs
        q, k, v, gate, rate, decay = (p.double() for p in parts)
        made = self.convolved(torch.cat((q, k, v), 1), window)
        q, k, v = made.split([sizes.keys * k_dim, sizes.keys * k_dim, heads * v_dim], 1)
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
        return (y * (gate.sigmoid() if self.own_decays else silu(gate))).flatten(1)


class MambaLayer(Layer):
    """Limits of steps are within what they reach; some tokens are padding."""

    def __init__(self, sizes, bias=True):
        super().__init__(sizes)
        self.norm = self.random(sizes.heads * sizes.dim)
        self.filter_bias = self.random(len(self.filter)) if bias else None
        scale, self.bias, self.skip = (self.random(sizes.heads).float() for _ in range(3))
        self.scale = scale.exp()
        self.limits = (0.2, 3.0)
        given = self.norm, EPSILON, self.scale, self.bias, self.limits, self.skip
        self.rule = Mamba(sizes, MambaWeights(self.filter, self.filter_bias, *given))

    def inputs(self, tokens):
        live = torch.ones(tokens, dtype=torch.bool)
        live[2:4] = False
        return [self.random(tokens, self.sizes.cols), live]

    def run(self, inputs, *given, **more):
        x, live = inputs
        return self.rule.run(x, *given, live=live, **more)

    def wanted(self, inputs, window, state):
        x, live = inputs
        sizes = self.sizes
        heads, dim, size = sizes.state
        gate, inner, step = x.double().split([heads * dim, len(self.filter), heads], 1)
        bias = None if self.filter_bias is None else self.filter_bias.double()
        made = self.convolved(inner, window, bias) * live[:, None]
        given, b, c = made.split([heads * dim, sizes.groups * size, sizes.groups * size], 1)
        given = given.reshape(-1, heads, dim)
        b, c = (y.reshape(-1, sizes.groups, size).repeat_interleave(heads // sizes.groups, 1) for y in (b, c))
        step = softplus(step + self.bias.double())
        if len(x) > 1:
            step = step.clamp(*self.limits)
        out = []
        for t in range(len(x)):
            state *= (-self.scale.double() * step[t]).exp()[:, None, None]
            state += (step[t][:, None] * given[t])[:, :, None] * b[t][:, None]
            out.append(torch.einsum("hds,hs->hd", state, c[t]) + self.skip.double()[:, None] * given[t])
        y = (torch.stack(out).flatten(1) * silu(gate)).view(len(x), sizes.parts, -1)
        return (y * (y.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).flatten(1) * self.norm.double()


@pytest.mark.parametrize("level", range(native.BEST + 1))
@pytest.mark.parametrize(("channels", "size", "tokens"), [(1, 1, 1), (133, 5, 3), (300, 16, 40), (129, 37, 2)])
def test_a_scan_against_float64(channels, size, tokens, level):
    """Two sequences in two calls, on one thread and on two: the same bits."""
    draw = torch.Generator().manual_seed(0)
    x, steps = (torch.randn(2, channels, tokens, generator=draw) for _ in range(2))
    b, c = (torch.randn(2, tokens, size, generator=draw) for _ in range(2))
    steps = softplus(steps * 4)
    rates = -torch.rand(channels, size, generator=draw) * 30
    state = torch.randn(2, channels, size, generator=draw)
    wanted = state.double()
    out = []
    for t in range(tokens):
        by = (steps[:, :, t, None].double() * rates).exp()
        wanted = wanted * by + (steps * x)[:, :, t, None].double() * b[:, t, None]
        out.append(torch.einsum("ncs,ns->nc", wanted, c[:, t].double()))
    native.use_level(level)
    other = state.clone()
    got = scan(x, steps, rates, b, c, state, threads=1)
    halves = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
    parts = [scan(x[..., h], steps[..., h], rates, b[:, h], c[:, h], other, threads=2) for h in halves]
    assert torch.equal(torch.cat(parts, 2), got) and torch.equal(state, other)
    for found, right in ((got, torch.stack(out, 2)), (state, wanted)):
        assert (found - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_scan_of_other_sizes_is_refused():
    x, rates, b, state = torch.ones(1, 4, 2), -torch.ones(4, 3), torch.ones(1, 2, 3), torch.zeros(1, 4, 3)
    for wrong in (state[:, :3], state.bfloat16(), state.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ValueError, match="does not fit"):
            scan(x, x, rates, b, b, wrong)
    with pytest.raises(ValueError, match="does not fit"):
        scan(x, x, rates, b, b[:, :1], state)


def rows(inputs, span):
    return [None if t is None else t[span] for t in inputs]


LAYERS = [
    partial(kind, size, flag)
    for kind, sizes in ((DeltaLayer, DELTA), (MambaLayer, MAMBA))
    for size in sizes
    for flag in (False, True)
]
BOTH = pytest.mark.parametrize(
    "make", [partial(DeltaLayer, DELTA[1]), partial(MambaLayer, MAMBA[1])], ids=["delta", "mamba"]
)


@pytest.mark.parametrize("level", range(native.BEST + 1))
@pytest.mark.parametrize("make", LAYERS, ids=lambda make: f"{make.args}")
def test_sequences_against_float64(make, level):
    """Three sequences in each of three calls, of one token, of a few, of a block and more, each from its own state."""
    native.use_level(level)
    layer = make()
    windows, states = layer.start(3)
    right_windows, right_states = windows.double(), states.double()
    for lengths in ((1, 40, 7), (1, 1, 1), (33, 1, 2)):
        inputs = layer.inputs(sum(lengths))
        first = [0, *itertools.accumulate(lengths)]
        apart = (windows[:1], windows[1:]), (states[:1], states[1:])  # as rows of the server and a batch give them
        got = layer.run(inputs, first, *apart)
        for n, (a, b) in enumerate(itertools.pairwise(first)):
            want = layer.wanted(rows(inputs, slice(a, b)), right_windows[n], right_states[n])
            assert ((got[a:b] - want).abs() <= 2**-8 * want.abs() + 1e-5 * want.abs().max()).all()  # rounded to BF16
        assert torch.equal(windows.double(), right_windows)
        assert (states - right_states).norm() < 3e-6 * right_states.norm()


@BOTH
def test_neither_threads_nor_other_sequences_change_a_bit(make):
    layer = make()
    inputs, start, found = layer.inputs(300), layer.start(1), []
    for threads in (1, 2):
        window, state = (t.clone() for t in start)
        found.append((layer.run(inputs, (0, 300), (window,), (state,), threads=threads), window, state))
    assert all(map(torch.equal, *found))
    whole, window, state = found[0]
    windows, states = (t.repeat(3, *(1,) * (t.dim() - 1)) for t in start)
    several = zip(*(rows(inputs, slice(n)) for n in (9, 300, 1)), strict=True)
    joined = [None if parts[0] is None else torch.cat(parts) for parts in several]
    packed = layer.run(joined, (0, 9, 309, 310), (windows,), (states,))
    assert torch.equal(packed[9:309], whole) and torch.equal(packed[:9], packed[9:18])
    assert torch.equal(states[1:2], state) and torch.equal(windows[1:2], window)


@BOTH
def test_what_does_not_fit_is_refused(make):
    layer = make()
    inputs = layer.inputs(4)
    window, state = layer.start(1)
    before = window.clone(), state.clone()
    for first, windows, states, match in (
        ((0, 3), window, state, "projection"),
        ((0, 2, 4), window, state, "1 windows"),
        ((0, 4), window, state.double(), "a state is"),
        ((0, 4), window[:, :, 1:], state, "a state is"),
    ):
        with pytest.raises(ValueError, match=match):
            layer.run(inputs, first, (windows,), (states,))
    wrong = {"logarithms": torch.zeros(4, *layer.sizes.state[:2]), "padding": torch.ones(4)}
    match = "padding" if isinstance(layer, MambaLayer) else "logarithms"
    with pytest.raises(ValueError, match=match):
        layer.run([*inputs[:-1], wrong[match]], (0, 4), (window,), (state,))
    assert torch.equal(window, before[0]) and torch.equal(state, before[1])


def test_weights_that_do_not_fit_are_refused():
    layer = DeltaLayer(DELTA[1])
    with pytest.raises(ValueError, match="do not fit"):
        DeltaRule(DELTA[1], [Lies(0, 0, 1)] * 6, DeltaWeights(layer.filter, layer.norm, EPSILON, False))
    for sizes in (MambaSizes(3, 4, 3, 2, 2, 1), MambaSizes(1, 4, 3, 1, 9, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            MambaLayer(sizes)
