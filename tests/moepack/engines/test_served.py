"""A bundle behind an engine's own model code, without any engine: transformers' plain model stands in for it."""

import gc
import importlib
import re
import threading
import time
import tomllib
from types import MethodType

import pytest
import torch
from live_models import FAST, ROOM
from safetensors import safe_open
from support import PATIENCE, ROOT, at_once, build_from, damage, flip, ids, load_for_logits, python
from transformers import AutoConfig, AutoModelForCausalLM

import moepack
from benchmarks.common import least_budget
from moepack.engines.served import ServedBundle, options_in, run_layer
from moepack.pack.errors import BundleError, InputError
from moepack.runtime.planning.exceeded import TooSmallError

CPU = torch.device("cpu")
# A package that has each module and name that the plug-in imports of vLLM; HOOKS are of its quantisation configs.
STAND_IN = """
import sys
from types import ModuleType

def part(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return type(name, (), {})

for name in (
    "", ".config", ".forward_context", ".model_executor", ".model_executor.layers", ".model_executor.layers.fused_moe",
    ".model_executor.layers.fused_moe.fused_moe_method_base", ".model_executor.layers.linear",
    ".model_executor.layers.quantization", ".model_executor.layers.quantization.base_config",
    ".model_executor.models", ".model_executor.models.utils",
):
    made = sys.modules["vllm" + name] = ModuleType("vllm" + name)
    made.__path__, made.__getattr__ = [], part
sys.modules["vllm.model_executor.layers.quantization.base_config"].QuantizationConfig = type("Q", (), HOOKS)
sys.modules["vllm.model_executor.layers.quantization"].register_quantization_config = lambda name: print
"""
WITH_DENSE = """
versions: [bf16, w4]
dense: [w8]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""


@pytest.fixture(scope="module")
def with_dense(short_model, text, made_once):
    """A bundle whose dense matrices have versions, and so are in no file beside config.json."""
    return made_once("engine-dense", lambda path: build_from(WITH_DENSE, short_model, path, [text]))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("POLICY", "DENSE", "DEVICE_MEMORY", "MEMORY", "CHECKED"):
        monkeypatch.delenv(f"MOEPACK_{name}", raising=False)


def in_budget(bundle, policy=FAST, room=ROOM):
    """A bundle served in the least budget and so much room."""
    enough = least_budget(lambda budget: ServedBundle(bundle, {"policy": policy, "device_memory": budget}))
    return ServedBundle(bundle, {"policy": policy, "device_memory": enough + room})


def plain_of(path, tensors):
    """Transformers' own model of a bundle's config, with these tensors and no experts."""
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in missing} <= {"experts", "lm_head"}
    return model


def stand_in(served, traffic=lambda: True):
    """That model, whose experts are a bundle's: what an engine does. `traffic` says whether a pass counts."""
    model = plain_of(served.bundle.path, dict(served.tensors()))
    for at, layer in enumerate(served.layers):
        ours = served.module(at, CPU, torch.bfloat16)

        def forward(self, x, index, weights, ours=ours):
            return run_layer(ours, x, index, weights, traffic())

        module = model.get_submodule(layer.module)
        module.forward = MethodType(forward, module)
    return model


@pytest.mark.parametrize("policy", ["static:w4", None])
def test_logits_are_those_of_the_policy(bundle, monkeypatch, policy):
    """To the bit, where dense matrices are multiplied by the same code; the policy comes from the environment."""
    monkeypatch.setenv("MOEPACK_DENSE_KERNELS", "off")
    if policy is not None:
        monkeypatch.setenv("MOEPACK_POLICY", policy)
    tokens = ids()
    with torch.no_grad():
        wanted = moepack.load(bundle, policy=policy)(tokens).logits
        served = ServedBundle(bundle, {})
        assert torch.equal(stand_in(served)(tokens).logits, wanted)
    name = (policy or "static:bf16").removeprefix("static:")
    assert {v for row in served.table for v in row} == {name}
    sizes = [served.bundle.manifest.version(name).resident_size(x.matrices) * x.experts for x in served.layers]
    assert sum(module._moepack.resident_bytes for module in served._modules) == sum(sizes)


