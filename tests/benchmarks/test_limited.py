"""What stands beside llama.cpp in a memory limit: the cage, the generated model, rows. Needs no llama.cpp."""

import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import PATIENCE

from benchmarks.limited import make as maker
from benchmarks.limited import rows as measured
from benchmarks.limited.bundle import write_bundle
from benchmarks.limited.cage import Cage
from benchmarks.limited.shapes import SESSION, SHAPES, TOPICS, text
from benchmarks.limited.weights import Weights, chosen, to_float
from benchmarks.peers.worker import PeerError
from moepack.pack.reader import open_bundle
from moepack.reports.verify import verify

TINY = replace(SHAPES["tiny"], layers=3, experts=16)
SIDE = "moepack:hotness:lo=stored:dense=w4"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limited")
    write_bundle(TINY, folder / "bundle")
    return folder / "bundle"


@pytest.fixture
def cage():
    with Cage(96 << 20) as made:
        if made.group is None:
            pytest.skip("no control group can be made here")
        yield made


def test_a_cage_counts_page_cache(cage, tmp_path):
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    command = ["dd", f"if={tmp_path / 'file'}", f"of={tmp_path / 'copy'}", "bs=1M"]
    subprocess.run(command, preexec_fn=cage.enter, check=True, capture_output=True)
    assert 64 << 20 < (cage.peak() or 0) <= 96 << 20
    assert not cage.killed()


def test_a_cage_kills_and_says_so(cage):
    done = subprocess.run([sys.executable, "-c", "b'1' * (200 << 20)"], preexec_fn=cage.enter, check=False)
    assert done.returncode == -9 and cage.killed()


def test_a_generated_bundle_is_whole(bundle):
    assert verify(bundle) == []
    opened = open_bundle(bundle)
    assert [len(layer.matrices) for layer in opened.layers] == [2] * 3
    assert [v.name for v in opened.versions] == ["w4", "w2"]
    assert [v.name for v in opened.dense_versions] == ["w8", "w4"]


def test_a_generated_bundle_of_released_experts(tmp_path):
    """As gpt-oss' shape has them: MXFP4 as the checkpoint's own, and it is served."""
    import torch

    import moepack

    shape = replace(TINY, groups=SHAPES["gpt-oss"].groups, released="MXFP4", kinds=1)
    write_bundle(shape, tmp_path / "bundle")
    assert verify(tmp_path / "bundle") == []
    assert [v.name for v in open_bundle(tmp_path / "bundle").versions] == ["mxfp4", "w2"]
    model = moepack.load(tmp_path / "bundle", policy="static:mxfp4", dense="w8")
    layer, x = model.model.layers[1].mlp.experts, torch.randn(5, TINY.hidden, dtype=torch.bfloat16)
    with torch.inference_mode():
        got = layer(x, torch.full((5, 1), 3), torch.ones(5, 1, dtype=torch.bfloat16)).float()
    model.moepack.close()
    weights = Weights(shape)
    gate, up, down = (
        torch.from_numpy(to_float(weights.bits(f"model.layers.1.mlp.experts.0.{name}_proj.weight")))
        for name in ("gate", "up", "down")
    )
    wanted = (torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T
    assert 0.05 < ((got - wanted).square().mean() / wanted.square().mean()).sqrt() < 0.25  # what four bits lose


WARM = 64  # tokens that fill a cache before its hits count


def hits(routed, size):
    """How often an expert is among the `size` last used, of a routing [tokens, top_k]."""
    held, out = OrderedDict(), []
    for row in routed.tolist():
        out.append([e in held for e in row])
        for e in row:
            held[e] = None
            held.move_to_end(e)
        while len(held) > size:
            held.popitem(last=False)
    return np.mean(out[WARM:])


def test_routing_is_as_uneven_as_claimed():
    """weights.py: the true shape's busiest tenth and hits of a cache of the last used, of embeddings alone."""
    weights = Weights(SHAPES["qwen3-moe"])
    embedded = [weights.embedding(np.array(text(topic, 640, SESSION))) for topic in range(TOPICS)]
    routed = [chosen(weights, 0, one)[0] for one in embedded]
    count = weights.shape.experts

    def busiest(experts):
        counts = np.sort(np.bincount(experts.ravel(), minlength=count))[::-1]
        return counts[: round(0.1 * count)].sum() / counts.sum()

    assert busiest(routed[0]) == pytest.approx(0.45, abs=0.05)
    every = np.concatenate(routed)
    assert busiest(every) < 0.35  # other experts are busy in other texts
    found = [hits(every, round(share * count)) for share in (0.125, 0.25, 0.5)]
    assert found == pytest.approx([0.44, 0.71, 0.93], abs=0.03)


def test_what_is_served_is_routed_as_the_skew_says(bundle):
    """Layers add little to embeddings: routers of a loaded model choose what embeddings alone say."""
    import torch

    import moepack

    ids = text(1, 64, 3)
    model = moepack.load(bundle, policy="static:w4", dense="w8")
    seen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: seen.append(out[-1]))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    model.moepack.close()
    weights = Weights(TINY)
    embedded = weights.embedding(np.array(ids))
    for layer, got in enumerate(seen):
        wanted, _ = chosen(weights, layer, embedded)
        pairs = zip(got.tolist(), wanted.tolist(), strict=True)
        assert np.mean([len(set(a) & set(b)) / TINY.top_k for a, b in pairs]) > 0.9


def test_a_model_is_not_begun_without_room(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PeerError, match=r"would take 26\.\d GB, and 20 are allowed"):
        maker.make(SHAPES["qwen3-moe"], (), 20e9)
    assert list(maker.home(SHAPES["qwen3-moe"]).iterdir()) == []


def test_a_refusal_is_a_row(bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "bundle_of", lambda shape: bundle)
    monkeypatch.setattr(measured, "home", lambda shape: tmp_path)
    row = measured.measure(measured.Asked(SIDE, 600 << 20, 32, 4, 0, 300, 1, cold=False), TINY)
    assert row["result"].startswith("refused: ") and "least" in row["result"]
    assert row["side"] == SIDE and "decode tokens/s" not in row


@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("b'1' * (200 << 20)", PATIENCE, "killed: out of memory, before its first token"),
        ("import time; time.sleep(6000)", 3, "stopped after 3 s"),
        ("raise SystemExit('no such')", PATIENCE, "its process ended with status 1, its last words: no such"),
    ],
)
def test_an_end_is_a_row(cage, program, seconds, said, monkeypatch, tmp_path):
    (tmp_path / "side.py").write_text(program)
    monkeypatch.setattr(measured.Asked, "environment", {"PYTHONPATH": str(tmp_path)})
    monkeypatch.setattr(measured.Asked, "opens", lambda self, shape: (Path(sys.executable), "side", {}))
    monkeypatch.setattr(measured, "home", lambda shape: tmp_path)
    row = measured.measure(measured.Asked("llama:Q4_K_M", 96 << 20, 32, 4, 0, seconds, 1, cold=False), TINY)
    assert row["result"] == said and row["peak GB"] <= 0.11
