"""Routers and attention: their own code around a kernel, equal results, and what is left alone."""

import copy
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import load_for_logits
from tiny_models import random_model
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moepack
from moepack.pack.spec import LOSSLESS, Matrix, Version
from moepack.runtime.experts import backends

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from moepack.runtime.dense import borrowed
from moepack.runtime.dense.borrowed import _of_shared_keys, _Registry, _served, serve_attention, serve_routers
from moepack.runtime.dense.linears import ServedLinear
from moepack.runtime.kernels import affine_native as native
from moepack.runtime.kernels import trial
from moepack.runtime.kernels.dense_native import PLAIN_FORM, HeadMatrices, KernelMatrix, attend
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.kernels.reference import dequantise, sections_of
from moepack.runtime.kernels.token_native import Choices
from moepack.runtime.planning.skeleton import LiveBytes
from moepack.runtime.step.context import Step, opened

F = nn.functional


@pytest.fixture(autouse=True)
def every_level():
    yield
    native.use_level()


def exact(query, key, value, scale):
    each = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(each, 1) for t in (key, value))
    return F.scaled_dot_product_attention(query.double(), key, value, scale=scale).transpose(1, 2)


LEVELS = (0, 1, 2, 4)  # those that attention.c tells apart


def near(made, wanted, values, level):
    """Whether results differ by rounding; the BF16 products of level 4 round weights too, by 2^-9 of each."""
    most = 2**-8 * float(values.abs().max()) if native.use_level(level) > 2 else 1e-5
    return bool(((made - wanted).abs() <= 2**-8 * wanted.abs() + most).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "length", "cols", "out"),
    [(1, 32, 4, 128, 128, 128), (3, 6, 2, 33, 40, 40), (2, 4, 4, 1, 64, 24), (1, 3, 1, 700, 33, 5),
     (1, 8, 2, 2500, 64, 96)],
)  # fmt: skip
def test_attention_of_one_token(level, batch, heads, groups, length, cols, out):
    native.use_level(level)
    torch.manual_seed(length)
    query = torch.randn(batch, 1, heads, cols).bfloat16().transpose(1, 2)
    key = torch.randn(batch, groups, length + 3, cols).bfloat16()[:, :, 3:]  # a part of a longer cache
    value = torch.randn(batch, length, groups, out).bfloat16().transpose(1, 2)
    wanted = exact(query, key, value, 0.11)
    made = attend(query, key, value, 0.11, 1)
    assert torch.equal(made, attend(query, key, value, 0.11, 2))
    assert made.shape == (batch, 1, heads, out) and made.dtype == torch.bfloat16
    assert near(made, wanted, value, level)
    huge = attend(query * 1e3, key, value, 10.0)
    assert huge.isfinite().all(), "no overflow where one key takes all"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("heads", "groups", "tokens", "length", "cols", "second"),
    [(16, 1, 1, 2300, 64, 32), (5, 1, 7, 130, 48, 24), (6, 2, 3, 9, 96, 32)],
)  # fmt: skip
def test_attention_of_more_tokens_over_keys_in_two_parts(level, heads, groups, tokens, length, cols, second):
    """As a latent layer's: values are the first part of the keys. With a mask, and with that of the tokens' order."""
    native.use_level(level)
    torch.manual_seed(length)
    query = torch.randn(2, heads, tokens, cols + second).bfloat16()
    keys = torch.randn(2, groups, length, cols).bfloat16(), torch.randn(2, groups, length, second).bfloat16()
    order = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens).repeat(2, 1, 1, 1)
    hidden = order.clone()
    hidden[1, :, :, : length // 2] = False
    for mask, given in ((order, None), (hidden, hidden)):
        key, value, asked = (t.double() for t in (torch.cat(keys, -1), keys[0], query))
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
        wanted = F.scaled_dot_product_attention(asked, key, value, mask, scale=0.09).transpose(1, 2)
        made = attend((query[..., :cols], query[..., cols:]), keys, keys[0], 0.09, mask=given)
        assert near(made, wanted, keys[0], level)
        sinks = torch.randn(heads)
        scores = (asked @ key.transpose(2, 3) * 0.09).masked_fill(~mask, -torch.inf)
        beside = sinks.double().view(1, -1, 1, 1).expand(2, -1, tokens, 1)
        shares = torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
        made = attend((query[..., :cols], query[..., cols:]), keys, keys[0], 0.09, mask=given, sinks=sinks)
        assert near(made, (shares @ value).transpose(1, 2), keys[0], level)
    nothing = torch.zeros_like(order)
    assert not attend((query[..., :cols], query[..., cols:]), keys, keys[0], 0.09, mask=nothing).any()
    keys[0][0, 0, 0] = torch.nan
    made = attend((query[..., :cols], query[..., cols:]), keys, keys[0], 0.09)
    assert made[0].isnan().any() and made[1].isfinite().all(), "one that is not a number stays in its sequence"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [LOSSLESS, "w8", "w4", "w3", "mxfp4"])
