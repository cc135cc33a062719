"""A state space layer against float64, at sizes that divide nothing, with states that go from call to call."""

import itertools

import pytest
import torch
from torch.nn.functional import conv1d, silu, softplus

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
from moepack.runtime.kernels import affine_native as native
from moepack.runtime.kernels.mamba_native import Mamba, MambaSizes, MambaWeights

SIZES = [MambaSizes(1, 5, 3, 1, 2, 1), MambaSizes(6, 20, 37, 2, 3, 2), MambaSizes(4, 64, 128, 1, 4, 1)]
EPSILON = 1e-6


class Layer:
    """A layer with random weights; limits of steps are within what they reach."""

    def __init__(self, sizes, bias=True):
        self.sizes = sizes
        self.draw = torch.Generator().manual_seed(0)
        self.filter, self.norm = self.random(*sizes.window), self.random(sizes.heads * sizes.dim)
        self.filter_bias = self.random(len(self.filter)) if bias else None
        scale, self.bias, self.skip = (self.random(sizes.heads).float() for _ in range(3))
        self.scale = scale.exp()
        self.limits = (0.2, 3.0)
        self.rule = Mamba(
            sizes,
            MambaWeights(
                self.filter, self.filter_bias, self.norm, EPSILON, self.scale, self.bias, self.limits, self.skip
            ),
        )

    def random(self, *shape):
        return torch.randn(*shape, generator=self.draw).bfloat16()

    def start(self, sequences):
        return self.random(sequences, *self.sizes.window), self.random(sequences, *self.sizes.state).float()

    def wanted(self, x, live, window, state):
        """One sequence in float64; `window` and `state` move on."""
        sizes = self.sizes
        heads, dim, size = sizes.state
        gate, inner, step = x.double().split([heads * dim, len(self.filter), heads], 1)
        mixed = torch.cat((window.double(), inner.T), 1)
        window.copy_(mixed[:, -sizes.width :])
        bias = None if self.filter_bias is None else self.filter_bias.double()
        made = silu(conv1d(mixed[None, :, 1:], self.filter.double()[:, None], bias, groups=len(mixed))[0]).T
        made = made * live[:, None]
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
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_sequences_against_float64(sizes, bias, level):
    """Three sequences in each of three calls, of one token, of a few, of a block and more, each from its own state."""
    native.use_level(level)
    layer = Layer(sizes, bias)
    windows, states = layer.start(3)
    right_windows, right_states = windows.double(), states.double()
    for lengths in ((1, 40, 7), (1, 1, 1), (33, 1, 2)):
        x = layer.random(sum(lengths), sizes.cols)
        live = torch.ones(len(x), dtype=torch.bool)
        live[2:4] = False
        first = [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
        apart = (windows[:1], windows[1:]), (states[:1], states[1:])  # as rows of the server and a batch give them
        got = layer.rule.run(x, first, *apart, live)
        for n, (a, b) in enumerate(itertools.pairwise(first)):
            want = layer.wanted(x[a:b], live[a:b], right_windows[n], right_states[n])
            assert ((got[a:b] - want).abs() <= 2**-8 * want.abs() + 1e-5 * want.abs().max()).all()  # rounded to BF16
        assert torch.equal(windows.double(), right_windows)
        assert (states - right_states).norm() < 3e-6 * right_states.norm()


def test_neither_threads_nor_other_sequences_change_a_bit():
    layer = Layer(SIZES[2])
    x = layer.random(300, layer.sizes.cols)
    start = layer.start(1)
    found = []
    for threads in (1, 2):
        window, state = (t.clone() for t in start)
        found.append((layer.rule.run(x, (0, 300), (window,), (state,), threads=threads), window, state))
    assert all(map(torch.equal, *found))
    windows, states = (t.repeat(3, *(1,) * (t.dim() - 1)) for t in start)
    packed = layer.rule.run(torch.cat((x[:9], x, x[:1])), (0, 9, 309, 310), (windows,), (states,))
    assert torch.equal(packed[9:309], found[0][0]) and torch.equal(packed[:9], packed[9:18])
    assert torch.equal(states[1:2], found[0][2]) and torch.equal(windows[1:2], found[0][1])


def test_what_does_not_fit_is_refused():
    layer = Layer(SIZES[1])
    x = layer.random(4, layer.sizes.cols)
    window, state = layer.start(1)
    before = window.clone(), state.clone()
    for given, match in (
        (((0, 3), (window,), (state,)), "projection"),
        (((0, 2, 4), (window,), (state,)), "1 windows"),
        (((0, 4), (window,), (state.double(),)), "a state is"),
        (((0, 4), (window,), (state,), torch.ones(4)), "padding"),
    ):
        with pytest.raises(ValueError, match=match):
            layer.rule.run(x, *given)
    for sizes in (MambaSizes(3, 4, 3, 2, 2, 1), MambaSizes(1, 4, 3, 1, 9, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            Layer(sizes)
    assert torch.equal(window, before[0]) and torch.equal(state, before[1])
