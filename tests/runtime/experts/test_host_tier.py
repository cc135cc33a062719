"""The host tier: the bits of one call whatever is where, its rate, its threads, and what fails on it."""

import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support import PATIENCE, at_once

from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.experts import backends
from moepack.runtime.experts import forward as forward_module
from moepack.runtime.experts.forward import across, experts_forward
from moepack.runtime.experts.handles import NOTHING, LayerCall, LayerExperts
from moepack.runtime.experts.host_tier import HostTier
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.policies.placements import Where

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 8, 64, 96
MATRICES = (Matrix("gate_up", 2 * INNER, HIDDEN), Matrix("down", HIDDEN, INNER))
VERSIONS = tuple(Version.of(name, 32) for name in ("bf16", "w4", "w3", "w2", "w1"))
NATIVE = backends.backend(CPU) == "native"


class Module(torch.nn.Module):
    """The part of a transformers experts module that the forward calls."""

    has_gate, act_fn, has_post_expert_norm = True, torch.nn.SiLU(), False
    _moepack: LayerExperts

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class Normed(Module):
    """Of a family that normalises what an expert makes."""

    has_post_expert_norm = True

    def __init__(self):
        super().__init__()
        self.post_expert_norm = torch.nn.RMSNorm(HIDDEN)
        self.post_expert_norm.weight.data.uniform_(0.5, 1.5)


def extent(version, seed):
    """A random expert's, resident."""
    room = torch.zeros(version.resident_size(MATRICES), dtype=torch.uint8)
    rng = np.random.default_rng(seed)

    def bf16(values):
        return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.uint16).numpy()

    if version.plain:
        for m, form in zip(MATRICES, make_forms(MATRICES, version), strict=True):
            w = bf16(rng.normal(0, 0.1, m.weights))
            room[form.low : form.low + 2 * m.weights] = torch.from_numpy(w.view(np.uint8))
        return room
    parts = []
    for m in MATRICES:
        shape = (m.rows, -(-m.cols // 32))
        zero = rng.integers(64, 192, shape).astype(np.uint8) if version.stores_zeros else None
        codes = rng.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8)
        parts.append(AffineMatrix(codes, bf16(rng.uniform(0.01, 0.03, shape)), zero, None))
    room.numpy()[:] = version.encode(MATRICES, parts)[0]
    return room


EXTENTS = [extent(VERSIONS[e % len(VERSIONS)], e) for e in range(EXPERTS)]


def layer_of(places, tier, module=None):
    """A layer whose experts are in these places, each in a version of its own."""
    made = Module() if module is None else module
    layer = made._moepack = LayerExperts(ExpertLayer(0, "experts", EXPERTS, MATRICES), VERSIONS, CPU)
    layer.of.tier = tier
    for e, where in enumerate(places):
        version = VERSIONS[e % len(VERSIONS)]
        handle = NOTHING if where is Where.ABSENT else layer.of.over(version, EXTENTS[e], where)
        layer.publish(e, handle)
    return made


def routed(tokens, top_k, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(EXPERTS, generator=rng)[:top_k] for _ in range(tokens)])
    gates = torch.rand(tokens, top_k, generator=rng)
    return torch.randn(tokens, HIDDEN, generator=rng).to(dtype), index, gates.to(dtype)


@pytest.fixture
def tier():
    made = HostTier(threads=1)
    yield made
    made.close()
    assert not made._thread.is_alive()


PLACES = st.lists(st.sampled_from([Where.DEVICE, Where.HOST, Where.ABSENT]), min_size=EXPERTS, max_size=EXPERTS)


