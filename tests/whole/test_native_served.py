"""Native versions under every policy and by every way to a model: the checkpoint's own bits, in every placement."""

import numpy as np
import pytest
import torch
from gpu_stand_in import install
from native_checkpoints import IDS, logits, released, small
from served import complete
from support import build_from, for_logits, load_for_logits

import moepack
from moepack.generation import generate
from moepack.pack.encodings.released import ReleasedFloat
from moepack.pack.errors import BundleError, CodecError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Version
from moepack.reports.evaluate import evaluate
from moepack.reports.plan import plan
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.registry import ENTRIES

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

# Extents of so few weights take as many pages at w2 as at mxfp4 unless w2's groups are of 64.
RECIPE = """
versions: [native, w3, w2]
quantize: {method: rtn, group_size: 64, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""
PAGED = ["deepseek mxfp4", "ct nvfp4", "fp8 blocks", "gptq"]  # one of each layout of scales
# In ample room every policy serves the best version; `importance` only if it is named, and all tokens are important.
POLICIES = ["importance:r=1,hi=" if e.name == "importance" else e.name for e in ENTRIES]
WORK = {"kv_tokens": 64, "prefill_tokens": 64, "all_logits": False}
AMPLE = 8_000_000  # bytes


@pytest.fixture(scope="module")
def plain(demo_model, tmp_path_factory):
    return small(demo_model, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def native(plain, text, made_once):
    """The bundle of a kind, and beside it the checkpoint."""

    def of(kind):
        def make(folder):
            folder.mkdir()
            released(plain, folder / "checkpoint", kind)
            build_from(RECIPE, folder / "checkpoint", folder / "bundle", [text])

        return made_once(f"native-{kind}", make) / "bundle"

    return of


def best(bundle):
    return open_bundle(bundle).versions[0].name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", PAGED)
def test_paging_gives_the_bits_of_resident_experts(kind, native, dtype):
    """Of prompts, of tokens, of padded batches: from the store alone, and from memory in part."""
    bundle, asked = native(kind), {"dtype": dtype, **WORK}
    exact = moepack.load(bundle, policy=f"static:{best(bundle)}", dtype=dtype)
    with pytest.raises(TooSmallError, match=rf"2 layers' experts at {best(bundle)}: the least") as refused:
        load_for_logits(bundle, policy="paged", device_memory=1000, **asked)
    for options, more in (("paged", 0), ("paged:alpha=0.5", 100_000), ("paged:alpha=0.3,ahead=no", 100_000)):
        model = load_for_logits(bundle, policy=options, device_memory=refused.value.least + more, **asked)
        with model.moepack as serving, torch.inference_mode():
            placed = {name for row in serving.versions for name in row}
            assert placed <= {best(bundle), f"{best(bundle)}@packed", "stored"}
            serving.manager.on_demand.drop_all()  # a model of two layers fits the least budget: begin with the store
            for ids in (IDS, IDS[:, :1], IDS.view(2, 20)):
                mask = torch.ones_like(ids)
                mask[0, : ids.shape[1] // 3] = 0
                got, want = (m(ids, attention_mask=mask, logits_to_keep=1).logits for m in (model, exact))
                assert torch.equal(got, want)
            made = [m.generate(IDS[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (model, exact)]
            assert torch.equal(*made) and serving.counters()["forward_waits"] > 0
            assert serving.resident_bytes_peak <= refused.value.least + more
    exact.moepack.close()


def test_of_a_coded_version_paging_knows_restore_alone(native, text, tmp_path, monkeypatch):
    """Extents that are inverted at rest come back on their way to a block: from coded bytes, and from the store."""
    want, kind, damaged = logits(native("deepseek mxfp4"), policy="static"), type(Version.of("mxfp4")), False

    def encode(*args):
        extent, payload = ReleasedFloat.encode(*args)
        return ~extent, payload

    def restore(self, matrices, extent, out, threads=None, before=None):
        if damaged:
            raise CodecError("tile 3: bad codes")
        np.invert(extent, out=out[: len(extent)])

    for name, value in (("encode", encode), ("restore", restore), ("entropy_coded", True)):
        monkeypatch.setattr(kind, name, value)
    checkpoint = native("deepseek mxfp4").with_name("checkpoint")
    build_from(RECIPE, checkpoint, tmp_path / "bundle", [text])
    options = "paged:alpha=0.5,resident=0.25,ahead=no"
    model = load_for_logits(tmp_path / "bundle", policy=options, device_memory=AMPLE, **WORK)
    with model.moepack as serving, torch.inference_mode():
        assert {n for row in serving.versions for n in row} == {"mxfp4", "mxfp4@packed", "stored"}
        assert torch.equal(model(IDS).logits.float(), want)
        serving.manager.on_demand.drop_all()
        damaged = True
        with pytest.raises(BundleError, match=r"layer \d, expert \d, version mxfp4: tile 3: bad codes"):
            model(IDS)
        damaged = False
        assert torch.equal(model(IDS).logits.float(), want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["deepseek mxfp4", "fp8 blocks"])
def test_every_policy_by_every_way(kind, policy, native, evaluation):
    bundle, prompt = native(kind), "The town"
    asked = {"policy": policy + best(bundle) * policy.endswith("="), "device_memory": AMPLE}
    want = logits(bundle, policy=f"static:{best(bundle)}")
    assert torch.equal(logits(bundle, **asked, **WORK), want)
    planned = plan(bundle, for_logits(**asked, **WORK))
    shown = {name.partition("@")[0] for row in planned.table for name in row}
    assert planned.feasible and shown <= {best(bundle), "absent", "stored"}
    options = LoadOptions(dtype="float32", batch=1, **asked, **WORK)
    scored = evaluate(bundle, [str(evaluation)], options, length=64, samples=2, kl=True)
    assert scored.kl == 0 and scored.top1_agreement == 1 and scored.resident_bytes_peak <= AMPLE
    told = [generate(bundle, prompt, o, max_new_tokens=5) for o in (options, LoadOptions(dtype="float32"))]
    served = LoadOptions(dtype="float32", kv_tokens=64, **asked)
    assert complete(bundle, served, prompt, 5, step_tokens=32) == told[0] == told[1]


def test_a_gpu_gets_codes_that_the_host_decoded(native, monkeypatch):
    bundle, gpu = native("fp8 blocks"), install(monkeypatch, computes=False)
    model, opened_bundle = load_for_logits(bundle, policy="hotness", device_memory=AMPLE, **WORK), open_bundle(bundle)
    version = opened_bundle.versions[0]
    with model.moepack as serving:
        assert {name for row in serving.versions for name in row} == {"fp8"}
        for p, layer in enumerate(serving.manager.layers):
            for e, handle in enumerate(layer.current.handles):
                want = np.zeros(version.resident_size(layer.of.layer.matrices), np.uint8)
                version.restore(layer.of.layer.matrices, opened_bundle.extent("fp8", p, e), want)
                assert np.array_equal(handle.extent.numpy(), want)
    assert gpu.wrong() == gpu.leaks() == []
