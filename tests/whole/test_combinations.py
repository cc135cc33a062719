"""Options that work alone work together: tied or not, dense versions, policies, budgets, by every way to a model.

The model has 60,000 weights and a tokenizer of one token a character. Values are compared in float32 with plain
transformers on the bundle's own dequantised weights.
"""

import functools

import numpy as np
import pytest
import tiny_models
import torch
from live_models import least
from served import complete
from support import build_from, for_logits, load_for_logits

import moepack
from moepack.calibrate.text.windows import document_windows
from moepack.families.arguments import with_cache
from moepack.families.tokenizer import load_tokenizer
from moepack.generation import generate
from moepack.pack.errors import InputError
from moepack.reports.evaluate import evaluate
from moepack.reports.plan import plan
from moepack.runtime.experts import backends
from moepack.runtime.kv.growing import layer_bits, new_cache
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.registry import ENTRIES

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

RECIPE = """
versions: [bf16, w4, w2]
dense: [w8, w4]
quantize: {method: rtn, group_size: 32, loss_tokens: 32}
calibration: {samples: 4, length: 32, batch_size: 4}
allocation: {average_bits: 14}
"""
SIZE = {"vocab_size": 256, "num_experts": 4, "moe_intermediate_size": 16, "eos_token_id": None}
AMPLE = 3_000_000  # bytes: enough for every expert at bf16
# Every policy as it is, and where its values then depend on the requests, with options by which they do not.
BUDGETED = [*(e.name for e in ENTRIES if e.needs_budget), "importance:hi=bf16,lo=w4,r=1", "hotness:lo=w4@pinned"]
DENSE = (None, "w8", "w4")
SHAPES = ((True, None), (False, "w8"), (True, "w4"), (False, "w4"))  # tied to the embeddings or not, dense version
CASES = [(p, budget, *s) for p in ("static", "static:allocation") for budget in (None, "least") for s in SHAPES]
CASES += [(policy, AMPLE, *shape) for policy in BUDGETED for shape in SHAPES[:2]]
KV = ("8", "16", "k8v4") if backends.library() else ("16",)  # in turns
CASES = [(*case, KV[i % len(KV)]) for i, case in enumerate(CASES)]
# Sums of at most 96 products in float32, added up in another order by kernels and by torch: sqrt(96) roundings of 2^-24
# each, in 8 products one after another.
CLOSE = 2.0**-18
PROMPT, NEW, LENGTH, SAMPLES = "The town", 8, 16, 4
WORK = {"kv_tokens": 128, "prefill_tokens": LENGTH, "all_logits": False}  # one for all: measuring one takes a second


