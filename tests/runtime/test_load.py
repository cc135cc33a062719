"""Serving: static policies, the forward against transformers' own, the plug-in."""

import inspect
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch
from live_models import plain_twin
from support import PATIENCE, flip, load_for_logits
from support import ids as token_ids
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM
from transformers.quantizers.base import HfQuantizer

import moepack
from moepack.pack.errors import BundleError, InputError, naming_flags
from moepack.pack.reader import open_bundle
from moepack.runtime.load_turns import LoadTurns
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.plugin import MoepackQuantizer
from moepack.runtime.policies.maps import static_map
from moepack.runtime.policies.registry import parse_policy


def test_mixed_versions_in_one_layer(bundle, demo_model, tmp_path):
    """Every expert runs in its own version: the output is that of a plain model with those weights."""
    names = ["bf16", "w4", "w3", "w2", "w1"]
    table = [[names[(e + k) % 5] for e in range(16)] for k in range(4)]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"versions": table}))
    ours = moepack.load(bundle, dtype=torch.float32, policy=f"static:{path}")
    assert [list(row) for row in ours.moepack.versions] == table
    plain = plain_twin(ours, demo_model)
    ids = token_ids(50, 0, 2)
    with torch.inference_mode():
        want, got = plain(ids).logits, ours(ids).logits
    assert float((want - got).norm() / want.norm()) < 1e-5


def test_sentinel_indices_add_nothing(bundle):
    """Expert parallelism marks another rank's experts by an index past the last: no row of theirs is computed."""
    model = moepack.load(bundle, dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 1], [2, 16], [16, 16], [3, 0], [16, 5], [1, 2]])
    gates = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out = experts(x, index, gates)
        alone = experts(x, index.clamp(max=15), gates.masked_fill(index == 16, 0.0))
    assert torch.allclose(out, alone, atol=1e-6) and not out[2].any()


def test_resident_bytes_are_counted(bundle):
    model = moepack.load(bundle, policy="static:w2")
    opened = open_bundle(bundle)
    dense = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    extents = sum(opened.layer_file("w2", p).extent_size(e) for p in range(4) for e in range(16))
    assert model.moepack.resident_bytes() == dense + extents
    assert not [n for n, _ in model.named_parameters() if "experts" in n], "no expert weight but the policy's"


# --- policies


def test_static_maps(bundle, tmp_path):
    opened = open_bundle(bundle)
    assert static_map(opened, "") == (("bf16",) * 16,) * 4
    assert static_map(opened, "w1") == (("w1",) * 16,) * 4
    allocation = static_map(opened, "allocation")
    assert {v for row in allocation for v in row} <= {"bf16", "w4", "w3", "w2", "w1"}
    bits = {v.name: opened.bits_per_weight(v.name) for v in opened.versions}
    assert sum(bits[v] for row in allocation for v in row) / 64 <= 3.0
    for text, word in (
        ("[]", "is not"),
        ('{"versions": [["w4"]]}', "has 1 layers, the bundle 4"),
        (json.dumps({"versions": [["w4"] * 16] * 3 + [["w4"] * 15]}), "layer 3 has 16 experts, the map 15"),
        (json.dumps({"versions": [["w4"] * 15 + ["w9"]] * 4}), "no version 'w9'"),
    ):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(InputError, match=word):
            static_map(opened, str(tmp_path / "map.json"))
    for argument, word in (("w7", "no version 'w7'"), (str(tmp_path / "absent.json"), "cannot be read")):
        with pytest.raises(InputError, match=word):
            static_map(opened, argument)
    assert str(parse_policy("static:w4")) == "static:w4" and str(parse_policy(None)) == "static"
    with pytest.raises(InputError, match="unknown"):
        parse_policy("magic")


def test_the_best_version_that_is_here_is_the_default(damaged):
    import shutil

    shutil.rmtree(damaged / "experts" / "bf16")
    assert moepack.load(damaged).moepack.versions == (("w4",) * 16,) * 4


# --- damage


def test_damaged_dense_tensors_are_never_served(damaged):
    flip(damaged / "model.safetensors", -1)
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        moepack.load(damaged)


# --- the plug-in


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_loads_where_transformers_hands_over_no_model(bundle, monkeypatch):
    """As transformers 5.19 calls the quantiser, which vLLM 0.32 pins; the limit still finds its model."""
    own = MoepackQuantizer.update_weight_conversions
    monkeypatch.setattr(MoepackQuantizer, "update_weight_conversions", lambda self, found, model: own(self, found))
    monkeypatch.setattr(HfQuantizer, "update_weight_conversions", lambda self, found: found)
    model = load_for_logits(bundle, memory="6GB")
    assert model.moepack.limit is not None
    model.moepack.close()


def test_threads_that_load_at_once(bundle, tmp_path):
    """transformers sets the default dtype of the whole process while it constructs a model, of a bundle or not."""
    checkpoint = save_tiny("qwen3_moe", tmp_path)
    alone = threading.Lock()  # of plain loads, which transformers does not keep apart

    def loaded(number):
        dtype = (torch.bfloat16, torch.float32)[number % 2]
        if number % 3 == 2:
            with alone:
                plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
            return {parameter.dtype for parameter in plain.parameters()} == {dtype}
        model = AutoModelForCausalLM.from_pretrained(bundle, dtype=dtype)
        held = {parameter.dtype for parameter in model.parameters()}
        model.moepack.close()
        return held == {dtype}

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(loaded, range(18)))
    assert torch.get_default_dtype() == torch.float32


