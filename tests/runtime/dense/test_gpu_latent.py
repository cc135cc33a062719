"""Latents on a GPU: the results of the family's own code, whatever the map is, and what is left to that code."""

import pytest
import torch
from expert_layers import make_layer
from gpu_stand_in import kernels
from tiny_models import random_model
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, StaticCache

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from moepack.pack.spec import Matrix, Version
from moepack.runtime.dense.gpu_latent import GpuLatents, serve_gpu_latents
from moepack.runtime.dense.packed import PackedLinear
from moepack.runtime.devices import graphs
from moepack.runtime.kernels import attend_triton

PARTS = (9, 1, 1, 3, 1)  # tokens of successive passes
LENGTH = sum(PARTS)
IDS = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    kernels(monkeypatch)
    monkeypatch.setattr(attend_triton, "PROGRAMS", 4)  # the interpreter runs one after another


@pytest.fixture
def absorbed(monkeypatch):
    """The passes, by number of tokens, that attended over latents as they are."""
    found, attend = [], GpuLatents.attend

    def counted(self, query, *given):
        made = attend(self, query, *given)
        found.extend([query.shape[2]] * (made is not None))
        return made

    monkeypatch.setattr(GpuLatents, "attend", counted)
    return found


def model_of(name="plain", dtype=torch.float32):
    model, _ = random_model("deepseek_v3", dtype, num_hidden_layers=1)
    if name != "plain":
        module = model.model.layers[0].self_attn
        found = module.kv_b_proj
        matrix, version = Matrix("kv_b", found.out_features, found.in_features), Version.of(name, 32)
        module.kv_b_proj = PackedLinear(matrix, version)
        module.kv_b_proj.packed = make_layer(matrix, [version], [0], 0).extents[0]
    return model


def passes(model, padded=False, static=True, **given):
    """Logits of successive passes of two sequences, the second of which may begin with padding."""
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache(config=model.config)
    mask = torch.ones_like(IDS)
    mask[1, :2] = 1 - padded
    made, end = [], 0
    for n in PARTS:
        end += n
        with torch.no_grad():
            out = model(IDS[:, end - n : end], past_key_values=cache, attention_mask=mask[:, :end], **given)
        made.append(out.logits[:, 2 * padded * (end == n) :])
    return torch.cat(made, 1)


@pytest.mark.parametrize(
    ("case", "bytes_"), [(("plain", torch.float32), 0), (("w8", torch.bfloat16), 2), (("w8", torch.float32), 6)]
)
def test_graphs_may_take_an_unpacked_map(case, bytes_):
    """A step in a graph has memory of its own for it: DeepSeek-V3's 32 MiB did not fit beside the rest."""
    model = model_of(*case)
    assert graphs.memory(model) == graphs.MEMORY
    serve_gpu_latents(model)
    found = model.model.layers[0].self_attn.kv_b_proj
    assert graphs.memory(model) == graphs.MEMORY + bytes_ * found.out_features * found.in_features


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    "case", [("plain", torch.float32), ("plain", torch.bfloat16), ("w8", torch.float32), ("w4", torch.bfloat16)]
)
def test_it_is_the_familys_own_result(case, static, absorbed):
    """Of a static cache that is partly filled and of one that grows, with padding and without."""
    own, served = model_of(*case), model_of(*case)
    assert serve_gpu_latents(served) == {"DeepseekV3Attention": 1}
    for padded in (False, True):
        absorbed.clear()
        want, got = (passes(model, padded, static) for model in (own, served))
        # packed maps' weights are rounded to BF16, as they are for many tokens
        close = 1e-5 if case == ("plain", torch.float32) else 2**-5
        assert (got - want).abs().max() <= close * want.abs().max(), padded
        assert absorbed == [1, 1, 1]


def test_what_is_left_to_the_familys_code(absorbed, monkeypatch):
    """Gradients, who asks for attention weights, and hooks on the map; a layer that expands in another way."""
    own, served = model_of(), model_of()
    serve_gpu_latents(served)
    absorbed.clear()  # of its trial
    module = served.model.layers[0].self_attn
    for model in (own, served):
        model.set_attn_implementation("eager")
    assert torch.equal(passes(own, output_attentions=True), passes(served, output_attentions=True)) and not absorbed
    for model in (own, served):
        model.set_attn_implementation("sdpa")
    want = passes(own)
    for register in (module.kv_b_proj.register_forward_hook, register_module_forward_hook):
        hook = register(lambda *_: None)
        assert torch.equal(passes(served), want) and not absorbed
        hook.remove()
    assert not torch.equal(passes(served), want) and absorbed
    held = torch.randn(1, 1, 3, 32), torch.randn(1, 1, 3, 16)
    assert all(isinstance(t, torch.Tensor) for t in module.expand_kv(*held)), "the map's gradient may be wanted"
    kind = type(own.model.layers[0].self_attn)
    plain = kind.expand_kv
    monkeypatch.setattr(kind, "expand_kv", lambda *given: (plain(*given)[0], 1.1 * plain(*given)[1]))
    assert serve_gpu_latents(own) == {}
