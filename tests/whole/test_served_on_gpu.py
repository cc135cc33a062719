"""On a GPU a bundle gives what a CPU gives: logits of every version, and texts of every policy."""

import logging

import pytest
import torch
from live_models import least
from support import load_for_logits

import moepack
from moepack.generation import generate
from moepack.runtime.planning.options import LoadOptions
from moepack.server.batching.engine import Engine, StepInput

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]  # fmt: skip
NEAR = {"bfloat16": 0.03, "float16": 2e-3, "float32": 1e-5}  # of the logits' norm
LIVE = "hotness:hi=w4,lo=w2", "importance:hi=w4,lo=w2", "importance:hi=w4,lo=absent", "lru:hi=w4,lo=absent"
POLICIES = *LIVE, "paged", "uniform", "random", "prefill:hi=w4", "hotness:hi=w4,lo=stored"
POLICIES += "hotness:hi=w4,lo=w4@pinned", "hotness:hi=bf16,lo=w2@pinned", "paged:lo=pinned"


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("version", ["bf16", "w4", "w3", "w2", "w1"])
def test_logits_are_those_of_a_cpu(bundle, version, dtype):
    ids, found = torch.arange(5, 17)[None], []
    for device in ("cuda", "cpu"):
        model = moepack.load(bundle, policy=f"static:{version}", dtype=dtype, device=device)
        with torch.inference_mode():
            found.append(model(ids.to(device)).logits.double().cpu())
    assert (found[0] - found[1]).norm() <= NEAR[dtype] * found[1].norm()


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_write_in_small_budgets(bundle, policy):
    """All tokens, and no transition fails."""
    given = {"policy": policy, "device": "cuda", "kv_tokens": 64}
    model = load_for_logits(bundle, device_memory=round(1.3 * least(bundle, **given)), **given)
    out = model.generate(torch.arange(5, 17, device="cuda")[None], max_new_tokens=24, do_sample=False)
    assert out.shape == (1, 36) and model.moepack.counters().get("transition_failures", 0) == 0
    model.moepack.close()


def test_replayed_steps_write_the_text_of_a_cpu(bundle):
    texts = [
        generate(bundle, "The history of", LoadOptions(policy="static:w4", device=device), max_new_tokens=40)
        for device in ("cuda", "cpu")
    ]
    assert texts[0] == texts[1]


def test_the_servers_passes_are_those_of_a_cpu(bundle, caplog):
    """Five sequences of lengths up to 90, which come and go; on the GPU their passes become graphs."""
    caplog.set_level(logging.INFO, "moepack.runtime")
    found = []
    for device in ("cuda", "cpu"):
        model = moepack.load(bundle, policy="static:w4", dtype="float32", device=device)
        engine, outs = Engine(model, 128), []
        slots = [engine.add(8) for _ in range(5)]
        for n, slot in enumerate(slots):
            engine.run([StepInput(slot, range(5 + n, 7 + 9 * n))])
        for step in range(60):
            some = slots[step // 20 :]
            out = engine.run([StepInput(slot, [5 + (7 * step + n) % 200]) for n, slot in enumerate(some)])
            outs += [x.double().cpu() for x in out if x is not None]
        found.append(torch.cat(outs))
    assert (found[0] - found[1]).norm() <= NEAR["float32"] * found[1].norm()
    assert sum("is now a CUDA graph" in r.getMessage() for r in caplog.records) == 3
