"""Dense matrices by the experts' kernels: against torch, in groups, in threads, and what is not theirs to do."""

import copy
import threading

import pytest
import torch
from expert_layers import make_layer
from tiny_models import serve_linears
from torch import nn

from moepack.pack.spec import Matrix, Version
from moepack.runtime.dense import linears as module_under_test
from moepack.runtime.dense.linears import Group, PackedMatrix, ServedLinear, groups
from moepack.runtime.dense.packed import PackedLinear
from moepack.runtime.experts import backends
from moepack.runtime.kernels import affine_native, by_torch
from moepack.runtime.planning.matrices import linears
from moepack.runtime.planning.skeleton import LiveBytes

F = nn.functional
pytestmark = pytest.mark.skipif(backends.backend(torch.device("cpu")) != "native", reason="no compiled kernels")


class Attention(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(96, 128, bias), nn.Linear(96, 64, bias)
        self.v_proj, self.o_proj = nn.Linear(96, 64, bias), nn.Linear(128, 96, bias)
        self.gate = nn.Linear(96, 96)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q + torch.cat([k, v], -1))


def packed(matrix, version, seed):
    """A packed map, and its weights and biases as float64."""
    layer = make_layer(matrix, [version], [0], seed)
    module = PackedLinear(matrix, version)
    module.packed = layer.extents[0]
    return module, (torch.from_numpy(layer.weights[0]), layer.biases[0])


def grouped(modules):
    group = Group([PackedMatrix(m.matrix, m.version, m.packed) for m in modules])
    for i, m in enumerate(modules):
        m.group, m.which = group, i
    return group


def test_what_is_found_and_what_goes_together():
    model = nn.ModuleDict({"a": Attention(), "experts": Attention(), "small": nn.Linear(63, 64)})
    names = list(linears(model, ["experts"]))
    assert names == ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"], "no router, no expert, nothing small"
    assert list(groups(names)) == [("a.q_proj", "a.k_proj", "a.v_proj"), ("a.o_proj",)]
    assert list(groups(["m.gate_proj", "m.down_proj", "m.up_proj", "n.up_proj"])) == [
        ("m.gate_proj", "m.up_proj"), ("m.down_proj",), ("n.up_proj",)
    ]  # fmt: skip