def test_dense_matrices_with_versions_are_among_the_tensors(with_dense, short_model):
    """Those of the checkpoint to the bit, in the order of names; with `dense` the values of that version."""
    with safe_open(short_model / "model.safetensors", "pt") as file:
        wanted = {name: file.get_tensor(name) for name in file.keys() if ".experts." not in name}  # noqa: SIM118
    served = ServedBundle(with_dense, {})
    found = dict(served.tensors())
    assert list(found) == sorted(wanted) and served.bundle.manifest.dense
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    coarse = dict(ServedBundle(with_dense, {"dense": "w8"}).tensors())
    versions = [f"{d.module}.weight" for d in served.bundle.manifest.dense]
    assert {name for name in wanted if not torch.equal(coarse[name].float(), wanted[name].float())} == set(versions)
    for name in versions:
        values = served.bundle.dense_matrix("w8", name.removesuffix(".weight")).torch()["weight"]
        assert torch.equal(coarse[name], values)


def test_a_loader_that_does_not_fit_is_found(bundle):
    """With one of its own way an engine would run with dense matrices of no values; on a GPU versions cannot change."""
    served = in_budget(bundle)
    iterator = served.tensors()
    next(iterator)
    with pytest.raises(InputError, match="not read through its bundle"):
        served.module(0, CPU, torch.bfloat16)
    list(iterator)
    with pytest.raises(InputError, match=r"policy hotness.* is served on a CPU here, not on cuda"):
        served.module(0, torch.device("cuda"), torch.bfloat16)


def test_damage_is_found_and_what_is_not_here(damaged):
    damage(damaged, "w4", 0, [15])
    served = ServedBundle(damaged, {"policy": "static:w4"})
    list(served.tensors())
    with pytest.raises(BundleError, match="digest"):
        served.module(0, CPU, torch.bfloat16)
    flip(damaged / "model.safetensors", -1)
    with pytest.raises(BundleError, match="digest"):
        list(ServedBundle(damaged, {}).tensors())
    with pytest.raises(InputError, match="moepack pull someone/model"):
        ServedBundle("someone/model", {})


