"""`moepack plan`: what it foretells is what loading then does, to the byte."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
from support import cli, for_logits, load_for_logits, ok

import moepack
from moepack.generation import NEW_TOKENS, PROMPT, generate
from moepack.reports.fitting import Described
from moepack.reports.plan import plan, rows
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.fixed import rounding
from moepack.runtime.planning.options import LoadOptions

ROOM = 2_000_000  # beside the least that would do: some experts high, or all at a middling version
PLENTY = 40_000_000
QUIET = "hotness:hi=bf16,lo=w2,interval=1e9"
POLICIES = ("static:allocation", "uniform", QUIET, "lru")


def command(*arguments):
    return dict(json.loads(cli("plan", *arguments, "--json")[1]))


def enough(bundle, room, **options):
    """`room` bytes beside the least that would do, whatever forward passes take on this machine."""
    return plan(bundle, for_logits(device_memory=1000, **options)).least_bytes + room


@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_is_what_loading_does(bundle, policy):
    work = {"policy": policy, "kv_tokens": 300, "batch": 2}
    least = enough(bundle, 0, **work)
    assert plan(bundle, for_logits(device_memory=least, **work)).feasible
    assert not plan(bundle, for_logits(device_memory=least - 1, **work)).feasible
    with pytest.raises(moepack.BudgetExceeded):
        load_for_logits(bundle, device_memory=least - 1, **work)
    budget = least + ROOM
    planned = plan(bundle, for_logits(device_memory=budget, **work))
    model = load_for_logits(bundle, device_memory=budget, **work)
    serving = model.moepack
    assert planned.feasible and planned.fixed == serving.fixed and planned.fixed_bytes == serving.fixed.total
    assert [x.versions for x in planned.per_layer] == [
        {n: row.count(n) for n in x.versions} for x, row in zip(planned.per_layer, serving.versions, strict=True)
    ]
    if serving.manager is None:
        assert planned.used_bytes == serving.resident_bytes()
    else:
        assert planned.used_bytes <= budget
    reserve = serving.caches._reserve
    assert planned.kv_tokens_most == (300 * 2 * 1024 + reserve.most) // 2048
    assert all(x.hi + x.lo == 16 for x in planned.per_layer)
    serving.close()


def test_the_longest_cache_is_no_longer_than_the_models_context(bundle):
    planned = plan(bundle, for_logits(device_memory=PLENTY, policy="static:w4", kv_tokens=100))
    assert planned.context == 2048 < planned.kv_tokens_most
    most = planned.kv_tokens_most
    for context, said in ((2048, "2,048 tokens, the model's longest"), (most + 1, f"{most:,} tokens of 1,024 bytes")):
        assert dict(rows(replace(planned, context=context)))["longest KV cache"].startswith(said)


def test_expected_loss_is_that_of_the_tables(bundle):
    tables = moepack.open(bundle).calibration()
    column = {v: i for i, v in enumerate(tables.versions)}
    tokens = np.stack([layer.tokens for layer in tables.layers]).astype(float)
    relative = np.stack([layer.relative for layer in tables.layers]).astype(float)
    budget = enough(bundle, 1_500_000, policy=QUIET)
    planned = plan(bundle, for_logits(device_memory=budget, policy=QUIET))
    assert 0 < planned.per_layer[0].hi < 16
    model = load_for_logits(bundle, policy=QUIET, device_memory=budget)
    lost = 0.0
    for row, t, r in zip(model.moepack.versions, tokens, relative, strict=True):
        lost += float((t * r[np.arange(16), [column[name] for name in row]]).sum())
    model.moepack.close()
    assert planned.expected_relative_loss == pytest.approx(lost / tokens.sum(), rel=1e-6)
    assert plan(bundle, for_logits(device_memory=PLENTY, policy=QUIET)).expected_relative_loss == 0


def test_speed_begins_with_bytes_over_bandwidth(bundle):
    planned = plan(bundle, for_logits(device_memory=PLENTY, policy="static:w4", kv_tokens=100))
    opened = moepack.open(bundle)
    model = moepack.load(bundle, policy="static:w4")
    dense = model.moepack.fixed.dense
    if not model.config.tie_word_embeddings:
        dense -= model.get_input_embeddings().weight.nbytes
    extent = opened.layer_file("w4", 0).extent_size(0)
    assert planned.bytes_per_token == dense + 4 * 2 * extent + 100 * planned.kv_bytes_per_token
    assert planned.bandwidth is not None and planned.bandwidth > 1e8
    took = planned.seconds_per_token
    assert took is not None and took.memory == pytest.approx(planned.bytes_per_token / planned.bandwidth)
    assert planned.expected_tokens_per_second == pytest.approx(1 / (took.memory + took.processor))
    assert planned.kv_bytes_per_token == 1024 and planned.host_bytes == opened.version_bytes("w4")


def test_the_command_plans_for_generate(bundle):
    """With a prompt and new tokens at their most by default, as moepack.load; by the same options to the byte."""
    facts = command(bundle, "--device-memory", "1000")
    assert facts["feasible"] is False and facts["expected_relative_loss"] is None
    assert facts["kv_tokens"] == PROMPT + NEW_TOKENS and facts["prefill_tokens"] == PROMPT
    prompt = "The history of the world. " * 150  # more than goes in at once
    options = LoadOptions(device_memory=1000, kv_tokens=PROMPT + NEW_TOKENS)
    with pytest.raises(TooSmallError) as short:
        generate(bundle, prompt, options, max_new_tokens=2)
    assert short.value.least == facts["least_bytes"]
    assert generate(bundle, "The history", LoadOptions(device_memory=facts["least_bytes"]), max_new_tokens=2)
    work = ("--kv-tokens", "9", "--prefill-tokens", "32", "--batch", "2", "--all-logits")
    facts = command(bundle, "--device-memory", "1000", *work)
    text = ("-d", "examples/text/evaluation.jsonl", "--length", "32")
    for call, words in (("plan", ()), ("generate", ("-p", "The")), ("eval", text)):
        said = f"the least that would do is {facts['least_bytes']} bytes"
        code, _, err = cli(call, bundle, *words, "--device-memory", "1000", *work)
        assert code == 2 and said in err, err  # after a bar of progress


def test_the_command(bundle):
    facts = command(bundle, "--device-memory", PLENTY, "--kv-tokens", "300", "--batch", "2")
    keys = {"budget_bytes", "fixed_bytes", "expected_relative_loss"}
    assert keys <= set(facts) and facts["feasible"] is True and facts["fixed"]["kv"] == 600 * 1024
    assert set(facts["per_layer"][0]) >= {"hi", "lo", "version_hi", "version_lo"} and len(facts["per_layer"]) == 4
    for option, words in (
        (("--batch", "2"), "2 sequences of 576 cached tokens, passes of 512 tokens and the last token's logits"),
        (("--all-logits",), "1 sequence of 576 cached tokens, passes of 512 tokens and all logits"),
    ):
        text = " ".join(ok(cli("plan", bundle, "--device-memory", "40MB", *option)).split())
        assert words in text and "least that would do" in text and "tokens/s" in text
        assert re.search(r"used [\d.]+ MB of 40\.00 MB least", text), text


def test_a_plan_says_where_not_memory_ends_it(bundle):
    """All experts are at the best version that is served, though a better one is there and would fit."""
    for policy, words in (
        ("hotness:lo=stored", "hotness:lo=stored serves nothing above w4, and "),
        ("lru:hi=w2", "MB stay free: hi=w3 lets it"),
    ):
        planned = plan(bundle, for_logits(device_memory=PLENTY, policy=policy))
        assert planned.capped is not None and words in planned.capped
        assert dict(rows(planned))["not bound by memory"] == planned.capped
    read = planned.bytes_per_token or 0
    bounded = plan(bundle, for_logits(device_memory=PLENTY, max_tpot=int(1.01 * read)))
    assert bounded.capped is not None and bounded.capped.startswith("the bound on a token serves nothing above w")
    for policy, room in (("hotness", PLENTY), ("hotness", 0), ("static:w4", PLENTY)):
        assert plan(bundle, for_logits(device_memory=enough(bundle, room, policy=policy), policy=policy)).capped is None


def test_a_gpu_need_not_be_here(bundle):
    planned = plan(bundle, for_logits(device_memory=PLENTY, device="cuda:0"))
    assert planned.feasible and planned.estimated and planned.fixed.activations > 0
    static, live = (
        plan(bundle, for_logits(device_memory=PLENTY, device="cuda:0", policy=p)) for p in ("static:w2", QUIET)
    )
    assert live.fixed.dense - static.fixed.dense == rounding(1, True) - rounding(1, False) == 20 << 20


ODD = {"hidden_size": 96, "intermediate_size": 104}  # of which matrices fill no whole pages
HEADS = {"kv_lora_rank": 64, "qk_nope_head_dim": 24, "v_head_dim": 24}  # of which no packed head is whole blocks


@pytest.mark.parametrize(
    ("family", "sizes", "dense"),
    [
        ("gpt_oss", ODD, ()),
        ("qwen3_moe", ODD | {"tie_word_embeddings": True}, ("bf16", "w8")),
        ("deepseek_v3", ODD | HEADS, ("bf16", "w8")),  # which keeps its router's correction in float32
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loading_takes_the_least_of_a_plan(family, sizes, dense, tmp_path, demo_model, text):
    """And not a byte less, however dense matrices are served."""
    recipe = "versions: [bf16, w2]\nquantize: {method: rtn, loss_tokens: 64}\ncalibration: {samples: 2, length: 64}\n"
    recipe += f"dense: [{', '.join(dense)}]\n" if dense else ""
    bundle = tiny_models.build_tiny(family, tmp_path, recipe, demo_model, text, **sizes)
    for version in dense or (None,):
        work = {"policy": "static:w2", "kv_tokens": 577, "dense": version}
        least = enough(bundle, 0, **work)
        planned = plan(bundle, for_logits(device_memory=least, **work))
        model = load_for_logits(bundle, device_memory=least, **work)
        assert planned.fixed == model.moepack.fixed
        assert planned.used_bytes == model.moepack.resident_bytes() == least
        model.moepack.close()
        with pytest.raises(TooSmallError, match=f" {least} bytes"):
            load_for_logits(bundle, device_memory=least - 1, **work)
    opened = moepack.open(bundle)
    on_hub = Described(bundle, opened.manifest, opened.versions, opened.dense_versions)
    (bundle / "model.safetensors").unlink()
    assert plan(on_hub, for_logits(device_memory=least, **work)).least_bytes == least
