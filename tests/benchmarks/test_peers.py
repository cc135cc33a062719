"""What stands beside llama.cpp and kt-kernel: layouts, types, protocol and judgement. Needs neither of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.peers import gguf_layout
from benchmarks.peers.environments import KT, LLAMA, Peer, environment
from benchmarks.peers.judge import judged
from benchmarks.peers.layers import Side, groups, rounds, routing
from benchmarks.peers.worker import PeerError, Worker

CONFIG = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 3,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
}  # fmt: skip


def planned(mix: str) -> dict[str, gguf_layout.GgufTensor]:
    return {t.name: t for t in gguf_layout.tensors(CONFIG, mix)}


def test_experts_are_stacked_in_their_order() -> None:
    plan = planned("Q4_K experts")
    down = plan["blk.2.ffn_down_exps.weight"]
    assert down.shape == (3, 512, 256) and down.byte_shape == (3, 512, 144)
    assert down.sources == tuple(f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in range(3))
    up = plan["blk.0.ffn_up_exps.weight"]
    assert up.shape == (3, 256, 512) and up.sources[1] == "model.layers.0.mlp.experts.1.up_proj.weight"
    assert plan["blk.3.attn_v.weight"].shape == (128, 512) and plan["blk.3.attn_output.weight"].shape == (512, 512)
    assert plan["output.weight"].sources == ("lm_head.weight",)


def test_every_tensor_of_a_checkpoint_is_in_the_file_once(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    kept = {k: v for k, v in CONFIG.items() if k != "rope_parameters"}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**kept)).save_pretrained(tmp_path)
    head = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    config = json.loads((tmp_path / "config.json").read_text())
    sources = [name for t in gguf_layout.tensors(config, "BF16") for name in t.sources]
    assert sorted(sources) == sorted(header.keys() - {"__metadata__"})
    for t in gguf_layout.tensors(config, "BF16"):
        assert tuple(header[t.sources[0]]["shape"]) == t.shape[-2:], t.name


def test_mixes() -> None:
    """Types as llama.cpp's quantiser chooses them: of four layers the last two have more bits in Q4_K_M."""
    types = {mix: {name: t.type for name, t in planned(mix).items()} for mix in gguf_layout.MIXES}
    for mix, of in types.items():
        assert {of[f"blk.0.{n}.weight"] for n in ("attn_norm", "attn_q_norm", "ffn_gate_inp")} == {"F32"}, mix
    experts = {name for name in types["BF16"] if "_exps" in name}
    assert len(experts) == 12
    for kind in ("Q4_K", "Q2_K"):
        of = types[f"{kind} experts"]
        assert {n for n in of if of[n] == kind} == experts
        assert {of[n] for n in of if n not in experts} == {"F32", "BF16"}
    of = types["Q4_K_M"]
    assert [of[f"blk.{i}.ffn_down_exps.weight"] for i in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert [of[f"blk.{i}.attn_v.weight"] for i in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert of["output.weight"] == "Q6_K" and of["token_embd.weight"] == of["blk.3.attn_k.weight"] == "Q4_K"
    of = types["Q2_K"]
    assert of["blk.0.attn_v.weight"] == "Q4_K" and of["blk.0.ffn_down_exps.weight"] == "Q3_K"
    assert of["blk.0.ffn_up_exps.weight"] == "Q2_K" and of["blk.0.attn_output.weight"] == "Q3_K"
    assert sum(gguf_layout.more_bits(i, 48) for i in range(48)) == 24
    with pytest.raises(ValueError, match="Q5_K_M"):
        gguf_layout.tensors(CONFIG, "Q5_K_M")


def test_shapes_without_k_quants_have_others_beside_w4() -> None:
    versions = ("bf16", "w8", "w4", "w2")
    whole, odd = groups(2048, 768, versions), groups(2880, 2880, versions)
    assert [s.encoding for s in whole["w4"]] == ["w4", "Q4_K", "Q4_K", "Q4_K", "RAWINT4"]
    assert [s.name for s in odd["w4"]][1:3] == ["llama.cpp Q4_0 repacked", "llama.cpp Q4_0 plain"]
    assert odd["w2"] == [Side("moepack", "w2")]
    assert list(groups(2048, 768, ("bf16", "w2"))) == ["bf16", "w2"]


def test_one_token_goes_round_and_others_use_distinct_experts() -> None:
    index, step = routing(1, 128, 8)
    seen = [e + i * step for i in range(16) for e in index[0]]
    assert seen == list(range(128))
    index, step = routing(16, 128, 8)
    assert step == 128 and all(len(set(row)) == 8 for row in index) and len(index) == 16


def test_sides_take_turns_and_a_side_that_fails_is_left_out() -> None:
    order: list[str] = []

    def side(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def run(first: int, passes: int, warm: int) -> list[float]:
            order.append(f"{name} {first}")
            if name == "bad" and first:
                raise PeerError("gone")
            return [seconds] * passes

        return run

    got, failed = rounds({n: side(n, s) for n, s in (("a", 1.0), ("bad", 2.0), ("b", 3.0))}, 16, 0.0)
    assert got == {"a": 1.0, "b": 3.0} and failed == {"bad": "gone"}
    assert order[:6] == ["a 0", "bad 0", "b 0", "a 5", "bad 5", "b 5"]
    assert not any(x.startswith("bad") for x in order[6:])


def test_targets_follow_from_rows() -> None:
    best, over = "llama.cpp's best over ours", "over llama.cpp's best"
    layer = {"part": "layers", "shape": "S", "side": "moepack w4", "threads": 1}
    model = {"part": "models", "rest": "as served", "threads": 2}
    rows = [
        {**layer, "tokens": 1, best: 0.9},
        {**layer, "tokens": 512, best: 2.0},
        {**model, "side": "moepack w4, dense w8", f"decode {over}": 1.1, f"prefill {over}": 0.7},
        {**model, "side": "moepack w4, dense w4", f"decode {over}": 1.3, f"prefill {over}": 0.6},
        {"part": "quality", "model": "M", "encoding": "w4", "error": 1.0, "KL, mnat": 10.0},
        {"part": "quality", "model": "M", "encoding": "Q4_K", "error": 4.0, "KL, mnat": 40.0},
        {"part": "models", "side": "moepack bf16", "rest": "BF16", "threads": 1, "not measured": "no"},
    ]
    found = {t.name: (t.value, t.met) for t in judged(rows)}
    assert found == {
        "S, moepack w4, 1 tokens, 1 threads: llama.cpp's best over ours": (0.9, False),
        "moepack w4, as served, 2 threads: decode over llama.cpp's best": (1.3, True),
        "moepack w4, as served, 2 threads: the same, ambition": (1.3, True),
        "moepack w4, as served, 2 threads: prefill over llama.cpp's best": (0.7, False),
        "M: error of w4 over Q4_K's": (0.25, True),
        "M: KL of w4 over Q4_K's": (0.25, True),
    }


def test_an_environment_is_used_again_only_for_what_it_was_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer("one", ("nothing==1",), compiles=True)
    (tmp_path / "one" / "bin").mkdir(parents=True)
    (tmp_path / "one" / "bin" / "python").touch()
    (tmp_path / "one" / "installed.json").write_text(json.dumps(peer.stamp()))
    assert environment(peer, tmp_path) == tmp_path / "one" / "bin" / "python"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    other = Peer("one", ("nothing==1",), env={"CMAKE_ARGS": "-DX=ON"}, compiles=True)
    with pytest.raises(PeerError, match=r"^nothing==1 is compiled here, and there is no C\+\+ compiler$"):
        environment(other, tmp_path)
    assert "GGML_NATIVE=ON" in LLAMA.env["CMAKE_ARGS"] and "BLAS" not in LLAMA.env["CMAKE_ARGS"] and not KT.compiles


SIDE = """
import os
from benchmarks.peers.worker import answer, threads

def fail():
    raise LookupError("not here")

def end():
    print("some library speaks")
    os.write(2, b"last words\\n")
    os._exit(3)

answer({"add": lambda a, b: a + b, "cpus": lambda: sorted(os.sched_getaffinity(0)), "threads": threads,
        "fail": fail, "end": end})
"""


def test_a_side_is_a_process_with_its_processors(tmp_path: Path) -> None:
    (tmp_path / "side.py").write_text(SIDE)
    cpu = max(os.sched_getaffinity(0))
    environ = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with Worker(Path(sys.executable), "side", [cpu], tmp_path / "log", environ) as worker:
        assert worker.call("add", a=2, b=3) == 5
        assert worker.call("cpus") == [cpu] and worker.call("threads") == 1
        with pytest.raises(PeerError, match=r"^not here$"):
            worker.call("fail")
        with pytest.raises(PeerError, match=r"status 3, its last words: last words$"):
            worker.call("end")
        assert worker.call("add", a=1, b=1) == 2  # started again


def test_the_llama_side_imports_nothing_of_moepack() -> None:
    """Its environment has neither torch nor moepack."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['moepack'] = None\n"
        "import benchmarks.peers.ggml, benchmarks.peers.gguf_layout, benchmarks.peers.worker\n"
        "from benchmarks.peers.ggml import bf16\n"
        "import numpy as np; print(bf16(np.array([1.0, 1.00390625, 1.01171875, -2.5], np.float32)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    # ties to even: 1 + 2^-8 goes down to 1, 1 + 3 * 2^-8 up to 1 + 2^-6
    assert json.loads(done.stdout) == [0x3F80, 0x3F80, 0x3F82, 0xC020]


def test_moments_and_divergence_of_a_model() -> None:
    """Moments are those of what experts see; a model hardly changed hardly diverges, a damaged one does."""
    from benchmarks.peers import quality
    from moepack.pack.spec import Version

    example = ROOT / "examples" / "mini-qwen3-moe"
    text = [str(ROOT / "examples" / "text" / "evaluation.jsonl")]

    def encoding(name: str, values: quality.Values, block: int = 1) -> quality.Encoding:
        return quality.Encoding("moepack", name, 16.0, values, block)

    version = Version.of("w4", 64)
    every = [
        encoding("nearly", lambda w, m: w * (1 + 1e-4)),
        encoding("half", lambda w, m: w / 2),
        encoding("w4", lambda w, m: quality._ours(version, w, m)),
        encoding("wide", lambda w, m: w, block=256),
    ]
    rows = {r["encoding"]: r for r in quality.of_model(example, text, text, (6, 3), every)}
    # Rows of 128 are no whole blocks of 256; what users run is quantised in attention too.
    assert list(rows) == ["nearly", "half", "w4", "w4, dense w4"]
    assert rows["w4"]["KL, mnat"] < rows["w4, dense w4"]["KL, mnat"] < 5 * rows["w4"]["KL, mnat"]
    assert np.isclose(rows["half"]["error"], 0.25, rtol=1e-4) and rows["half"]["KL, mnat"] > 100
    assert np.isclose(rows["nearly"]["error"], 1e-8, rtol=0.05) and abs(rows["nearly"]["KL, mnat"]) < 0.01
    assert rows["w4"]["error"] < 0.02 and 0 < rows["w4"]["KL, mnat"] < rows["half"]["KL, mnat"] / 5
    assert rows["w4"]["quantised"] == "all experts' matrices"


def test_tables_and_the_picture_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import draw, tables

    layer = {"part": "layers", "shape": "S", "threads": 1, "bits/weight": 4.375, "floor ms": 1.5}
    model = {"part": "models", "rest": "BF16", "threads": 1}
    served = {**model, "rest": "as served"}
    quality = {"part": "quality", "model": "M", "bits/weight": 4.5, "error": 0.5, "+-": 0.1}
    rows = [
        {**layer, "side": "moepack w4", "tokens": 1, "ms": 2.0, "GB/s": 10.0},
        {**layer, "side": "moepack w4", "tokens": 16, "ms": 20.0, "GB/s": 8.0},
        {**layer, "side": "moepack w4", "tokens": 1, "ms": 1.25, "GB/s": 16.0, "threads": 2},
        {"part": "layers", "shape": "S", "threads": 1, "side": "llama.cpp Q8_0 repacked", "not measured": "none here"},
        {**model, "side": "moepack w4", "decode tokens/s": 90.2, "prefill tokens/s": 500.0,
         "decode over llama.cpp's best": 1.25, "prefill over llama.cpp's best": 1.5},
        {**model, "side": "llama.cpp Q4_K experts plain", "decode tokens/s": 72.0, "prefill tokens/s": 333.0},
        {**served, "side": "moepack w4, dense w8", "decode tokens/s": 120.0, "prefill tokens/s": 500.0},
        {**served, "side": "moepack w4", "decode tokens/s": 91.0, "prefill tokens/s": 500.0},  # in the picture already
        {**quality, "who": "moepack", "encoding": "w4", "KL, mnat": 1.25, "bits/weight": 4.375},
        {"part": "quality", "model": "M", "bits/weight": 5.5, "+-": 0.1, "who": "moepack", "encoding": "w4, dense w8",
         "KL, mnat": 1.5, "added, %": 20.0, "added +-": 2.0},
        {**quality, "who": "llama.cpp", "encoding": "Q4_K", "KL, mnat": 4.0},
    ]  # fmt: skip
    for module in (tables.peers, draw):
        monkeypatch.setattr(module, "results", lambda name: {"rows": rows, "peers": {"llama.cpp": "0.1"}})
    assert tables.peer_layers().splitlines()[2:] == [
        "| S | **moepack** w4 | 4.375 | 2/1.25 | 20/- | 1.5/1.5 |",
    ]
    assert tables.peer_models().splitlines()[2:] == [
        "| BF16 | 1 | **moepack** w4 | 90 | 500 | 1.25 | 1.50 |  |",
        "| BF16 | 1 | llama.cpp Q4_K experts plain | 72 | 333 |  |  |  |",
        "| as served | 1 | **moepack** w4, dense w8 | 120 | 500 |  |  |  |",
        "| as served | 1 | **moepack** w4 | 91 | 500 |  |  |  |",
    ]
    assert tables.peer_quality().splitlines()[2:] == [
        "| M | **moepack** w4, dense w8 | 5.5 |  | 1.5 ± 0.1 | +20.0 % ± 2.0 |",
        "| M | llama.cpp Q4_K | 4.5 | 0.5 | 4 ± 0.1 |  |",
        "| M | **moepack** w4 | 4.375 | 0.5 | 1.25 ± 0.1 |  |",
    ]
    (axis,) = draw.peers().axes
    drawn = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    beside = "BF16 beside experts"
    assert drawn == [
        (f"moepack, {beside}", [1.25], [90.2]),
        ("moepack, all quantised", [1.5], [120.0]),
        (f"llama.cpp, {beside}", [4.0], [72.0]),
    ]