WAITS = "which moepack serve alone does"


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        ({"memory": "1GB"}, {}, "has memory: a bundle takes policy, dense, device_memory there"),
        ({"policy": 3}, {}, "policy is a text, not 3"),
        ({}, {"POLICY": "hotness"}, "policy hotness needs a budget for experts: give device_memory"),
        ({"policy": "static:w7"}, {"POLICY": "static:w4"}, "w7"),  # the option overrides
        ({}, {"MEMORY": "1GB"}, "process's memory is not limited here"),
        ({}, {"DEVICE_MEMORY": "1 apple"}, "MOEPACK_DEVICE_MEMORY: size '1 apple'"),
        # Policies for which passes wait, or that keep experts in host memory
        ({"policy": "lru:hi=bf16,lo=w2"}, {"DEVICE_MEMORY": "1GB"}, WAITS),
        ({"policy": "paged"}, {"DEVICE_MEMORY": "1GB"}, WAITS),
        ({"policy": "prefill"}, {"DEVICE_MEMORY": "1GB"}, WAITS),
        ({"policy": "importance"}, {"DEVICE_MEMORY": "1GB"}, WAITS),
        ({"policy": "hotness:lo=stored,hi=bf16"}, {"DEVICE_MEMORY": "1GB"}, WAITS),
    ],
)
def test_what_is_not_served_is_refused(bundle, monkeypatch, given, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(f"MOEPACK_{name}", value)
    with pytest.raises(InputError, match=words):
        ServedBundle(bundle, options_in({"quant_method": "moepack", **given}))


@pytest.mark.parametrize("policy", ["hotness", "uniform", "static:w4"])
def test_too_small_a_budget_is_refused_with_the_least(bundle, policy):
    """The bytes of experts at the smallest version, or at the one that the policy names."""

    def serve(budget):
        return ServedBundle(bundle, {"policy": policy, "device_memory": budget})

    enough, version = least_budget(serve), "w4" if policy == "static:w4" else "w1"
    sizes = [
        serve(enough).bundle.manifest.version(version).resident_size(x.matrices) * x.experts
        for x in serve(enough).layers
    ]
    assert enough == sum(sizes)
    with pytest.raises(TooSmallError, match=f"{enough} bytes.* this budget is for experts alone"):
        serve(enough - 1)


def test_a_budget_alone_means_hotness(bundle, monkeypatch):
    monkeypatch.setenv("MOEPACK_DEVICE_MEMORY", "1.5MB")
    served = ServedBundle(bundle, {})
    assert served.policy == "hotness" and served.plan is not None and served.plan.budget == 1_500_000
    assert served.plan.fixed == served.plan.staging, "the engine owns what is beside experts"
    absent = ServedBundle(bundle, {"policy": "hotness:lo=absent"}).plan
    assert absent is not None and str(absent.ladder[-1]) == "absent", "for which no pass waits either"


def test_logits_are_those_of_hotness_with_the_same_map(bundle, monkeypatch):
    """To the bit, as long as nothing moves. The budgets differ by what moepack's own counts beside experts."""
    monkeypatch.setenv("MOEPACK_DENSE_KERNELS", "off")
    policy = "hotness:interval=1e9"
    served = in_budget(bundle, policy)
    beside = least_budget(lambda budget: load_for_logits(bundle, policy=policy, device_memory=budget))
    beside -= least_budget(lambda budget: ServedBundle(bundle, {"policy": policy, "device_memory": budget}))
    wanted = load_for_logits(bundle, policy=policy, device_memory=served.plan.budget + beside)
    with torch.no_grad():  # a cache would take room from the experts of `wanted`
        assert torch.equal(stand_in(served)(ids()).logits, wanted(ids(), use_cache=False).logits)
    assert served.serving is not None and served.serving.versions == wanted.moepack.versions
    assert len({v for row in served.serving.versions for v in row}) > 1
    for serving in (served.serving, wanted.moepack):
        serving.close()


def test_versions_change_while_threads_run_passes(bundle):
    """Each pass is one step, in the budget, and every step ends; trial passes are no traffic."""
    counts = [False]
    served = in_budget(bundle)
    model = stand_in(served, lambda: counts[0])
    serving = served.serving
    steps, before = serving.manager.residency.steps, serving.versions
    with torch.inference_mode():
        model(ids(64))
        time.sleep(0.2)
        assert serving.counters()["promotions"] == 0 and serving.versions == before, "a trial pass moves nothing"
        counts[0], begun = True, steps.begun
        model(ids(64))
    assert steps.begun == begun + 1 and not steps.open

    def work(seed):
        with torch.inference_mode():
            until = time.monotonic() + PATIENCE
            while serving.counters()["promotions"] < 10 and time.monotonic() < until:
                model(ids(64, seed))

    at_once(work, 3)
    counters = serving.counters()
    assert counters["promotions"] >= 10 and counters["transition_failures"] == counters["forward_waits"] == 0
    assert serving.resident_bytes_peak <= serving.budget_bytes == served.plan.budget
    assert not steps.open and serving.health()["ok"]
    serving.close()
    assert serving.health()["worker"] == "stopped"


def test_a_pass_that_raises_keeps_no_step(bundle):
    """In a layer it ends at once; between layers with the thread's next pass, or with the thread."""
    served = in_budget(bundle)
    model = stand_in(served)
    steps = served.serving.manager.residency.steps
    x, index, gates = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    with torch.inference_mode():
        run_layer(served._modules[0], x, index, gates)
        assert len(steps.open) == 1
        model(ids())
        assert not steps.open
        with pytest.raises((RuntimeError, ValueError)):
            run_layer(served._modules[0], x[:, :7], index, gates)
        assert not steps.open
        thread = threading.Thread(target=run_layer, args=(served._modules[0], x, index, gates))
        thread.start()
        thread.join()
        assert not steps.open


def test_a_bundle_that_is_let_go_stops_its_thread(bundle):
    served = in_budget(bundle)
    list(served.tensors())
    served.module(0, CPU, torch.bfloat16)
    worker = served.serving.manager.worker
    del served
    gc.collect()
    worker.join()
    assert worker.health()["worker"] == "stopped"


def test_the_entry_point_names_a_function_and_imports_no_engine():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, function = points["vllm.general_plugins"]["moepack"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("sys.modules['vllm'] = None", "cannot serve bundles .*vllm.* install vLLM 0.32, or serve"),
        (f"HOOKS = {{}}{STAND_IN}", "cannot serve bundles .*no get_checkpoint_weight_mapper.* install vLLM"),
        (f"HOOKS = {{'get_checkpoint_weight_mapper': None}}{STAND_IN}", "<class '.*BundleConfig'>"),
    ],
)
def test_an_engine_of_other_parts_is_told_so_in_one_line(engine, words):
    """And goes on: vLLM calls plug-ins for every model that it serves, and catches no error of theirs."""
    start = "import sys, moepack.engines.served\nfrom moepack.engines.vllm import register\nsys.stderr = sys.stdout"
    said = python("-c", f"{start}\nassert 'vllm' not in sys.modules\n{engine}\nregister()\nregister()")
    assert re.fullmatch(f"(.*{words}.*\n){{2}}", said), said