@pytest.mark.parametrize("backend", ["native", "reference"] if NATIVE else ["reference"])
@given(
    places=PLACES,
    tokens=st.sampled_from([0, 1, 3, 40, 200]),
    top_k=st.sampled_from([1, 2, EXPERTS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    normed=st.booleans(),
    grad=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_bits_are_those_of_one_call(
    backend,
    places,
    tokens,
    top_k,
    dtype,
    normed,
    grad,
    tier,
):
    """Whichever experts the host has; those that are absent add nothing on either side."""
    family = (Normed if normed else Module)().to(dtype)
    family.requires_grad_(False)
    x, index, gates = (t[:tokens] for t in routed(max(1, tokens), top_k, dtype))
    together = [Where.DEVICE if where is Where.HOST else where for where in places]
    outs = []
    for where, beside in ((together, None), (places, tier)):
        module = layer_of(where, beside, family)
        module._moepack.of.backend = backend
        with torch.enable_grad() if grad else torch.inference_mode():
            outs.append(experts_forward(module, x, index, gates))
    assert outs[0].dtype == dtype and torch.equal(*outs)


def test_bytes_are_counted_and_the_rate_holds():
    """What a call reads of host experts takes bytes / rate at the least: those that are active, each once."""
    places = [Where.HOST] * 4 + [Where.DEVICE] * 4
    x, _, _ = routed(3, 2, torch.float32)
    index, gates = torch.tensor([[0, 5], [0, 3], [7, 6]]), torch.full((3, 2), 0.5)
    active = len(EXTENTS[0]) + len(EXTENTS[3])
    tier = HostTier(1, rate=active / 0.1)
    module = layer_of(places, tier)
    began = time.perf_counter()
    out = experts_forward(module, x, index, gates)
    assert time.perf_counter() - began >= 0.1 and tier.seconds >= 0.1
    assert (tier.bytes, tier.calls) == (active, 1)
    experts_forward(module, x[2:], index[2:], gates[2:])
    assert (tier.bytes, tier.calls) == (active, 1), "none of the host's was asked for"
    tier.rate = None
    assert torch.equal(experts_forward(module, x, index, gates), out) and tier.bytes == 2 * active
    tier.close()


def test_passes_at_once_share_it_and_mix_no_rows(tier):
    module = layer_of([Where.HOST if e % 2 else Where.DEVICE for e in range(EXPERTS)], tier)

    def work(seed):
        x, index, gates = routed(5 + seed, 3, torch.bfloat16, seed)
        want = experts_forward(module, x, index, gates)
        for _ in range(60):
            assert torch.equal(experts_forward(module, x, index, gates), want)

    at_once(work, 3)


def test_what_fails_on_it_reaches_the_caller(tier, monkeypatch):
    module = layer_of([Where.HOST] * EXPERTS, tier)
    x, index, gates = routed(4, 2, torch.float32)
    want = experts_forward(module, x, index, gates)

    def failing(*args):
        raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"), monkeypatch.context() as patch:
        patch.setattr(forward_module, "_rows", failing)
        experts_forward(module, x, index, gates)
    assert torch.equal(experts_forward(module, x, index, gates), want), "it goes on"


def test_an_interrupted_pass_waits_for_its_call(tier):
    """The call reads what the step keeps: it has ended when the interruption is seen."""
    began, going, ended = threading.Event(), threading.Event(), []

    def work():
        began.set()
        going.wait(PATIENCE)
        ended.append(True)
        return torch.zeros(1), 1

    threading.Timer(0.05, going.set).start()
    with pytest.raises(KeyboardInterrupt), tier.beside(work):
        began.wait(PATIENCE)
        raise KeyboardInterrupt
    assert ended
    with pytest.raises(ValueError, match="the device's"), tier.beside(failing_work):
        raise ValueError("the device's")


def failing_work():
    raise MemoryError("the host's")


def test_a_rate_does_not_hold_up_what_is_unwanted_or_closed():
    tier = HostTier(1, rate=1.0)
    with pytest.raises(KeyboardInterrupt), tier.beside(lambda: (torch.zeros(1), 1000)):
        raise KeyboardInterrupt
    threading.Timer(0.1, tier.close, (False,)).start()
    with tier.beside(lambda: (torch.ones(1), 1000)) as job:
        pass
    assert job.out is not None  # at the rate both would take 2,000 s, longer than a test may
    tier.close()


# --- another device


class LateLink:
    """Copies are carried out when somebody waits for them, and that is only once the device's experts were launched.

    What was fetched is rewritten afterwards, as the device's memory would be: who reads it late is found out.
    """

    def __init__(self):
        self.launched, self.log = threading.Event(), []

    def fetch(self, *tensors):
        self.log.append("fetch")
        kept = tuple(t.clone() for t in tensors)
        copied = tuple(torch.full_like(t, 1) for t in tensors)

        def arrived():
            assert self.launched.wait(PATIENCE), "the device's experts wait for the host's"
            for to, value in zip(copied, kept, strict=True):
                to.copy_(value)
            self.log.append("arrived")
            return copied

        return arrived

    def send(self, made, device):
        self.log.append("send")
        return made.clone()


def test_on_another_device_the_host_runs_beside_it(tier):
    """Activations are sent off first, then the device's kernels are launched; what the host made is added at last."""
    link = tier.link = LateLink()
    places = [(Where.HOST, Where.DEVICE, Where.ABSENT)[e % 3] for e in range(EXPERTS)]

    class Launching(Normed):
        def _apply_gate(self, x):
            if threading.current_thread() is caller:
                link.log.append("launched")
                link.launched.set()
            return super()._apply_gate(x)

    caller = threading.current_thread()
    module = layer_of(places, tier, Launching())
    x, index, gates = routed(6, 3, torch.float32)
    with torch.inference_mode():
        got = across(LayerCall(module, module._moepack.current, x, index, gates), tier)
        plain = layer_of([Where.DEVICE if w is Where.HOST else w for w in places], None, module)
        want = experts_forward(plain, x, index, gates)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert link.log[:4] == ["fetch", "launched", "arrived", "send"]
    active = {e for e in index.reshape(-1).tolist() if places[e] is Where.HOST}
    assert tier.bytes == sum(len(EXTENTS[e]) for e in active)
