"""What programs do with a model that they have loaded: each works, or is refused in one line."""

import json
import os
import re

import pytest
import torch
from huggingface_hub import constants
from live_models import plain_twin
from support import ids, load_for_logits
from transformers import AutoModelForCausalLM

import moepack
from moepack.pack.errors import InputError
from moepack.runtime import snapshot as snapshots
from moepack.runtime.plugin import MoepackConfig

HOT = "hotness:hi=bf16,lo=w2"


# --- loading


@pytest.mark.parametrize("options", [{"policy": "static:w2"}, {"quantization_config": MoepackConfig()}])
@pytest.mark.parametrize("method", [None, "fp8"])
def test_a_plain_checkpoint_is_no_bundle(demo_model, tmp_path, options, method):
    config = json.loads((demo_model / "config.json").read_text())
    if method:
        config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(demo_model / "model.safetensors")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}: not a bundle; moepack build makes one")):
        AutoModelForCausalLM.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("own", [False, True], ids=["transformers", "moepack"])
def test_the_rest_of_a_bundle_is_fetched_as_the_beginning_was(bundle, tmp_path, monkeypatch, own):
    """With transformers' part of it in a cache of its own: same token, same cache, and no request where none may be."""
    commit = "0123456789" * 4
    snapshot = tmp_path / "cache" / "models--someone--mini" / "snapshots" / commit
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(parents=True)
    files = [f for f in bundle.rglob("*") if f.is_file() and (f.parent == bundle or f.parent.name == "w2")]
    files.append(bundle / "experts" / "w4" / "layer-000.safetensors")  # as a download that was stopped leaves it
    for number, file in enumerate(files):
        (snapshot / file.relative_to(bundle)).parent.mkdir(parents=True, exist_ok=True)
        os.link(file, blobs / str(number))
        (snapshot / file.relative_to(bundle)).symlink_to(blobs / str(number))
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(commit)
    seen = []
    fetch = snapshots.fetch

    def note(name, commit, options, given):
        seen.append((name, commit, options.policy, options.budget, options.dense, given))
        return fetch(name, commit, options, given)

    monkeypatch.setattr("moepack.runtime.plugin.fetch", note)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # transformers asks for more than what it needs
    if own:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("moepack.runtime.load.on_hub", lambda *_, **__: bundle / "manifest.json")
        model, given = moepack.load("someone/mini", token="hf_mine", policy="static:w2"), {"token": "hf_mine"}
    else:
        given = {"token": "hf_mine", "cache_dir": str(tmp_path / "cache"), "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained("someone/mini", policy="static:w2", **given)
    assert model.moepack.bundle.path == snapshot
    assert seen == [("someone/mini", commit, "static:w2", None, None, given)]
    assert [v.name for v in model.moepack.bundle.versions] == ["w2"], "what is there in part is not there"


# --- afterwards


@pytest.mark.parametrize(("policy", "memory"), [("static:w2", None), (HOT, "30MB"), ("lru:hi=bf16,lo=w2", "30MB")])
def test_a_pass_after_close_says_so_at_once(bundle, policy, memory):
    model = load_for_logits(bundle, policy=policy, device_memory=memory)
    with model.moepack, torch.inference_mode():
        model(ids(8))
    for call in (model, model.forward, model.model):
        with pytest.raises(InputError, match="was closed"):
            call(ids(8))
    if model.moepack.manager is not None:  # a static policy's experts stay
        routed = torch.zeros(1, 128, dtype=model.dtype), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
        with pytest.raises(InputError, match="was closed"):
            model.model.layers[0].mlp.experts(*routed)


# --- training beside it


def test_gradients_by_inputs_and_gates_are_exact(bundle, demo_model):
    ours = moepack.load(bundle, policy="static:w3", dtype=torch.float32)
    module, other = (m.model.layers[1].mlp.experts for m in (ours, plain_twin(ours, demo_model)))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 16, (5, 2), generator=generator)
    grads = []
    for experts in (module, other):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        gates = torch.rand(5, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = experts(x, index, gates)
        out.square().sum().backward()
        grads.append((x.grad, gates.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
