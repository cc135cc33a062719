"""What programs do with the model as an object (docs/in-other-programs.md, "The model as an object")."""

import copy
import io
import os
import pickle

import pytest
import torch
from support import HOT, ids
from transformers import AutoModelForCausalLM

from moepack.pack.errors import InputError


@pytest.mark.row("`copy`, `deepcopy`, `pickle`, `torch.save` of the model, a layer or `model.moepack`")
def test_copies(row, free, hot, same):
    for model in (free, hot):
        layer = model.model.layers[0]
        for part in (model, model.model, layer, layer.mlp.experts, model.moepack):
            for call in (copy.deepcopy, pickle.dumps, lambda part: torch.save(part, io.BytesIO())):
                row.refuses(call, part)
        row.refuses(copy.copy, model)
        assert same(model)


@pytest.mark.row("`save_pretrained`, `push_to_hub`, of the model or its decoder")
def test_saving(row, free, hot, tmp_path):
    for model in (free, free.model, hot, hot.model):
        row.refuses(model.save_pretrained, tmp_path / "saved")
        row.refuses(model.push_to_hub, "me/saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.row("`state_dict`, `load_state_dict`, `torch.save` of the state")
def test_state(row, another, plain, same):
    dense = {name: t for name, t in plain.state_dict().items() if ".experts." not in name}
    for options in ({}, HOT):
        model, file = another(**options), io.BytesIO()
        assert model.state_dict().keys() == dense.keys()
        torch.save(model.state_dict(), file)
        file.seek(0)
        with torch.no_grad():
            model.model.norm.weight.zero_()
        assert not same(model)
        model.load_state_dict(torch.load(file))
        assert same(model)


@pytest.mark.row("`load_state_dict` of the plain model's state")
def test_plain_state(row, free, hot, plain):
    for model in (free, hot):
        row.refuses(model.load_state_dict, plain.state_dict())


@pytest.mark.row("`.to`, `.cpu` where it is already")
def test_staying(row, another, same):
    for model in (another(), another(**HOT)):
        assert model.to("cpu") is model and model.cpu() is model and model.to(torch.device("cpu")) is model
        assert same(model)


@pytest.mark.row("`.to`, `.cuda` to another device")
def test_moving(row, another, same):
    for model in (another(), another(**HOT)):
        for part in (model, model.model, torch.nn.ModuleList([model])):
            row.refuses(part.to, "meta")
        if torch.cuda.is_available():
            with pytest.raises(InputError, match="does not move"):
                model.cuda()
        assert same(model)


@pytest.mark.row("`.to(dtype)`, `.double()`")
def test_casting(row, another, demo_model):
    """As the plain model cast: the experts' kernels add float32 in another order than torch, and float16 rounds.

    The plain model has no float64: its rotary tables are float32's there too.
    """
    for dtype, near in ((torch.float32, 1e-4), (torch.float16, 0.05)):
        ours, theirs = another().to(dtype), AutoModelForCausalLM.from_pretrained(demo_model).to(dtype)
        with torch.inference_mode():
            want = theirs(ids(24)).logits
            assert (ours(ids(24)).logits - want).abs().max() < near
            assert (another().double()(ids(24)).logits - want).abs().max() < near
    hot = another(**HOT)
    row.refuses(hot.to, torch.float32)
    row.refuses(hot.double)
    assert hot.to(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("half", marks=pytest.mark.row("`.half()`")),
        pytest.param("float", marks=pytest.mark.row("`.float()`")),
        pytest.param("dequantize", marks=pytest.mark.row("`dequantize()`")),
    ],
)
def test_conversions(row, free, hot, call):
    for model in (free, hot):
        row.refuses(getattr(model, call))


@pytest.mark.row('`set_experts_implementation("eager")`')
def test_implementations(row, free, hot, same):
    for model in (free, hot, free.model):
        row.refuses(model.set_experts_implementation, "eager")
        row.refuses(model.set_experts_implementation, {"": "batched_mm"})
        model.set_experts_implementation(model.get_experts_implementation())
    assert same(free) and same(hot)


@pytest.mark.row("`resize_token_embeddings`")
def test_resizing(row, another, demo_model):
    ours, theirs = another(), AutoModelForCausalLM.from_pretrained(demo_model)
    for model in (ours, theirs):
        torch.manual_seed(0)
        model.resize_token_embeddings(4100)
    with torch.inference_mode():
        assert torch.equal(ours(ids(8)).logits[..., :4096], theirs(ids(8)).logits[..., :4096])
    hot = another(**HOT)
    row.refuses(hot.resize_token_embeddings, 4100)
    assert hot.resize_token_embeddings(4096).weight.shape[0] == 4096, "nothing to do"


@pytest.mark.row("`num_parameters`, `get_memory_footprint`")
def test_counts(row, free, hot, plain, another):
    for model in (free, hot, another(policy="static:w1")):
        assert model.num_parameters() == plain.num_parameters()
        assert model.model.num_parameters() == plain.model.num_parameters()
        assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
        assert model.num_parameters(only_trainable=True) == 0
        experts = sum(layer.resident_bytes for layer in model.moepack.layers)
        assert model.get_memory_footprint() >= model.moepack.fixed.dense + experts
    assert free.get_memory_footprint() == plain.get_memory_footprint()


@pytest.mark.row("`train()`, `eval()`, `tie_weights()`, `share_memory()`")
def test_harmless(row, another, same):
    for model in (another(), another(**HOT)):
        for call in (model.train, model.eval, model.tie_weights, model.share_memory):
            call()
            assert same(model)


def exit_code(work):
    """Of a forked child."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(torch.get_num_threads() > 1, reason="a forked child cannot use torch's threads of its parent")
@pytest.mark.row("a pass in a forked child")
def test_forks(row, free, hot, same):
    assert exit_code(lambda: 0 if same(free) else 1) == 0

    def refused():
        row.refuses(hot, ids(8))
        return 7

    assert exit_code(refused) == 7
    row.seen |= row.quoted  # by the child
    assert same(free) and same(hot)


class Prompts(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, n):
        return ids(8, n)[0]


@pytest.mark.row("`DataLoader` workers beside the model")
def test_workers(row, free, hot, plain):
    for batch in torch.utils.data.DataLoader(Prompts(), batch_size=2, num_workers=1):
        with torch.inference_mode():
            want = plain(batch).logits
            assert torch.equal(free(batch).logits, want) and torch.equal(hot(batch).logits, want)


@pytest.mark.row("`torch.export`")
def test_export(row, free, hot, same):
    for model in (free, hot):
        row.refuses(torch.export.export, model, (ids(8),), kwargs={"use_cache": False})
        assert same(model)


@pytest.mark.row("`torch.compile`, also with `fullgraph=True`")
def test_compile(row, another):
    """More of it is in tests/runtime/test_compile.py; torch's own backend would take a minute here."""
    torch._dynamo.reset()
    for options in ({}, HOT):
        model = another(dtype=torch.float32, **options)
        for whole in (False, True):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
            with torch.no_grad():
                got, want = (m(ids(8), use_cache=False).logits for m in (compiled, model))
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
    with torch.no_grad():
        row.refuses(compiled, ids(8))
    torch._dynamo.reset()
