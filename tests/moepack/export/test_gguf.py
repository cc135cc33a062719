"""`export --to gguf`, read by the gguf package and by transformers."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from gguf_reading import Reading, whole
from live_models import wait_for
from native_checkpoints import released, small
from support import NATIVE, ROOT, Notes, build_from, cli, ok, refused, tree

import moepack
from benchmarks.peers import environments
from moepack.export import Wanted, export
from moepack.export.gguf.tokens import tokenizer
from moepack.pack.reader import open_bundle

SMALL = NATIVE.partition("\n")[2].partition("\n")[2]  # the recipe without its versions
BF16, Q8_0, Q4_0, MXFP4, Q1_0 = 30, 8, 2, 39, 41
GREEDY = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
ids = model.tokenize(b"The history of", add_bos=False)
out = []
for token in model.generate(ids, top_k=1, temp=0.0):
    out.append(token)
    if len(out) == 8:
        break
print(*out)
"""


def packages():
    """The folder of packages that llama_cpp is in: this interpreter's, or the benchmarks' own; None without it."""
    found = importlib.util.find_spec("llama_cpp")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent.parent
    python = environments.installed(environments.LLAMA)
    place = [] if python is None else python.parent.parent.glob("lib/python*/site-packages/llama_cpp")
    return next((p.parent for p in place), None)


