"""How programs load a bundle (docs/in-other-programs.md, "Loading")."""

import itertools
import warnings

import pytest
import torch
from support import HOT, spy
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeForCausalLM
from transformers.quantizers import auto

import moepack
from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.runtime.planning.options import METHOD
from moepack.runtime.plugin import MoepackConfig

from_path = AutoModelForCausalLM.from_pretrained


@pytest.mark.row("`moepack.load(bundle)`, `from_pretrained(bundle)`")
def test_load(row, bundle, free, hot, same):
    assert same(free) and same(hot) and same(from_path(bundle))
    assert same(free, 1) and same(free, 300) and same(hot, 1) and same(hot, 300)


@pytest.mark.row("`from_pretrained(bundle, policy=..., device_memory=...)`")
def test_keywords(row, bundle, same):
    assert from_path(bundle, policy="static:w2").moepack.versions[0][0] == "w2"
    with from_path(bundle, **HOT).moepack as serving:
        assert serving.budget_bytes == 30_000_000 and serving.manager is not None


@pytest.mark.row("`from_pretrained(bundle, quantization_config=MoepackConfig(...))`")
def test_config(row, bundle, same):
    config = MoepackConfig(policy="static:w3")
    assert from_path(bundle, quantization_config=config).moepack.versions[0][0] == "w3"
    with warnings.catch_warnings():  # options beside a config are merged without one
        warnings.simplefilter("error")
        model = from_path(bundle, quantization_config=MoepackConfig(**HOT), kv_tokens=64)
    assert same(model) and model.moepack.budget_bytes == 30_000_000 and model.moepack.fixed.kv == 64 * 1024
    model.moepack.close()
    with pytest.raises(InputError, match="workload has no tokens: kv_tokens, batch"):
        MoepackConfig(workload={"tokens": 1})


@pytest.mark.row("`from_pretrained(bundle)` with `MOEPACK_POLICY`, `MOEPACK_DEVICE_MEMORY`")
def test_environment(row, bundle, monkeypatch):
    monkeypatch.setenv("MOEPACK_POLICY", HOT["policy"])
    monkeypatch.setenv("MOEPACK_DEVICE_MEMORY", HOT["device_memory"])
    with from_path(bundle).moepack as serving:
        assert serving.policy == HOT["policy"] and serving.budget_bytes == 30_000_000
    assert moepack.load(bundle, policy="static:w2").moepack.policy == "static:w2", "an argument goes first"
    monkeypatch.setenv("MOEPACK_DEVICE_MEMORY", "much")
    with pytest.raises(InputError, match="size 'much' is not a number of bytes"):
        from_path(bundle)


@pytest.mark.row("any of them without `import moepack`")
def test_without_the_import(row, bundle, monkeypatch):
    """As transformers is where nobody has registered a quantiser; test_load.py has a process that really has not."""
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, METHOD)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
    row.refuses(from_path, bundle)


@pytest.mark.row('`device_map="auto"`, `"balanced"`, `"sequential"`, `"cpu"`, `"cpu:0"`')
def test_device_map(row, bundle, same, monkeypatch):
    """However the CPU is spelled, files of tensors are digested once, while they are read, and a limit is kept."""
    checked = []
    spy(monkeypatch, Bundle, "check", lambda self, *names: checked.extend(names))
    for device_map in ("auto", "cpu", "balanced", "sequential", {"": "cpu"}, "cpu:0", {"": "cpu:0"}):
        if torch.cuda.is_available() and device_map in ("auto", "balanced", "sequential"):
            continue
        model = from_path(bundle, device_map=device_map, memory="6GB")
        assert same(model) and model.moepack.limit is not None and not checked
        model.moepack.close()
    assert same(from_path(bundle, device_map="auto")) and moepack.load(bundle, "cpu:0", memory="6GB").moepack.limit
    model = from_path(bundle, device_map="cpu", **HOT)
    assert same(model)
    model.moepack.close()


@pytest.mark.row("a `device_map` that puts any part on the disk")
def test_offloading_device_map(row, bundle, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{n}": "disk" if n else "cpu" for n in range(4)}
    parts = {"model": "cpu", "lm_head": "cpu"}
    offloads = (places | layers, parts | {"lm_head": "disk"}, parts | {"model.embed_tokens": "disk"}, {"": "meta"})
    for options, device_map in itertools.product(({}, HOT), (*offloads, {"model": 0, "lm_head": "cpu"})):
        row.refuses(from_path, bundle, device_map=device_map, offload_folder=tmp_path, **options)
        row.refuses(from_path, bundle, device_map="sequential", max_memory={"cpu": 1_000_000}, **options)


@pytest.mark.row('inside `with torch.device("cpu")`')
def test_inside_a_device(row, bundle, hot, same):
    with torch.device("cpu"):
        assert same(moepack.load(bundle)) and same(hot)


@pytest.mark.row('inside `with torch.device("meta")`')
def test_inside_meta(row, bundle):
    with torch.device("meta"):
        row.refuses(moepack.load, bundle)
        row.refuses(moepack.load, bundle, **HOT)


@pytest.mark.row("another quantiser's config")
def test_another_quantiser(row, bundle):
    row.refuses(from_path, bundle, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


@pytest.mark.row('`from_pretrained(bundle, experts_implementation="eager")`')
def test_another_implementation(row, bundle):
    row.refuses(from_path, bundle, experts_implementation="eager")
    for named in ("grouped_mm", {"": "eager"}):
        for kind in (AutoModelForCausalLM, Qwen3MoeForCausalLM):
            with pytest.raises(InputError, match="a bundle's experts are run by moepack's own"):
                kind.from_pretrained(bundle, experts_implementation=named)
    from_path(bundle, experts_implementation="moepack", policy="static:w2")


@pytest.mark.row("`AutoModel.from_pretrained(bundle)`, the decoder alone")
def test_the_decoder_alone(row, bundle):
    row.refuses(AutoModel.from_pretrained, bundle)


@pytest.mark.row("`from_config(model.config)`, then a pass")
def test_from_config(row, free):
    made = AutoModelForCausalLM.from_config(free.config)
    row.refuses(made, torch.ones(1, 4, dtype=torch.long))