def test_products_of_heads(level, name):
    """Each head by its own rows of one matrix, as it is and transposed: plain and packed, of one token and of 18."""
    native.use_level(level)
    torch.manual_seed(0)
    matrix, version = Matrix("kv_b", 3 * (16 + 32), 96, False), Version.of(name)
    weight = torch.randn(matrix.rows, matrix.cols).bfloat16()
    if name == LOSSLESS:
        of = KernelMatrix(PLAIN_FORM, matrix.rows, matrix.cols, weight)
    else:
        random = np.random.default_rng(0)
        extent = trial.extent_of(version, matrix, random)
        (form,) = make_forms((matrix,), version)
        of = KernelMatrix(form, matrix.rows, matrix.cols, extent)
        (sections,) = sections_of((matrix,), version)
        weight = dequantise(extent, sections, matrix, version, torch.bfloat16)
    heads = HeadMatrices(of, 3, 16, 32)
    each = weight.double().view(3, 48, 96)
    for tokens in (1, 18):
        first, summed = torch.randn(tokens, 3, 16).bfloat16(), torch.randn(tokens, 3, 96).bfloat16()
        lifted = torch.einsum("thn,hnr->thr", first.double(), each[:, :16])
        lowered = torch.einsum("thr,hvr->thv", summed.double(), each[:, 16:])
        for made, wanted in ((heads.lift(first), lifted), (heads.lower(summed), lowered)):
            assert (made - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_what_attention_refuses():
    q, k = torch.zeros(1, 4, 1, 8).bfloat16(), torch.zeros(1, 2, 5, 8).bfloat16()
    for query, key, value in ((q.repeat(1, 1, 6, 1), k, k), (q, k[:, :, :0], k[:, :, :0]), (q[:, :3], k, k),
                              (q, k.transpose(2, 3).contiguous().transpose(2, 3), k), (q, k, k[:, :1])):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            attend(query, key, value, 1.0)


def test_only_one_new_token_without_a_mask_is_the_kernels():
    def plain(*args, **kwargs):
        return "plain"

    attention, module = _of_shared_keys(plain), SimpleNamespace(num_key_value_groups=2)
    assert _of_shared_keys(plain) is attention
    q, k = torch.randn(1, 4, 1, 16).bfloat16(), torch.randn(1, 2, 9, 16).bfloat16()
    assert torch.equal(attention(module, q, k, k, None)[0], attend(q, k, k, 0.25))
    for changed in (
        {"query": q.repeat(1, 1, 2, 1)}, {"attention_mask": torch.ones(1)}, {"dropout": 0.1}, {"query": q.float()},
        {"softcap": 3.0}, {"s_aux": torch.ones(1)}, {"query": q.clone().requires_grad_()},
    ):  # fmt: skip
        given = {"query": q, "key": k, "value": k, "attention_mask": None} | changed
        assert attention(module, **given) == "plain", changed
    assert attention(SimpleNamespace(num_key_value_groups=4), q, k, k, None) == "plain", "torch repeats keys as it says"
    with torch.no_grad():
        assert attention(module, q.clone().requires_grad_(), k, k, None) != "plain"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_tokens_with_a_mask_do_not_copy_keys(dtype):
    """The bits of transformers' function, in no more memory than results and what torch packs for one group."""
    torch.manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=4, is_causal=True, training=False)
    query, key, value = (torch.randn(2, heads, n, 32).to(dtype) for heads, n in ((12, 20), (3, 700), (3, 700)))
    given = nn.Module()
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        given.register_buffer(name, tensor)
    seen = torch.ones(2, 1, 20, 700, dtype=torch.bool).tril_(680)
    seen[1, :, :, :9] = False
    attention = _of_shared_keys(sdpa_attention_forward)
    ranked = []
    for mask in (seen, seen.repeat(1, 12, 1, 1), torch.zeros(2, 1, 20, 700, dtype=dtype).masked_fill(~seen, -1e30)):
        wanted = sdpa_attention_forward(module, query, key, value, mask, scaling=0.2)[0]
        step = Step(importance=SimpleNamespace(saw=lambda *call: ranked.append(call[2])))
        with opened(step), LiveBytes(given) as live:
            made = attention(module, query, key, value, mask, scaling=0.2)[0]
        assert torch.equal(made, wanted) and made.is_contiguous()
        assert live.peak < 4 * made.nbytes + 3 * key.nbytes + 2 * mask.nbytes
    assert len(ranked) == 3 and all(keys is key for keys in ranked)