def llama_python():
    """An interpreter that imports llama_cpp."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return Path(sys.executable)
    return environments.installed(environments.LLAMA)


def greedy(python, file):
    """The first eight tokens that llama.cpp's model goes on with."""
    done = subprocess.run([python, "-c", GREEDY, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def same_experts(read, bundle, version):
    """Whether every expert has the bundle's values, bit for bit."""
    for layer in bundle.layers:
        gate, up, down = (read(f"blk.{layer.index}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        for e in range(layer.experts):
            own = bundle.expert(version, layer.index, e).numpy()
            if not np.array_equal(np.concatenate([gate[e], up[e]]), own["gate_up"]):
                return False
            if not np.array_equal(down[e], own["down"]):
                return False
    return True


@pytest.mark.parametrize(("version", "kind"), [("bf16", BF16), ("w8", Q8_0)])
def test_every_value_is_the_bundles(version, kind, of_zeros, tmp_path):
    """Experts, dense matrices in w8, and everything else; the dry run knows the bytes."""
    bundle = open_bundle(of_zeros("symmetric"))
    wanted = Wanted(bits=version, dense="w8")
    dry, made = (export(bundle.path, tmp_path / "out", "gguf", wanted, only) for only in (True, False))
    file = Reading(tmp_path / "out" / "model.gguf")
    assert made.bytes == dry.bytes == (tmp_path / "out" / "model.gguf").stat().st_size and made.exact
    assert same_experts(file.tensor, bundle, version)
    kinds, dense = file.names(), bundle.dense()
    assert {kinds[n] for n in kinds if "_exps" in n} == {kind}
    for d in bundle.manifest.dense:
        layer, name = d.module.split(".")[2], d.module.rpartition(".")[2]
        theirs = f"blk.{layer}.attn_{'output' if name == 'o_proj' else name[0]}.weight"
        own = bundle.dense_matrix("w8", d.module).numpy()["weight"]
        assert kinds[theirs] == Q8_0 and np.array_equal(file.tensor(theirs), own)
    assert np.array_equal(file.tensor("token_embd.weight"), dense.numpy("model.embed_tokens.weight"))
    assert np.array_equal(file.tensor("blk.1.ffn_gate_inp.weight"), dense.numpy("model.layers.1.mlp.gate.weight"))
    assert len(kinds) == 3 * 2 + len(dense) + len(bundle.manifest.dense)
    assert kinds["blk.1.ffn_gate_inp.weight"] == kinds["output_norm.weight"] == 0
    assert file.keys["general.architecture"] == "qwen3moe" and file.keys["qwen3moe.expert_used_count"] == 2


def test_mxfp4_is_passed_through(demo_model, text, tmp_path):
    small(demo_model, tmp_path / "plain")
    released(tmp_path / "plain", tmp_path / "checkpoint", "ct mxfp4")
    build_from(NATIVE, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    export(tmp_path / "bundle", tmp_path / "out", "gguf", Wanted(bits="mxfp4"))
    file = Reading(tmp_path / "out" / "model.gguf")
    assert {n: k for n, k in file.names().items() if k == MXFP4}.keys() == {n for n in file.names() if "_exps" in n}
    assert same_experts(file.tensor, open_bundle(tmp_path / "bundle"), "mxfp4")


def test_one_bit_in_groups_of_128(demo_model, text, tmp_path):
    """Signs and half of each scale, bit for bit, also by llama.cpp's own function; other groups are refused."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
    tiny_models.save_tiny("qwen3_moe", tmp_path / "checkpoint", demo_model, **wide)
    recipe = "versions: [w2, w1]\n" + SMALL.replace("32", "{w2: 64, w1: 128}")
    build_from(recipe, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    export(tmp_path / "bundle", tmp_path / "out", "gguf", Wanted(bits="1"))
    file, bundle = Reading(tmp_path / "out" / "model.gguf"), open_bundle(tmp_path / "bundle")
    assert {k for n, k in file.names().items() if "_exps" in n} == {Q1_0}
    assert same_experts(file.tensor, bundle, "w1")
    if (place := packages()) is not None:
        ggml = ctypes.CDLL(str(place / "llama_cpp" / "lib" / "libggml-base.so"))
        raw, out = file.tensors["blk.0.ffn_down_exps.weight"].data.copy(), np.empty((4, 128, 128), np.float32)
        ggml.dequantize_row_q1_0(*(ctypes.c_void_p(a.ctypes.data) for a in (raw, out)), ctypes.c_int64(out.size))
        assert np.array_equal(out[3], bundle.expert("w1", 0, 3).numpy()["down"])
    if (python := llama_python()) is not None:
        assert len(greedy(python, tmp_path / "out" / "model.gguf").split()) == 8
    build_from(recipe.replace("128", "64"), tmp_path / "checkpoint", tmp_path / "other", [text])
    answer = cli("export", tmp_path / "other", "-o", tmp_path / "no", "--to", "gguf", "--bits", "1", "-q")
    refused(answer, "w1 is not exported: Q1_0 has a scale for 128 weights, and this one for 64: build it with")


def test_it_is_split_as_llama_cpp_does(of_zeros, tmp_path):
    """Names, keys and types of keys; every value; files of at most so many bytes; and llama.cpp loads it."""
    bundle = open_bundle(of_zeros("symmetric"))
    wanted = Wanted(bits="4", dense="w8", shard="150kB")
    dry, made = (export(bundle.path, tmp_path / "out", "gguf", wanted, only) for only in (True, False))
    count = len(made.files)
    assert list(made.files) == [f"model-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)] and count > 4
    paths = [tmp_path / "out" / name for name in made.files]
    assert dry.bytes == made.bytes == sum(p.stat().st_size for p in paths)
    file = whole(paths)
    assert same_experts(file.tensor, bundle, "w4")
    assert {kind for name, kind in file.names().items() if "_exps" in name} == {Q4_0}
    export(bundle.path, tmp_path / "one", "gguf", Wanted(bits="4", dense="w8"))
    one = Reading(tmp_path / "one" / "model.gguf")
    assert (
        file.names() == one.names() and {k: v for k, v in file.keys.items() if not k.startswith("split.")} == one.keys
    )
    assert np.array_equal(file.tensor("token_embd.weight"), one.tensor("token_embd.weight"))
    assert all(p.stat().st_size < 152_000 or len(Reading(p).tensors) == 1 for p in paths[1:])
    if (python := llama_python()) is not None:
        said = [greedy(python, path) for path in (tmp_path / "one" / "model.gguf", paths[0])]
        assert said[0] == said[1] and len(said[0].split()) == 8


def test_transformers_reads_it(of_zeros, tmp_path):
    """Its logits are `static:w4`'s but for the order of sums, its tokens ours."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    bundle, out = open_bundle(of_zeros("symmetric")), tmp_path / "out"
    export(bundle.path, out, "gguf", Wanted(bits="4"))
    config = AutoConfig.from_pretrained(bundle.path)  # transformers 5.24 reads no expert's size from the file
    del config.quantization_config
    theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", config=config, dtype=torch.float32)
    ours = moepack.load(bundle.path, policy="static:w4", dtype="float32")
    ids = torch.arange(48)[None] * 83 % 4096
    with torch.no_grad():
        got, want = theirs(ids).logits, ours(ids).logits
    ours.moepack.close()
    assert (got - want).norm() / want.norm() < 1e-5
    own, read = AutoTokenizer.from_pretrained(bundle.path), AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
    words = "Hello, it's 42 worlds\n\n  def f(x): return x<|endoftext|>"
    assert own(words)["input_ids"] == read(words)["input_ids"]


def test_tokenizers_that_are_not_known(of_zeros, tmp_path):
    """Qwen's way to cut text has a name; another leaves the file without a tokenizer, and a note says so."""
    bundle = open_bundle(of_zeros("symmetric")).path
    (tmp_path / "tokenizer_config.json").write_bytes((bundle / "tokenizer_config.json").read_bytes())
    cases = [
        (QWEN, {}, "qwen2"), ("[a-z]+", {}, None), (QWEN, {"behavior": "Removed"}, None),
        (QWEN, {"invert": True}, None), (QWEN, {"use_regex": True}, None), (QWEN, {"model": {"type": "BPE"}}, None),
        (QWEN, {"normalizer": {"type": "Lowercase"}}, None), (QWEN, {"ignore_merges": True}, None),
        ("", {}, "gpt-2"), ("", {"add_prefix_space": True}, None),
    ]  # fmt: skip
    for regex, changed, name in cases:
        document = json.loads((bundle / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not regex}
        for part in (split, level, document, document["model"]):
            part |= {key: value for key, value in changed.items() if key in part}
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]} if regex else level
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        keys = tokenizer(tmp_path, 4100)
        assert (None if keys is None else keys["tokenizer.ggml.pre"]) == name
        assert keys is None or keys["tokenizer.ggml.tokens"][-1] == "[PAD4099]"


QWEN = (  # of Qwen3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_without_the_gguf_package(of_zeros, asked, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "gguf" or name.startswith("moepack.export.gguf"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    answer = asked(of_zeros("symmetric"), "--to", "gguf", "--bits", "4")
    refused(answer, "gguf is not installed: this needs it. Run: pip install 'moepack[gguf]'")


def test_what_gguf_does_not_hold(of_zeros, demo_model, text, asked, tmp_path):
    gguf = ("--to", "gguf", "--bits")
    said = "zero points are not the middle code, the only one of Q4_0: quantise with zeros: symmetric"
    refused(asked(of_zeros("integer"), *gguf, "4"), "w4 is not exported: ", said)
    refused(asked(of_zeros("symmetric"), *gguf, "3"), "w3 is not exported: no type of GGUF holds its values")
    refused(asked(of_zeros("integer"), *gguf, "bf16", "--dense", "w4"), "w4 of dense matrices is not exported")
    tiny_models.save_tiny("mixtral", tmp_path / "mixtral", demo_model)
    build_from("versions: [w4]\n" + SMALL, tmp_path / "mixtral", tmp_path / "other", [text])
    refused(asked(tmp_path / "other", *gguf, "4"), "names of mixtral's tensors are not known here")
    small(demo_model, tmp_path / "plain", attention_bias=True)
    build_from("versions: [bf16]\n" + SMALL, tmp_path / "plain", tmp_path / "biased", [text])
    refused(asked(tmp_path / "biased", *gguf, "bf16"), "llama.cpp's qwen3moe has no attention_bias")
    notes = Notes()
    export(of_zeros("symmetric"), tmp_path / "out", "gguf", Wanted(fit="4MB"), True, notes)
    assert notes.notes == [] and not (tmp_path / "out").exists()


LOSSY = """
import os, sys
sys.path.append(sys.argv.pop(1))
from moepack.cli import main
from moepack.export.files import ExportDirectory
when, real = int(sys.argv.pop(1)), ExportDirectory.finish
def finish(self, *names):
    real(self, *names)
    if len(self._whole) == when:
        os._exit(9)
ExportDirectory.finish = finish
main()
"""


def lossy(*words, when=0):
    """Run `export --lossy` where llama_cpp is found; it ends once `when` files are whole."""
    where = packages()
    assert where is not None
    done = subprocess.run(
        [sys.executable, "-c", LOSSY, where, str(when), "export", *words, "--to", "gguf", "-q"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(packages() is None, reason="llama-cpp-python is not installed")
def test_k_quants_lose_and_say_how_much(demo_model, text, tmp_path):
    """The mix is llama.cpp's; errors are those of the values that the gguf package reads; a stop changes no byte."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4}
    tiny_models.save_tiny("qwen3_moe", tmp_path / "checkpoint", demo_model, **wide)
    build_from("versions: [bf16, w4]\ndense: [w8]\n" + SMALL, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    words = (tmp_path / "bundle", "--bits", "4", "--lossy", "Q4_K_M", "--shard-size", "800kB")
    said = json.loads(ok(lossy(*words, "-o", tmp_path / "out", "--json")))
    files = [tmp_path / "out" / name for name in said["files"]]
    assert len(files) > 2 and said["bytes"] == sum(p.stat().st_size for p in files) and not said["exact"]
    assert said["lost"]["mix"] == "Q4_K_M" and 4.5 <= said["bits"] < 6 and said["bits"] == said["lost"]["bits"]
    bundle, found = open_bundle(tmp_path / "bundle"), {t.name: t for p in files for t in GGUFReader(p).tensors}
    kinds = {t.tensor_type.name for t in found.values()}
    assert {"Q4_K", "Q6_K", "F32"} <= kinds and "BF16" not in kinds
    squares = power = 0.0
    for layer in bundle.layers:
        tensor = found[f"blk.{layer.index}.ffn_down_exps.weight"]
        got = dequantize(tensor.data, tensor.tensor_type)
        for e in range(layer.experts):
            own = bundle.expert("w4", layer.index, e).numpy()["down"].astype(np.float64)
            squares, power = squares + np.square(got[e] - own).sum(), power + np.square(own).sum()
    error = said["lost"]["error"]
    assert error["ffn_down_exps"] == pytest.approx(squares / power, rel=1e-4) and 1e-4 < squares / power < 0.02
    assert set(error) == {"token_embd", "output", *(f"attn_{n}" for n in ("q", "k", "v", "output"))} | {
        f"ffn_{n}_exps" for n in ("gate", "up", "down")
    }
    python = llama_python()
    assert python is not None and len(greedy(python, files[0]).split()) == 8
    for when in (len(files), 2 * len(files)):  # all files in BF16, all that llama.cpp made
        assert lossy(*words, "-o", tmp_path / "again", when=when)[0] == 9
        assert not (tmp_path / "again").exists()
    line = ok(lossy(*words, "-o", tmp_path / "again"))
    assert tree(tmp_path / "again") == tree(tmp_path / "out")
    assert "quantised to Q4_K_M, with a relative squared error of " in line and f"{error['attn_q']:.5f} (Q4_K)" in line


FAKE = """
import ctypes, os, sys, time
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def llama_log_set(log, _):
    global say
    say = log
class llama_model_quantize_default_params(ctypes.Structure):
    _fields_ = (("ftype", ctypes.c_int), ("nthread", ctypes.c_int), ("keep_split", ctypes.c_bool))
def llama_model_quantize(source, target, how):
    say(0, TEXT, None)
    END
"""
ENDS = {
    "killed": ("b''", "os.kill(os.getpid(), 9)", "cannot be written: llama.cpp was ended by SIGKILL: is memory short?"),
    "full": (r"b'failed: basic_ios::clear: iostream error\n'", "return 1", "iostream error: is the disk full?"),
    "assertion": (r"b'GGML_ASSERT failed\n'", "os.abort()", "llama.cpp cannot quantise this model: GGML_ASSERT failed"),
}


def fake(folder, text, end):
    """Write a llama_cpp whose quantiser says something and ends."""
    (folder / "llama_cpp").mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").write_text(FAKE.replace("TEXT", text).replace("END", end))


@pytest.mark.parametrize("how", ENDS)
def test_when_llama_cpp_ends(how, of_zeros, asked, tmp_path, monkeypatch):
    """Files in BF16 are kept where a second run may go well, and not where llama.cpp refuses."""
    text, end, message = ENDS[how]
    fake(tmp_path / "lib", text, end)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    words = ("--to", "gguf", "--bits", "4", "--shard-size", "300kB", "--lossy", "Q4_K_M")
    code, _, said = asked(of_zeros("symmetric"), *words)
    kept = [p.name for p in tmp_path.glob(".out.exporting/bf16/*")]
    assert code and message in said
    assert ("kept: run the same command again to go on" in said) == (how != "assertion") == (len(kept) > 1)


def test_llama_cpp_ends_with_its_export(tmp_path):
    """A killed export leaves nothing behind that writes into its directory."""
    fake(tmp_path / "lib", "b''", "open(target, 'w').write(str(os.getpid())); time.sleep(60)")
    code = (
        "import sys; from pathlib import Path; from moepack.export.gguf.llama import quantise; "
        "from moepack.shared.progress import Reporter; sys.path.insert(0, sys.argv[1]); p = Path(sys.argv[2]); "
        "quantise(p, p, 'Q4_K_M', False, Reporter())"
    )
    pid = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "lib", pid], env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as export_:
        wait_for(lambda: pid.exists() and pid.read_text() != "")
        export_.kill()
    state = Path("/proc", pid.read_text(), "stat")
    wait_for(lambda: not state.exists() or ") Z " in state.read_text())


def test_lossy_is_named_and_refused(of_zeros, asked, tmp_path, monkeypatch):
    def lossily(*words):
        return asked(of_zeros("symmetric"), "--lossy", *words)

    known = "--lossy IQ1_S: there are Q2_K, Q3_K_S, Q3_K_M, Q3_K_L, Q4_K_S, Q4_K_M, Q5_K_S, Q5_K_M, Q6_K"
    refused(lossily("Q4_K_M", "--to", "gptq", "--bits", "4"), "--to gptq --lossy Q4_K_M: only --to gguf has")
    refused(lossily("IQ1_S", "--to", "gguf", "--bits", "4"), known)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(lossily("Q4_K_M", "--to", "gguf", "--bits", "4"), "llama.cpp quantises, and is not here. Run: pip install ")
    monkeypatch.setattr("moepack.export.gguf.lossy.check_llama", lambda: None)
    refused(lossily("Q4_K_M", "--to", "gguf", "--bits", "4", "--dry-run"), "--dry-run and --lossy: ")
    refused(lossily("Q4_K_M", "--to", "gguf", "--fit", "4MB"), "--fit and --lossy: ")
    assert list(tmp_path.iterdir()) == []