def test_loads_of_other_models_and_in_children_wait_for_none(bundle, tmp_path):
    """A model may load a part of itself in another thread; a process may be forked while another thread loads."""
    checkpoint = save_tiny("qwen3_moe", tmp_path)

    class Two(Qwen3MoeForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            with ThreadPoolExecutor(1) as pool:
                self.__dict__["draft"] = pool.submit(Qwen3MoeForCausalLM.from_pretrained, checkpoint).result(PATIENCE)

    assert type(Two.from_pretrained(checkpoint).draft) is Qwen3MoeForCausalLM
    forks = f"""
import os, sys, threading, time, moepack
from moepack.runtime.load_turns import load_turns
held = threading.Event()
def load():
    with load_turns.loading():
        held.set()
        time.sleep(300)
threading.Thread(target=load, daemon=True).start()
held.wait()
if not os.fork():
    moepack.load({str(bundle)!r}).moepack.close()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert python(forks).returncode == 0


def test_an_interrupted_wait_for_a_turn_leaves_nothing(monkeypatch):
    """The fault: Ctrl-C while a bundle waits for a model under construction, and every later load waits for ever."""
    turns = LoadTurns()
    begun, ends = threading.Event(), threading.Event()

    def construct():
        with turns.constructing():
            begun.set()
            ends.wait(PATIENCE)

    def interrupted(seconds):
        raise KeyboardInterrupt

    thread = threading.Thread(target=construct)
    thread.start()
    assert begun.wait(PATIENCE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(turns._changed, "wait", interrupted)
        with turns.loading():
            pass
    assert not turns._loading and len(turns._constructing) == 1
    ends.set()
    thread.join()
    assert not turns._constructing


def test_without_moepack_nothing_is_served(bundle):
    out = python(
        f"from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained({str(bundle)!r})"
    )
    assert out.returncode != 0 and "mismatch" in (out.stderr + out.stdout).lower()
    assert (
        len([x for x in out.stderr.splitlines() if x.startswith("import moepack first: this is a moepack bundle")]) == 1
    )


# --- evaluation


def test_a_process_that_does_not_close_its_model_waits_for_its_threads(bundle):
    """The interpreter ends threads that still run, and one that is inside torch then aborts the process."""
    code = f"""
import atexit, threading, time
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("moepack")]))  # the last
import moepack
model = moepack.load({str(bundle)!r}, policy="hotness:hi=bf16,lo=w2", device_memory="20MB", prefill_tokens=16)
model.moepack.manager.device.stream.submit(lambda event: time.sleep(1))
"""
    run = python(code)
    assert run.returncode == 0 and run.stdout.splitlines() == ["[]"], run.stderr


def test_an_amd_gpu_without_kernels_is_refused_by_name(monkeypatch):
    """A CPU is not asked; pinned memory says what it lacks."""
    from types import SimpleNamespace

    from moepack.runtime import load
    from moepack.runtime.store import cudart

    monkeypatch.setattr(torch.version, "hip", "7.14")
    asked = SimpleNamespace(gcnArchName="gfx1100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked)
    with pytest.raises(InputError, match=r"device cuda: .* shared memory than gfx1100 has: serve with device cpu"):
        load._check_kernels("cuda")
    load._check_kernels("cpu")
    asked.gcnArchName = "gfx942:sramecc+:xnack-"
    with pytest.raises(InputError, match=r"device cuda:0: .* shared memory than gfx942 has"):
        load._check_kernels("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(OSError, match="this torch was built without CUDA"):
        cudart.Cudart(0)


def test_the_package_shows_its_names_and_a_served_model_says_what_it_is(bundle):
    assert set(moepack.__all__) <= set(dir(moepack)) and {"load", "build", "open"} <= set(dir(moepack))
    taken = inspect.signature(moepack.load).parameters
    assert {field.name for field in fields(LoadOptions)} <= set(taken), "every option by its name"
    assert all(parameter.annotation is not parameter.empty for parameter in taken.values())
    model = load_for_logits(bundle, policy="static:w4", device_memory=40_000_000)
    used = f"{model.moepack.resident_bytes():,}"
    assert repr(model.moepack) == (
        f"<moepack {bundle}: policy static:w4; {used} bytes of a budget of 40,000,000; experts: 64 w4>"
    )
    with moepack.load(bundle).moepack as serving:
        assert "bytes without a budget; experts: 64 bf16>" in repr(serving)


def test_errors_name_arguments_in_python_and_flags_on_a_command_line(bundle):
    with pytest.raises(InputError, match=r"policy hotness: needs a memory budget: device_memory$") as error:
        moepack.load(bundle, policy="hotness")
    with naming_flags():
        assert str(error.value).endswith("needs a memory budget: --device-memory")
    both = InputError("a--b: name another --work-dir, or run moepack quantize --fresh --all (--quiet)")
    assert str(both) == "a--b: name another work_dir, or run moepack quantize --fresh --all (quiet)"


def test_a_file_that_the_cache_knows_to_be_lacking_needs_no_hub(tmp_path, monkeypatch):
    """The fault: a bundle in the cache, without a generation configuration, was refused while the Hub was away."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    from moepack.runtime.load import _has_on_hub

    def away(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", away)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    commit = "0" * 40
    for name, text in ((f".no_exist/{commit}/lacking.json", ""), ("refs/main", commit)):
        path = tmp_path / "models--a--b" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert not _has_on_hub("a/b", "lacking.json", "main", None)
    with pytest.raises(LocalEntryNotFoundError):
        _has_on_hub("a/b", "unknown.json", "main", None)