def test_a_static_caches_room_is_not_copied():
    """Of keys behind a prompt torch reads none; with heads this wide transformers copies them for every head first."""
    module = SimpleNamespace(num_key_value_groups=4, is_causal=True, training=False)
    query, key = torch.randn(1, 8, 20, 320), torch.randn(1, 2, 700, 320)
    given = nn.Module()
    given.register_buffer("query", query)
    given.register_buffer("key", key)
    wanted = sdpa_attention_forward(module, query, key, key, None)[0]
    with LiveBytes(given) as live:
        made = _of_shared_keys(sdpa_attention_forward)(module, query, key, key, None)[0]
    assert torch.equal(made, wanted) and live.peak < key.nbytes
    module.is_causal = False
    wanted = sdpa_attention_forward(module, query, key, key, None)[0]
    assert torch.equal(_of_shared_keys(sdpa_attention_forward)(module, query, key, key, None)[0], wanted)


def test_only_transformers_own_function_is_replaced():
    """Another one may be registered as "sdpa": it runs, whatever its arguments are. A watched one counts as its own."""
    registry, table = ALL_ATTENTION_FUNCTIONS, {"sdpa": exact}
    own = _Registry(registry, _served)
    assert own.get_interface("sdpa", exact) is _of_shared_keys(registry["sdpa"]) is own["sdpa"]
    assert own.get_interface("eager", exact) is registry.get_interface("eager", exact)
    assert _Registry(table, _served)["sdpa"] is exact


class Block(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate, self.experts = gate, nn.Identity()


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.used = nn.Parameter(torch.randn(8, 96)), 0

    def forward(self, x):
        logits = F.linear(x, self.weight)
        return logits, logits.topk(2).indices


class Other(Router):
    """Its logits are not those of its weight alone."""

    def forward(self, x):
        self.used += 1
        logits = F.linear(x, self.weight) * self.used
        return logits, logits.topk(2).indices


def test_routers_run_their_own_code():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Block(Router()), "b": Block(Other()), "c": Block(nn.Linear(96, 8))}).bfloat16()
    assert serve_routers(model, ["a.experts", "b.experts", "c.experts"]) == {"Router": 1, "Linear": 1}
    router, x = model["a"].gate, torch.randn(1, 96).bfloat16()
    with torch.no_grad():
        logits, chosen = router(x)
        wanted = (x.double() @ router.weight.double().T).bfloat16()
        assert (logits - wanted).abs().max() <= 2**-6 * wanted.abs().max()
        assert torch.equal(chosen, logits.topk(2).indices)
        router.weight.data = router.weight * 2  # somebody put other weights there
        assert torch.allclose(router(x)[0], F.linear(x, router.weight))
    many = torch.randn(40, 96).bfloat16()
    assert torch.equal(router(many)[0], F.linear(many, router.weight))