def test_narrow_maps_are_served_where_they_lie():
    """So no budget has to count them; a router's stay torch's."""
    torch.manual_seed(0)
    parts = {"b_proj": nn.Linear(97, 33, bias=False), "gate": nn.Linear(97, 33, bias=False)}
    model = nn.ModuleDict(parts).bfloat16().requires_grad_(False)
    weight, x = model["b_proj"].weight, torch.randn(1, 2, 97).bfloat16()
    at = weight.data_ptr()
    serve_linears(model)
    assert type(model["b_proj"]) is ServedLinear and type(model["gate"]) is nn.Linear
    made = model["b_proj"](x)
    assert weight.data_ptr() == at and made.dtype == torch.bfloat16
    assert (made.float() - x.float() @ weight.float().T).abs().max() < 0.03


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_bf16_matrices_move_and_multiply_as_torch_does(bias, tokens):
    torch.manual_seed(0)
    model = Attention(bias).bfloat16().requires_grad_(False)
    x = torch.randn(2, tokens, 96).bfloat16()[:1]
    before = {n: p.clone() for n, p in model.named_parameters()}
    wanted = Attention(bias).requires_grad_(False)
    wanted.load_state_dict({n: p.float() for n, p in before.items()})

    serve_linears(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    made = model(x)
    assert (made.float() - wanted(x.float())).abs().max() < 0.03 and made.dtype == torch.bfloat16
    assert type(model.q_proj) is ServedLinear and type(model.gate) is nn.Linear
    other = copy.deepcopy(model.o_proj)
    assert torch.equal(
        other(input=x.repeat(1, 1, 2)[..., :128]), F.linear(x.repeat(1, 1, 2)[..., :128], *other.parameters())
    )
    if bias:
        model.q_proj.bias.data = torch.ones(128).bfloat16()
        assert torch.equal(model.q_proj(x), F.linear(x, model.q_proj.weight, model.q_proj.bias))
    model.o_proj.weight = nn.Parameter(torch.zeros_like(model.o_proj.weight), requires_grad=False)
    rest = model.o_proj.bias if bias else torch.zeros(96)
    assert torch.equal(model(x)[0, 0].float(), rest.float()), "somebody's own weights are used"
    model.v_proj.weight.requires_grad_(True)
    model(x).sum().backward()  # of zeros, but asked for
    assert model.v_proj.weight.grad is not None, "the weight learns although the input does not"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w8", "w4", "w2"])
def test_packed_maps_are_their_dequantised_weights(name, dtype):
    version = Version.of(name, 32)
    made, weights = zip(*(packed(Matrix("weight", r, 100, True), version, r) for r in (70, 33, 16)), strict=True)
    grouped(list(made))
    for tokens in (1, 2, 5, 70):
        x = torch.randn(1, tokens, 100, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        for module, (weight, bias) in zip(made, weights, strict=True):
            wanted = x.double() @ weight.T + torch.from_numpy(bias)
            got = module(x)
            assert got.shape == (1, tokens, len(weight)) and got.dtype == dtype
            least = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}[dtype]
            assert (got - wanted).abs().max() < least * wanted.abs().max()


@pytest.mark.parametrize("tokens", [100, 300])  # straight from packed bytes, and by torch
def test_float16_takes_no_more_memory_than_a_plan_counts(tokens):
    """Which knows float16 results alone: float32 ones of a vocabulary are twice as large again."""
    module, _ = packed(Matrix("weight", 1000, 100), Version.of("w8", 32), 0)
    grouped([module])
    x = torch.randn(tokens, 100).half()
    with torch.inference_mode(), LiveBytes(module) as live:
        made = module(x)
    assert live.peak - x.nbytes - made.nbytes <= by_torch.bytes_beside(tokens, 100)


def test_siblings_are_made_at_once_and_only_of_the_same_input():
    made = [packed(Matrix("weight", 64, 64), Version.of("w4", 64), i)[0] for i in range(3)]
    group, calls = grouped(made), []
    run = group._products
    group._products = lambda x, which: calls.append(tuple(which)) or run(x, which)
    x = torch.randn(1, 64)
    alone = [run(x, (i,))[0] for i in range(3)]
    assert all(torch.equal(m(x), y) for m, y in zip(made, alone, strict=True)) and calls == [(0, 1, 2)]
    calls.clear()
    made[0](x)
    x.mul_(2)  # the very tensor, changed
    assert torch.equal(made[1](x), run(x, (1,))[0]) and calls == [(0, 1, 2), (0, 1, 2)]
    calls.clear()
    found = []
    thread = threading.Thread(target=lambda: found.append(made[2](x)))
    thread.start()
    thread.join()
    assert calls == [(0, 1, 2)], "another thread's results are its own"
    calls.clear()
    for _ in range(4):
        made[1](torch.randn(1, 64))
    assert calls[-1] == (1,), "maps that are given different inputs are multiplied by one by one"


def test_in_inference_mode_an_input_is_compared():
    made = [packed(Matrix("weight", 64, 64), Version.of("w4", 64), i)[0] for i in range(2)]
    group = grouped(made)
    with torch.inference_mode():
        x = torch.randn(1, 64)
        assert torch.equal(made[0](x), group._products(x, (0,))[0])
        x.copy_(torch.randn(1, 64))
        assert torch.equal(made[1](x), group._products(x, (1,))[0])


def test_gradients_and_copies():
    version = Version.of("w8", 64)
    module, (weight, _) = packed(Matrix("weight", 64, 64), version, 1)
    grouped([module])
    x = torch.randn(3, 64, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, weight.float().sum(0).expand(3, 64), atol=1e-4)
    with torch.no_grad():
        compiled = torch.ops.moepack.dense(x, module._number, 64)
    assert torch.equal(compiled, module(x.detach()))


def test_without_tiles_bf16_is_torchs_past_the_measured_limit(monkeypatch):
    """The limit of a processor that does not multiply BF16 is measured; it need not be that of one that does."""
    monkeypatch.setattr(backends, "dense_limits", lambda dtype, names: [40 for _ in names])
    monkeypatch.setattr(affine_native, "has_tiles", lambda dtype: True)
    assert module_under_test.most_tokens() == 16
    monkeypatch.setattr(affine_native, "has_tiles", lambda dtype: False)
    assert module_under_test.most_tokens() == 40