def save_tokenizer(path):
    """A tokenizer of one token a byte; its text has one character and a space a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny(text, tmp_path_factory):
    """The bundle of a model whose output projection is tied to its embeddings, or is not."""
    folder = tmp_path_factory.mktemp("combined")
    tokenizer = save_tokenizer(folder / "tokenizer")

    @functools.cache
    def make(tied):
        source, path = folder / f"checkpoint-{tied}", folder / f"bundle-{tied}"
        tiny_models.save_tiny("qwen3_moe", source, tokenizer, tie_word_embeddings=tied, **SIZE)
        build_from(RECIPE, source, path, [text])
        return path

    return make


@functools.cache
def reference(bundle, dense, versions):
    """Plain transformers in float32, its weights those of these versions dequantised."""
    from transformers import AutoModelForCausalLM

    opened, source = moepack.open(bundle), bundle.with_name(bundle.name.replace("bundle", "checkpoint"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        for described in opened.manifest.dense if dense else ():
            weight = opened.dense_matrix(dense, described.module).torch()["weight"]
            model.get_submodule(described.module).weight.copy_(weight)
        for layer, row in zip(opened.layers, versions, strict=True):
            experts = model.get_submodule(layer.module)
            for i, version in enumerate(row):
                made = opened.expert(version, layer.index, i).torch()
                experts.gate_up_proj[i], experts.down_proj[i] = made["gate_up"], made["down"]
    return model


@pytest.mark.parametrize("policy, budget, tied, dense, kv", CASES)
def test_every_way_gives_the_same(tiny, tied, dense, policy, budget, kv, evaluation):
    bundle, tokenizer = tiny(tied), load_tokenizer(tiny(tied))
    asked = {"policy": policy, "dense": dense, "kv": kv}
    if budget is not None:
        if budget == "least":
            budget = least(bundle, dtype=torch.float32, **asked, **WORK)
        asked["device_memory"] = budget
        planned = plan(bundle, for_logits(**asked, **WORK))  # in the checkpoint's BF16
        with load_for_logits(bundle, **asked, **WORK).moepack as serving:
            assert planned.feasible and planned.fixed == serving.fixed
            if serving.manager is None:
                assert planned.used_bytes == serving.resident_bytes()
            assert planned.used_bytes <= budget and serving.resident_bytes_peak <= budget

    model = load_for_logits(bundle, dtype=torch.float32, **asked, **WORK)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with model.moepack as serving, torch.inference_mode():
        versions, live, logits = serving.versions, serving.manager is not None, model(ids, logits_to_keep=1).logits
        assert torch.isfinite(logits).all() and (budget is None or serving.resident_bytes_peak <= budget)
    files = [str(evaluation)]
    options = LoadOptions(dtype="float32", batch=1, **asked, **WORK)
    scored = evaluate(bundle, files, options, length=LENGTH, samples=SAMPLES)
    told = generate(bundle, PROMPT, options, max_new_tokens=NEW)
    served = complete(bundle, LoadOptions(dtype="float32", kv_tokens=128, **asked), PROMPT, NEW, step_tokens=LENGTH)
    assert budget is None or scored.resident_bytes_peak <= budget
    assert scored.tokens == SAMPLES * (LENGTH - 1) and len(told.split()) == len(served.split()) == NEW
    if policy == "importance":
        return  # versions follow the requests
    if live:
        versions = (("bf16",) * 4,) * 2  # `lru` and `paged` bring it when an expert is needed
    plain = reference(bundle, dense, versions)

    def cache():
        return with_cache(plain, new_cache(plain, layer_bits(plain, kv)))

    more = 1 if kv == "16" else 1 << 10  # where rounding makes a code the next one
    with torch.inference_mode():
        wanted = plain(ids, logits_to_keep=1, **cache()).logits
        assert (logits - wanted).abs().max() <= more * CLOSE * wanted.abs().max()
        greedy = plain.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **cache())
        windows, _ = document_windows(files[0], tokenizer, LENGTH, SAMPLES)
        found = plain(windows, **cache()).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(found.transpose(1, 2), windows[:, 1:])
    assert told.split() == served.split() == tokenizer.decode(greedy[0, ids.shape[1] :]).split()
    assert scored.perplexity == pytest.approx(float(np.exp(losses)), rel=more * 1e-5)  # logits within CLOSE of some 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", ["static", "paged"])
@pytest.mark.parametrize("dense", [None, "w4"])
def test_every_dtype_is_served_and_paged(tiny, dense, policy, dtype):
    """Ids are fixed: their routers choose by more than a rounding."""
    bundle, ids = tiny(False), torch.arange(1, 13)[None]
    wanted = reference(bundle, dense, (("bf16",) * 4,) * 2)
    asked = {} if policy == "static" else {"device_memory": AMPLE}
    model = load_for_logits(bundle, policy=policy, dense=dense, dtype=dtype, **asked, **WORK)
    with model.moepack, torch.inference_mode():
        logits, exact = model(ids, logits_to_keep=1).logits, wanted(ids, logits_to_keep=1).logits
        answer = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert logits.dtype == dtype and answer.shape == (1, ids.shape[1] + NEW)
    # Some 20 roundings of activations and logits one after another, each of eps / 2 of the greatest, at random signs.
    close = max(CLOSE, 20**0.5 * 2 * torch.finfo(dtype).eps / 2)
    assert (logits.float() - exact).abs().max() <= close * exact.abs().max()


def test_a_divergence_is_of_the_versions_not_of_the_budget(tiny, evaluation):
    bundle, files = tiny(False), [str(evaluation)]
    windows, _ = document_windows(files[0], load_tokenizer(bundle), LENGTH, SAMPLES)
    with torch.inference_mode():
        exact, *others = (
            reference(bundle, dense, (("bf16",) * 4,) * 2)(windows).logits[:, :-1].log_softmax(-1) for dense in DENSE
        )
    wanted = [float((exact.exp() * (exact - other)).sum(-1).mean()) for other in (exact, *others)]
    assert wanted[0] < wanted[1] < wanted[2]
    for dense, kl in zip(DENSE, wanted, strict=True):
        for budget in (None, AMPLE):
            options = LoadOptions(dtype="float32", batch=1, policy="static", dense=dense, device_memory=budget, **WORK)
            found = evaluate(bundle, files, options, LENGTH, SAMPLES, kl=True)
            # Logarithms of probabilities of some 2^-8, summed in float32: 2^-21 each.
            assert found.kl == pytest.approx(kl, abs=1e-6) and (dense is not None or found.top1_agreement == 1)


def test_a_packed_head_counts_its_parameters_and_keeps_its_size(tiny):
    exact, packed = (moepack.load(tiny(False), dense=dense) for dense in ("bf16", "w4"))
    plain = reference(tiny(False), None, (("bf16",) * 4,) * 2)
    assert exact.num_parameters() == packed.num_parameters() == plain.num_parameters()
    exact.resize_token_embeddings(300)
    assert exact(torch.arange(9)[None]).logits.shape[-1] == 300
    with pytest.raises(InputError, match="lm_head is packed at w4"):
        packed.resize_token_embeddings(300)
