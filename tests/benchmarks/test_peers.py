"""What stands beside llama.cpp: layouts, types, protocol and judgement. Needs no llama.cpp."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT, python

from benchmarks.limited.shapes import SHAPES
from benchmarks.peers import gguf_layout
from benchmarks.peers.judge import judged
from benchmarks.peers.worker import PeerError, Worker

CONFIG = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 3,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
}  # fmt: skip


def test_every_tensor_of_a_checkpoint_is_in_the_file_once(tmp_path):
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


def test_targets_follow_from_rows():
    over = "over llama.cpp's best"
    model = {"part": "models", "threads": 2}
    rows = [
        {**model, "side": "moepack w4, dense w8", f"decode {over}": 1.1, f"prefill {over}": 0.7},
        {**model, "side": "moepack w4, dense w4", f"decode {over}": 1.3, f"prefill {over}": 0.6},
        {"part": "quality", "model": "M", "encoding": "w4", "error": 1.0, "KL, mnat": 10.0},
        {"part": "quality", "model": "M", "encoding": "Q4_K", "error": 4.0, "KL, mnat": 40.0},
        {**model, "side": "moepack w2, dense w8", f"decode {over}": 1.2, "decode over ik_llama.cpp's best": 0.9},
        {"part": "models", "side": "moepack bf16", "threads": 1, "not measured": "no"},
    ]
    found = {t.name: (t.value, t.met) for t in judged(rows)}
    assert found == {
        "moepack w4, as served, 2 threads: decode over llama.cpp's best": (1.3, True),
        "moepack w4, as served, 2 threads: prefill over llama.cpp's best": (0.7, False),
        "moepack w2, as served, 2 threads: decode over llama.cpp's best": (1.2, True),
        "moepack w2, as served, 2 threads: decode over ik_llama.cpp's best": (0.9, False),
        "M: error of w4 over Q4_K's": (0.25, True),
        "M: KL of w4 over Q4_K's": (0.25, True),
    }


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


def test_a_side_is_a_process_with_its_processors(tmp_path):
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


def test_the_llama_side_imports_nothing_of_moepack():
    """Its environment has neither torch nor moepack."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['moepack'] = None\n"
        "import benchmarks.peers.ggml, benchmarks.peers.ik, benchmarks.peers.llama, benchmarks.peers.worker\n"
        "from benchmarks.limited.weights import to_bf16\n"
        "import numpy as np; print(to_bf16(np.array([1.0, 1.00390625, 1.01171875, -2.5], np.float32)).tolist())"
    )
    # ties to even: 1 + 2^-8 goes down to 1, 1 + 3 * 2^-8 up to 1 + 2^-6
    assert json.loads(python("-c", code, cwd=ROOT)) == [0x3F80, 0x3F80, 0x3F82, 0xC020]


def test_a_side_that_dies_in_a_whole_model_is_a_row():
    """At its second turn: its row says why, and the other side's has rates and nothing to compare with."""
    from benchmarks.peers.whole import MATCHES, PROMPT, measure

    class Side:
        def __init__(self, turns):
            self.turns = turns

        def call(self, what, **asked):
            self.turns -= what == "read"
            if self.turns < 0:
                raise PeerError("its process ended with status -4")
            return [0.1 if len(part) == 1 else len(part) / 1024 for part in asked.get("parts", ())]

    sides = {"moepack": Side(99), "llama.cpp": Side(2)}  # its two layouts have a turn each
    rows = measure(sides, SHAPES["tiny"], replace(MATCHES[0], dense=("w4",)), 2, 0.0, 1)
    *dead, ours = sorted(rows, key=lambda row: row["side"])
    assert [row["side"] for row in dead] == ["llama.cpp Q4_K_M plain", "llama.cpp Q4_K_M repacked"]
    assert {row["not measured"] for row in dead} == {"its process ended with status -4"}
    assert (ours["decode tokens/s"], ours["prefill tokens/s"]) == (10.0, PROMPT / 0.5)
    assert (ours["decode at 4,000 tokens/s"], ours["prefill to 4,000 tokens/s"]) == (10.0, 1024.0)
    assert not any("over" in key for key in ours)


def test_each_peer_has_its_best_in_a_row():
    """ik_llama.cpp's over its files, shared and its own; llama.cpp's apart from them."""
    from benchmarks.peers.whole import MATCHES, measure

    class Side:
        def __init__(self, seconds):
            self.seconds = seconds

        def call(self, what, **asked):
            if what == "open_model" and "IQ4_K" in asked["key"]:
                self.seconds /= 2  # from then on: its own files are opened last
            return [self.seconds * len(part) for part in asked.get("parts", ())]

    sides = {"moepack": Side(0.1), "llama.cpp": Side(0.2), "ik_llama.cpp": Side(0.4)}
    rows = {row["side"]: row for row in measure(sides, SHAPES["tiny"], MATCHES[0], 2, 0.0, 1)}
    mixes = ("Q4_K_M repacked", "Q4_K_M plain")
    theirs = [f"llama.cpp {mix}" for mix in mixes]
    theirs += [f"ik_llama.cpp {mix}" for mix in (*mixes, "IQ4_K repacked", "IQ4_K plain")]
    assert [side for side in rows if not side.startswith("moepack")] == theirs
    ours = rows["moepack w4, dense w4"]
    for what in ("decode", "prefill", "prefill of 16", "decode at 4,000", "prefill to 4,000"):
        assert ours[f"{what} over llama.cpp's best"] == pytest.approx(2)
        assert ours[f"{what} over ik_llama.cpp's best"] == pytest.approx(1)
    assert not any("over" in key for key in rows["ik_llama.cpp IQ4_K plain"])


def test_a_peer_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    from benchmarks.peers.sides import PEERS, Sides

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sides = Sides(tmp_path, install=False, peers=tuple(PEERS))
    assert list(sides.python) == ["moepack"]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" is left out: ")[0] for line in said] == list(PEERS)
    assert sides.versions().keys() == PEERS.keys()


def test_both_sides_read_the_same_text_to_each_depth():
    """Each begins once, and goes on with the same tokens; rates are of what a side was given, ratios of turns."""
    from benchmarks.contexts.__main__ import STEPS, TURNS, deepened, judged

    class Side:
        def __init__(self, seconds):
            self.seconds = seconds
            self.text = []

        def call(self, what, key, parts, afresh):
            if afresh:
                self.text.clear()
            self.text += parts
            return [self.seconds * len(part) for part in parts]

    sides = {"moepack": Side(0.1), "llama.cpp": Side(0.2)}
    rows = list(deepened(sides, "a model", "grouped", (100, 4000)))
    ours, theirs = sides.values()
    assert ours.text == theirs.text
    assert sum(map(len, ours.text)) == 4000 + (TURNS + 1) * STEPS and max(map(len, ours.text)) == 512
    assert [row["depth"] for row in rows] == [100, 4000]
    for row in rows:
        assert (row["moepack, decode"], row["llama.cpp, prompt"]) == (pytest.approx(10), pytest.approx(5))
        assert row["decode over llama.cpp's"] == row["prompt over llama.cpp's"] == pytest.approx(2)
    assert [target.met for target in judged(rows)] == [True] * 3