ROUTERS = {  # a family's router: its class, and what a model's configuration says beside its defaults
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"norm_topk_prob": True}),
    "mixtral": ("MixtralTopKRouter", {}),
    "gpt_oss": ("GptOssTopKRouter", {}),
    "granitemoe": ("GraniteMoeTopKRouter", {"num_local_experts": 40, "num_experts_per_tok": 8}),
    "deepseek_v2": ("DeepseekV2TopkRouter", {"num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1}),
    "deepseek_v3": ("DeepseekV3TopkRouter", {}),
    "glm4_moe": ("Glm4MoeTopkRouter", {}),
}


@pytest.mark.numeric
@pytest.mark.parametrize("family", ROUTERS)
def test_a_router_chooses_as_its_own_code(family, monkeypatch):
    """Also among equal scores, which BF16 logits often are; routers of float32 logits compute in float32."""
    name, facts = ROUTERS[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    router = getattr(modeling, name)(AutoConfig.for_model(family, hidden_size=96, **facts))
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape) * (0.2 if tensor.dim() == 1 else 0.1))
    router.weight.data = router.weight.data.to(torch.float32 if family == "deepseek_v3" else torch.bfloat16)
    if getattr(router, "bias", None) is not None:
        router.bias.data = router.bias.data.bfloat16()
    model = nn.ModuleDict({"mlp": Block(router)})
    own = type(router)
    chosen = []
    choose = Choices.choose
    monkeypatch.setattr(Choices, "choose", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    assert serve_routers(model, ["mlp.experts"]) == {name: 1}
    for x in torch.randn(300, 1, 96).bfloat16():
        with torch.no_grad():
            logits, gates, index = router(x)
            wanted = own.forward(router, x)
        assert index is chosen[-1][0]
        assert logits.dtype == wanted[0].dtype and gates.dtype == wanted[1].dtype
        close = 1e-5 if logits.dtype == torch.float32 and family != "granitemoe" else 2**-6
        assert (logits - wanted[0]).abs().max() <= close * wanted[0].abs().max()
        if torch.equal(logits, wanted[0]):
            assert torch.equal(index, wanted[2])
            assert (gates - wanted[1]).abs().max() <= 2**-7 * wanted[1].abs().max()


def test_a_served_model_decodes_as_without_kernels(bundle, monkeypatch):
    """Step by step after a prompt: the logits of a model whose modules are their own."""
    served = moepack.load(bundle, policy="static:bf16", dtype=torch.bfloat16)
    assert {"Qwen3MoeRMSNorm", "Qwen3MoeTopKRouter", "Qwen3MoeAttention"} <= served.moepack.replaced.keys()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "backend", lambda device: "reference")
        plain = moepack.load(bundle, policy="static:bf16", dtype=torch.bfloat16)
    assert not plain.moepack.replaced
    ids = torch.randint(1, 1000, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        caches = [DynamicCache(config=m.config) for m in (served, plain)]
        for part in (ids[:, :16], *ids[:, 16:].split(1, 1)):
            got, wanted = (
                m(input_ids=part, past_key_values=c, use_cache=True).logits.float().log_softmax(-1)
                for m, c in zip((served, plain), caches, strict=True)
            )
            divergence = (wanted.exp() * (wanted - got)).sum(-1)
            assert divergence.max() < 2e-3


def test_a_budget_leaves_matrices_where_kernels_read_them(bundle):
    """Weights are copied out of their files before they move into huge pages, not after."""
    with load_for_logits(bundle, policy="static:w4", device_memory=64_000_000, dtype=torch.bfloat16).moepack as serving:
        assert serving.budget_bytes == 64_000_000
    model = load_for_logits(bundle, policy="hotness", device_memory=64_000_000, dtype=torch.bfloat16)
    served = [m for m in model.modules() if isinstance(m, ServedLinear)]
    assert served and all(m._moepack_place is not None and m._moepack_place.holds(m) for m in served)
    model.moepack.close()


def _windowed(dtype):
    """A random gpt-oss of a sliding and a full layer, with sinks that matter."""
    model, _ = random_model("gpt_oss", dtype)
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks.data = torch.randn(module.sinks.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    return model.eval()


def test_a_familys_own_attention_runs_by_the_kernel(monkeypatch):
    """Sinks, windows and padding, prompts and tokens: no more error than the family's code. Who asks for weights gets
    them; who ranks tokens by keys sees these, at no change."""
    own = _windowed(torch.bfloat16)
    exact, model = copy.deepcopy(own).float(), copy.deepcopy(own)
    serve_attention(model)
    layers = [layer.self_attn for layer in model.model.layers]
    assert own.config._attn_implementation == "eager" and all(module._moepack_eager for module in layers)
    ids = torch.randint(1, 250, (2, 60), generator=torch.Generator().manual_seed(0))
    text = torch.ones_like(ids)
    text[1, :5] = 0
    calls = []
    monkeypatch.setattr(borrowed, "attend", lambda *args, **more: calls.append(1) or attend(*args, **more))

    def passes(of):
        cache, out = DynamicCache(config=of.config), []
        for part in (slice(0, 50), slice(50, 51), slice(51, 60)):
            with torch.no_grad(), opened(Step()):
                out.append(of(ids[:, part], attention_mask=text[:, : part.stop], cache=cache).logits)
        return torch.cat(out, 1)[:, 5:].double()

    wanted, plain, made = (passes(of) for of in (exact, own, model))
    assert len(calls) == 3 * len(layers)
    errors = [float((found - wanted).norm()) for found in (made, plain)]
    assert errors[0] <= 1.2 * errors[1]
    calls.clear()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own(ids).logits) and not calls, "outside of a step"
        with opened(Step(weighed=True)):
            assert torch.equal(model(ids).logits, own(ids).logits) and not calls
        seen = []
        with opened(Step()):
            unwatched = model(ids).logits
        with opened(Step(importance=SimpleNamespace(saw=lambda *call: seen.append(call[2].shape)))):
            assert torch.equal(model(ids).logits, unwatched) and len(seen) == len(layers)
    weights = torch.full((1, 1, 1, 40), -0.5, dtype=torch.bfloat16)  # a bias by distance, which hides no key
    query = torch.randn(1, 4, 1, layers[0].head_dim).bfloat16()
    assert borrowed._seen(weights, query, torch.randn(1, 2, 40, 8)) is None


def test_a_family_that_attends_otherwise_keeps_its_own_code(monkeypatch):
    """The fault: a function taken for plain attention by its name."""
    from transformers.models.gpt_oss import modeling_gpt_oss as code

    plain = code.eager_attention_forward

    def louder(*args, **given):
        out, weights = plain(*args, **given)
        return 1.1 * out, weights

    monkeypatch.setattr(code, "eager_attention_forward", louder)
    monkeypatch.setattr(borrowed, "_attention", borrowed._attention.__wrapped__)  # which keeps a class's names
    model = _windowed(torch.bfloat16)
    serve_attention(model)
    assert not any(layer.self_attn._moepack_eager for layer in model.model.layers)
