"""Products of many tokens by torch: against float64, in a bounded room, with and without instructions for BF16."""

import pytest
import torch
from expert_layers import native
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moepack.runtime.kernels import by_torch
from moepack.runtime.planning.skeleton import LiveBytes

SHAPES = [(1, 8, 1), (7, 33, 255), (513, 40, 300), (1100, 96, 777)]  # tokens, cols, rows


@pytest.fixture(params=[False, True], ids=["instructions", "emulated"])
def has(request, monkeypatch):
    """Whether torch says that the processor multiplies BF16."""
    found = not request.param
    monkeypatch.setattr("moepack.pack.isa.ONEDNN_BOUND", "")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: found)
    return found


def parts(tokens, cols, rows, dtype):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, cols), (rows, cols), (rows,))
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "biased"), [(shape, bool(k % 2)) for k, shape in enumerate(SHAPES)])
def test_products_are_rounded_as_they_should_be(shape, dtype, biased, has):
    """Once from float32 sums, where they are widened; torch's own BF16 products round the bias apart."""
    x, weight, bias = parts(*shape, dtype)
    made = by_torch.linear(x, weight, bias if biased else None)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # converts neither what was widened nor float32
        assert torch.equal(by_torch.linear(x, weight, bias if biased else None), made)
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
    terms = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    exact = 2.0**-20 * terms  # of float32 sums, in whatever order
    if dtype == torch.bfloat16:
        exact += 2.0**-8 * wanted.abs() if not has else 2.0**-7 * terms
    assert made.dtype == dtype
    assert bool(((made.double() - wanted).abs() <= exact).all())


def test_leading_axes_and_no_tokens(has):
    """As torch's `linear`."""
    x, weight, bias = parts(12, 16, 20, torch.bfloat16)
    whole = by_torch.linear(x, weight, bias)
    assert torch.equal(by_torch.linear(x.view(3, 4, 16), weight, bias), whole.view(3, 4, 20))
    assert by_torch.linear(x[:0], weight, bias).shape == (0, 20)


def test_weights_are_asked_for_in_parts(has):
    """Every row once for so many tokens, never more than ROWS, in the dtype that is multiplied in."""
    tokens, rows = by_torch.TOKENS + 1, 2 * by_torch.ROWS + 5
    x, weight, _ = parts(tokens, 24, rows, torch.bfloat16)
    asked = []

    def some(first, last, dtype):
        asked.append((first, last, dtype))
        return by_torch.of_matrix(weight)(first, last, dtype)

    out = torch.empty(tokens, rows, dtype=torch.bfloat16)
    by_torch.multiply(x, some, out)
    dtype = torch.bfloat16 if has else torch.float32
    once = [(0, 256, dtype), (256, 512, dtype), (512, 517, dtype)]
    assert asked == once + once
    assert torch.equal(out, by_torch.linear(x, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_room_beside_is_what_is_said(shape, has):
    """Never more; and as much, where rows and tokens fill it."""
    x, weight, bias = parts(*shape, torch.bfloat16)
    out = torch.empty(shape[0], shape[2], dtype=torch.bfloat16)
    held = nn.Module()
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("out", out)):
        held.register_buffer(name, tensor)
    with LiveBytes(held) as live:
        by_torch.multiply(x, by_torch.of_matrix(weight), out, bias)
    room = by_torch.bytes_beside(shape[0], shape[1])
    assert live.peak <= room
    if not has and shape[2] >= by_torch.ROWS:
        assert live.peak >= 0.9 * room


class Products(TorchDispatchMode):
    """Columns of what torch multiplies in BF16, but for attention's own products."""

    def __init__(self):
        super().__init__()
        self.rows = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function._schema.name in {"aten::mm", "aten::addmm", "aten::linear"} and out.dtype == torch.bfloat16:
            self.rows.add(out.shape[-1])
        return out


@pytest.mark.parametrize(("policy", "autocast"), [("static:bf16", True), ("static:w3", False)])
def test_of_a_served_models_linear_maps_the_routers_alone_are_emulated(bundle, has, policy, autocast, monkeypatch):
    """Of many tokens, by kernels without tiles."""
    import moepack
    from moepack.runtime.experts import backends

    native.use_level(min(native.BEST, native.LEVELS.index("avx512")))
    backends.forget()
    try:
        monkeypatch.setattr(backends, "_limits", lambda names, threads: [16 for _ in names])
        model = moepack.load(bundle, policy=policy)
        ids = torch.randint(1, 1000, (1, 700), generator=torch.Generator().manual_seed(0))
        context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
        with torch.inference_mode(), context, Products() as products:
            logits = model(ids).logits
    finally:
        native.use_level()
        backends.forget()
    experts, vocabulary = model.config.num_experts, model.config.vocab_size
    assert logits.shape == (1, 700, vocabulary)
    if not has:
        assert products.rows == {experts}
    else:
        assert {experts, vocabulary} < products.rows
    model.moepack.close()
