"""A family and a device as docs/extending/ adds them, word by word; and the counts of files on all of its pages."""

import time
from pathlib import Path

import pytest
import torch
from support import PATIENCE, ROOT, build_from, documented, for_logits, load_for_logits
from support import ids as token_ids
from tiny_models import copy_tokenizer

import moepack
from moepack.families import layouts
from moepack.families.model_class import model_of
from moepack.pack.errors import InputError
from moepack.reports.plan import plan
from moepack.runtime.devices.contract import Device
from moepack.runtime.residency import opening

PAGES = {p.stem: p.read_text() for p in (ROOT / "docs" / "extending").glob("*.md")}
RECIPE = """
versions: [bf16, w2]
quantize: {method: rtn, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""


def test_a_family(demo_model, text, tmp_path, monkeypatch):
    """Refused without its line; with it and its file built, loaded, and the same as the plain model's own loop."""
    family = documented("family", "trio_model", tmp_path)
    documented("family", "moepack.families.trio", tmp_path, 1)
    config = family.TrioConfig(
        hidden_size=64, moe_intermediate_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, vocab_size=4096, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = family.TrioForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in plain.model.layers[0].mlp.experts.parameters():
            parameter.normal_(0, 0.2)
    plain.save_pretrained(tmp_path / "checkpoint")
    copy_tokenizer(demo_model, tmp_path / "checkpoint")
    refused = "trio has experts .TrioExperts. that transformers' experts interface does not run"
    with pytest.raises(InputError, match=refused):
        build_from(RECIPE, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    line = next(x for x in PAGES["family"].splitlines() if x.startswith('"trio_model.'))
    monkeypatch.setattr(layouts, "LAYOUTS", {**layouts.LAYOUTS, **eval(f"{{{line}}}")})  # the page's own line
    build_from(RECIPE, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    ours = moepack.load(tmp_path / "bundle", policy="static:bf16", dtype=torch.float32)
    plain = family.TrioForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    ids = token_ids(12, 1, 2)
    with torch.inference_mode():
        want, got = plain(ids).logits, ours(ids).logits
    # float32 on both sides: sums in another order
    assert float((got - want).norm() / want.norm()) <= 1e-5
    assert type(plain.model.layers[0].mlp.experts).__name__ == "TrioExperts", "a plain model keeps its own code"
    assert type(model_of(config).model.layers[0].mlp.experts).__name__ == "Experts"


def test_a_device(bundle, tmp_path, monkeypatch):
    """Versions change over the slow link, and no pass waits for it."""
    slow = documented("device", "moepack.runtime.devices.slow", tmp_path).SlowLink
    assert {n for n in vars(Device) if not n.startswith("_")} <= set(vars(slow)), "a method of the contract"
    line = next(x for x in PAGES["device"].splitlines() if "return SlowLink" in x)
    replaced = line.replace("SlowLink", "CpuDevice")
    assert replaced in Path(opening.__file__).read_text(), "the line that it stands in place of"
    monkeypatch.setattr(opening, "CpuDevice", slow)
    policy = "hotness:hi=bf16,lo=w2,prior=none,interval=0.05,rate=0"
    budget = plan(bundle, for_logits(device_memory=0, policy=policy, prefill_tokens=16)).least_bytes + 400_000
    ids = token_ids(16, 0, 1)
    model = load_for_logits(bundle, policy=policy, device_memory=budget, prefill_tokens=16)
    with model.moepack as served:
        assert type(served.manager.device) is slow and served.manager.device.host()["latency"] == slow.latency
        began, end = time.monotonic(), time.monotonic() + PATIENCE
        while served.counters()["promotions"] < 3:
            assert time.monotonic() < end, served.counters()
            with torch.inference_mode():
                model(ids, use_cache=False)
        assert time.monotonic() - began >= 3 * slow.latency
        assert served.counters()["forward_waits"] == 0 and served.resident_bytes_peak <= budget
