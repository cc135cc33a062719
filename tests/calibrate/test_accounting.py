"""Every tensor of a checkpoint is served, equal to the one it is tied to, or left out by a rule; others are refused.

The fault is silence: a bundle that lacks, or has twice, what its checkpoint holds. Everything that can be said from
headers is said before weights are read.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_models
import torch
from gguf_reading import Reading
from hostile_edits import Victim
from safetensors.torch import load_file, save, save_file
from support import RTN, build_from, edit_config, edit_tensors
from transformers import AutoModelForCausalLM

import moepack
from benchmarks import families
from moepack.calibrate import checkpoint
from moepack.calibrate.accounting import IGNORED, MTP, RULES, ZERO
from moepack.calibrate.checkpoint import described, make_config, open_checkpoint, read_config
from moepack.calibrate.stream import StreamedModel
from moepack.export.choice import Wanted
from moepack.export.run import export
from moepack.pack.errors import BundleError, InputError
from moepack.reports.verify import verify

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
ATTENTION, EXPERTS = "model.layers.1.self_attn", "model.layers.1.mlp.experts"
QUERY = f"{ATTENTION}.q_proj.weight"
ROTARY, MASK, SCALE = (why for why, *_ in RULES)


def expert(number, matrix="down"):
    return f"{EXPERTS}.{number}.{matrix}_proj.weight"


def planted(model, path, change, config=None):
    """A copy of a checkpoint with its tensors and its configuration changed."""
    shutil.copytree(model, path)
    edit_tensors(path, change)
    edit_config(path, **(config or {}))
    return path


class Fate(NamedTuple):
    """What becomes of a tensor."""

    kind: str  # "stored", "tied" or "left out"
    why: str  # the parameter, or the reason


def account(path):
    """The fate of every tensor of the files, none of which is encoded."""
    stream = StreamedModel(open_checkpoint(path))
    ledger = stream.ledger
    fates = {key: Fate("stored", target) for target, keys in ledger.targets.items() for key in keys}
    fates |= {key: Fate("tied", target) for key, target in ledger.ties.items()}
    fates |= {key: Fate("left out", why) for key, why in ledger.left_out.items()}
    assert fates.keys() == stream.checkpoint.file_of.keys()
    return fates


def more(**tensors):
    return lambda t: t.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def cast(name, dtype):
    return lambda t: t.update({name: t[name].to(dtype)})


def stacked(tensors):
    tensors[f"{EXPERTS}.down_proj"] = torch.stack([tensors[expert(e)] for e in range(16)])


def an_expert_more(tensors):
    tensors |= {expert(16, matrix): tensors[expert(0, matrix)].clone() for matrix in ("gate", "up", "down")}


def another_number(tensors):
    """Expert 3 becomes expert 16: there are as many as before."""
    for matrix in ("gate", "up", "down"):
        tensors[expert(16, matrix)] = tensors.pop(expert(3, matrix))


def a_layer_more(tensors, *beside):
    last = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    tensors |= last | {f"model.layers.2.{name}": torch.ones(1) for name in beside}


def numbered(digits, tensors):
    tensors[expert(9).replace(".9.", f".{'9' * digits}.")] = tensors.pop(expert(9))


def in_two_files(tensors, path, places, also=""):
    """Write tensors into two files by an index; by default into the first. `also` is in both."""
    (path / "model.safetensors").unlink()
    names = [f"model-{i}.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        some = {n: t for n, t in tensors.items() if places.get(n, 0) == i or n == also}
        save_file(some or {"model.rotary_emb.inv_freq": torch.ones(1)}, path / name, {"format": "pt"})
    index = {n: names[places.get(n, 0)] for n in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


FP8, UNTIED = torch.float8_e4m3fn, {"tie_word_embeddings": False}
REFUSED = {
    "a tensor of no rule": (more(odd=torch.ones(1)), "odd has no place in the model"),
    "a tower": (more(visual__patch_embed__weight=torch.ones(8, 8)), r"visual\.patch_embed\.weight has no place"),
    "a scale without codes": (lambda t: t.update({f"{QUERY}_scale_inv": torch.ones(1, 1)}), "q_proj.weight_scale_inv"),
    "codes without a scale": (cast(QUERY, FP8), "q_proj.weight is F8_E4M3"),
    "an expert's codes without scales": (cast(expert(2), FP8), r"experts\.2\.down_proj.weight is F8_E4M3"),
    "wider than is read": (cast(QUERY, torch.float64), "q_proj.weight is F64"),
    "another shape": (lambda t: t.update({QUERY: t[QUERY][:8].clone()}), r"q_proj.weight has shape \(8, "),
    "an expert of another shape": (
        lambda t: t.update({expert(3, "up"): t[expert(3, "up")][:, :32].clone()}),
        r"experts\.3\.up_proj\.weight is \[\d+, 32\], those beside it, of .*gate_up_proj, are \[",
    ),
    "an expert more, in the last layer": (an_expert_more, r"experts\.16\.down_proj.weight and 16 others"),
    "an expert less": (lambda t: t.pop(expert(15, "up")), r"experts\.15\.up_proj\.weight is missing"),
    "as many experts, with a gap": (another_number, r"experts\.3\.\w+_proj\.weight is missing"),
    "fused and separate": (stacked, f"{EXPERTS}.down_proj and .* are both {EXPERTS}.down_proj"),
    "a layer more": (a_layer_more, r"model\.layers\.2\..* beyond the 2 of config.json"),
    **{
        f"a number of {digits} digits": (partial(numbered, digits), r"experts\.9+\.down_proj")
        for digits in (12, 5000)  # nothing is counted up to it
    },
    "neither head nor table": (lambda t: t.pop(TABLE), f"nothing for {TABLE}"),
    "a head that is not tied": (lambda t: None, f"nothing for {HEAD}", UNTIED),
    "a bias named as a mask": (more(model__layers__1__self_attn__bias=torch.ones(128)), r"self_attn\.bias has no"),
    "a bias of a matrix without one": (
        more(model__layers__1__self_attn__q_proj__bias=torch.ones(8)),
        "q_proj.bias has",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case, short_model, tmp_path):
    """From headers alone: no part is loaded."""
    change, words, *config = REFUSED[case]
    path = planted(short_model, tmp_path / "planted", change, *config)
    with pytest.raises(InputError, match=words) as refused:
        StreamedModel(open_checkpoint(path))
    assert "\n" not in str(refused.value)


def test_a_layer_of_another_kind_is_no_layer_for_multi_token_prediction(demo_model, tmp_path):
    """Qwen3-Next's fourth layer has tensors that the first three lack; DeepSeek-V3's config announces an MTP layer."""
    three = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    for family, config in (("qwen3_next", three), ("deepseek_v3", {"num_hidden_layers": 2})):
        whole = tiny_models.save_tiny(family, tmp_path / family, demo_model)
        path = planted(whole, tmp_path / f"short {family}", lambda t: None, config)
        with pytest.raises(InputError, match="is of a layer beyond the"):
            StreamedModel(open_checkpoint(path))


def test_a_decoder_layer_whose_number_a_class_ignores(demo_model, tmp_path):
    """GLM-4.5's class ignores `model.layers.46.*`, MTP in one released model and a decoder layer in another."""
    path = tmp_path / "checkpoint"
    families.save(families.small("glm4_moe"), path, demo_model)
    own = next(n for n in load_file(path / "model.safetensors") if n.endswith("layers.1.input_layernorm.weight"))
    lost = own.replace("layers.1.", "layers.46.")
    edit_tensors(path, lambda t: t.update({lost: t[own].clone()}))
    with pytest.raises(InputError, match=r"layers\.46\.input_layernorm\.weight is of a layer beyond the \d+ of config"):
        account(path)
    beside = lost.replace("input_layernorm", "eh_proj")
    edit_tensors(path, lambda t: t.update({beside: torch.ones(1)}))
    assert account(path)[lost] == account(path)[beside] == Fate("left out", MTP)


def test_what_lies_in_two_places(short_model, tmp_path):
    """A tensor in two files, or not where the index says; two checkpoints, or an adapter, in one directory."""
    whole = load_file(short_model / "model.safetensors")
    first = Path(shutil.copytree(short_model, tmp_path / "two"))
    in_two_files(whole, first, {TABLE: 1}, also=TABLE)
    with pytest.raises(InputError, match=rf"{TABLE} is in model-\d\.safetensors and in model-\d"):
        open_checkpoint(first)
    second = Path(shutil.copytree(short_model, tmp_path / "elsewhere"))
    in_two_files(whole, second, {QUERY: 1})
    save_file({"model.rotary_emb.inv_freq": torch.ones(1)}, second / "model-2.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"model-2.safetensors: lacks tensor {QUERY}"):
        open_checkpoint(second)
    in_two_files(whole, third := Path(shutil.copytree(short_model, tmp_path / "third")), {QUERY: 1})
    assert len(account(third)) == len(whole)
    save_file(whole, third / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.safetensors, and model\.safetensors\.index\.json of other"):
        open_checkpoint(third)
    fourth = Path(shutil.copytree(short_model, tmp_path / "fourth"))
    (fourth / "optimizer.pt").write_bytes(b"no tensors of the model")
    assert len(account(fourth)) == len(whole)
    (fourth / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"adapter_config\.json: merge"):
        open_checkpoint(fourth)


LEFT_OUT = {
    "model.rotary_emb.inv_freq": ROTARY,
    "model.layers.0.self_attn.rotary_emb.cos_cached": ROTARY,
    "model.layers.1.self_attn.masked_bias": MASK,
    "model.layers.1.self_attn.bias": MASK,
    "model.layers.1.self_attn.k_scale": SCALE,
    "model.layers.1.self_attn.v_proj.output_scale": SCALE,
    "model.layers.1.mlp.experts.3.up_proj.input_scale": SCALE,
    "model.layers.1.self_attn.q_proj.bias": ZERO,
    "model.layers.2.eh_proj.weight": MTP,
    "mtp.norm.weight": MTP,
}


def test_left_out_by_a_rule_that_says_why(short_model, tmp_path):
    """And every other tensor by the parameter that it becomes a part of."""

    def change(tensors):
        a_layer_more(tensors)
        tensors |= {name: torch.zeros(1) for name in LEFT_OUT}
        tensors |= {f"{ATTENTION}.bias": torch.ones(1, 1, 8, 8).tril(), f"{ATTENTION}.masked_bias": torch.tensor(-1e9)}

    path = planted(short_model, tmp_path / "planted", change)
    fates = account(path)
    assert {name: fates[name] for name in LEFT_OUT} == {n: Fate("left out", why) for n, why in LEFT_OUT.items()}
    assert all((fate.why == MTP) == ("layers.2." in n or "mtp" in n) for n, fate in fates.items())
    assert fates[expert(3, "up")] == Fate("stored", f"{EXPERTS}.gate_up_proj")
    assert fates[QUERY] == Fate("stored", QUERY)


def test_names_of_other_families(demo_model, tmp_path):
    """Renamed, by transformers' conversions; a text model's tower, which its class ignores; another tower."""
    saved = tiny_models.save_tiny("mixtral", tmp_path / "mixtral", demo_model)
    first = "model.layers.0.block_sparse_moe"
    own = {f"{first}.gate.weight": "mlp.gate.weight", f"{first}.experts.3.w3.weight": "mlp.experts.gate_up_proj"}
    fates = account(saved)
    assert {n: fates[n] for n in own} == {n: Fate("stored", f"model.layers.0.{p}") for n, p in own.items()}
    path = tmp_path / "text"
    families.save(families.small("qwen3_5_moe_text"), path, demo_model)
    tower = "model.visual.blocks.0.norm.weight"
    edit_tensors(path, lambda t: t.update({tower: torch.ones(1)}))
    assert account(path)[tower] == Fate("left out", IGNORED)
    edit_tensors(path, lambda t: t.update({"model.audio.norm.weight": torch.ones(1)}))
    with pytest.raises(InputError, match=r"model\.audio\.norm\.weight has no place"):
        account(path)


def test_the_wider_dtype_of_what_makes_a_parameter_is_kept(demo_model, tmp_path):
    """Kimi-K2.5's tower has one tensor for q, k and v: in FP32, all three are read in FP32, not the first alone."""
    path = tmp_path / "checkpoint"
    families.save(families.small("kimi_k25"), path, demo_model)
    name = next(n for n in load_file(path / "model.safetensors") if n.endswith("wqkv.weight"))
    exact = torch.linspace(1, 2, load_file(path / "model.safetensors")[name].numel())
    edit_tensors(path, lambda t: t.update({name: exact.reshape(t[name].shape)}))
    stream = StreamedModel(open_checkpoint(path))
    got = {n: t for n, t in stream.load(None).items() if n.endswith("_proj.weight") and t.dtype == torch.float32}
    assert len(got) == 3 and torch.equal(torch.cat([t.flatten() for t in got.values()]).sort().values, exact)


@pytest.mark.parametrize("there", [(HEAD,), (HEAD, TABLE), (TABLE,)], ids=str)
def test_a_tied_head_is_read_wherever_it_is(there, short_model, tmp_path):
    def change(tensors):
        table = tensors.pop(TABLE)
        tensors |= {name: table.clone() for name in there}

    path = planted(short_model, tmp_path / "planted", change)
    stream, fates = StreamedModel(open_checkpoint(path)), account(path)
    table = load_file(short_model / "model.safetensors")[TABLE]
    assert not stream.untied and torch.equal(stream.load(None)[TABLE], table)
    assert HEAD not in stream.names(None) and fates.get(TABLE, fates.get(HEAD)) == Fate("stored", TABLE)
    assert len(there) < 2 or fates[HEAD] == Fate("tied", HEAD)


def test_without_the_files_config_json_is_believed(short_model, tmp_path):
    """A dry run by headers on the Hub, and an export: there is nothing to compare the head with."""
    path = planted(short_model, tmp_path / "planted", lambda t: t.update({HEAD: t[TABLE] + 1}))
    headers = open_checkpoint(path).headers
    (path / "model.safetensors").unlink()
    known = described(path, "far", make_config(path, read_config(path)), None, headers, here=False)
    assert not StreamedModel(known).untied


def test_ties_that_a_part_of_a_configuration_says(demo_model, tmp_path):
    """The whole model's entry counts, its text's does not; a head of its own unties all levels of the bundle's."""
    path = tmp_path / "checkpoint"
    model = families.save(families.small("qwen3_vl_moe"), path, demo_model)
    own = json.loads((path / "config.json").read_text())["text_config"]
    table = next(n for n in load_file(path / "model.safetensors") if n.endswith("embed_tokens.weight"))
    for whole, text in ((True, True), (True, False), (False, True)):
        edit_config(path, tie_word_embeddings=whole, text_config={**own, "tie_word_embeddings": text})
        edit_tensors(path, lambda t: t.update({HEAD: t[table].flip(0).contiguous()}))
        stream = StreamedModel(open_checkpoint(path))
        plain = type(model).from_pretrained(path)
        with torch.no_grad():
            separate = not torch.equal(plain.get_input_embeddings().weight, plain.get_output_embeddings().weight)
        assert separate and stream.untied == whole
        assert HEAD in stream.names(None) and not stream.checkpoint.config.tie_word_embeddings


def test_another_head_than_the_tied_one_is_served(short_model, text, tmp_path):
    """As by transformers: logits, dense versions of the head, `verify`; a bundle that says it is tied is found."""

    def change(tensors):
        tensors[HEAD] = tensors[TABLE].flip(0).contiguous()

    path = planted(short_model, tmp_path / "planted", change)
    build_from(f"versions: [bf16, w2]\ndense: [w8]\n{RTN}", path, tmp_path / "bundle", [text])
    ids = torch.arange(5, 40)[None]
    with torch.inference_mode():
        right = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(ids).logits
        for dense in (None, "w8"):
            ours = moepack.load(tmp_path / "bundle", policy="static:bf16", dense=dense)
            assert (ours(ids).logits - right).abs().max() <= 0.02 * right.abs().max()
            ours.moepack.close()
    assert verify(tmp_path / "bundle", path) == []
    found = verify(tmp_path / "bundle", short_model)
    assert any(HEAD in problem.message for problem in found), found
    build_from(RTN, short_model, tmp_path / "tied", [text])
    said = "tie_word_embeddings is True, the checkpoint's False: its config.json says True, but its"
    assert any(problem.message.startswith(said) for problem in verify(tmp_path / "tied", path))


def test_exports_have_a_head_of_its_own(demo_model, text, tmp_path):
    """Every target writes the checkpoint's, and a config.json that does not tie it; the released form, every tensor."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32, "tie_word_embeddings": True}
    whole = tiny_models.save_tiny("qwen3_moe", tmp_path / "plain", demo_model, **wide)
    path = planted(whole, tmp_path / "c", lambda t: t.update({HEAD: t[TABLE].flip(0).contiguous()}))
    head = load_file(path / "model.safetensors")[HEAD]
    bundle = tmp_path / "bundle"
    build_from(f"versions: [bf16, w4]\n{RTN}", path, bundle, [text])
    wanted = {"released": None, "checkpoint": "bf16", "gptq": "4", "compressed-tensors": "4"}
    for name, bits in wanted.items():
        target = "checkpoint" if name == "released" else name
        export(bundle, tmp_path / name, target, None if bits is None else Wanted(bits=bits))
        assert torch.equal(load_file(tmp_path / name / "model.safetensors")[HEAD], head)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is False
    assert load_file(tmp_path / "released" / "model.safetensors").keys() == account(path).keys()
    export(bundle, tmp_path / "gguf", "gguf", Wanted(bits="bf16"))
    made = Reading(next((tmp_path / "gguf").glob("*.gguf")))
    assert torch.equal(torch.from_numpy(made.tensor("output.weight")), head.float())


def test_a_copy_of_the_table_in_another_file(short_model, text, tmp_path, monkeypatch):
    """A build reads it once, and the table. An export must not look for the checkpoint's files in the bundle."""
    read = []
    plain = checkpoint._Stored.read

    def counted(self):
        read.append(self.end - self.begin)
        return plain(self)

    monkeypatch.setattr(checkpoint._Stored, "read", counted)
    path = Path(shutil.copytree(short_model, tmp_path / "checkpoint"))
    whole = load_file(path / "model.safetensors")
    in_two_files(whole | {HEAD: whole[TABLE].clone()}, path, {HEAD: 1})
    build_from(f"versions: [bf16, w2]\n{RTN}", path, tmp_path / "bundle", [text])
    assert read == [whole[TABLE].nbytes] * 2 and verify(tmp_path / "bundle", path) == []
    export(tmp_path / "bundle", tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / "model-2.safetensors")[HEAD], whole[TABLE])


def test_a_bundle_that_lacks_a_tensor_is_not_filled_with_random_numbers(bundle, demo_model, tmp_path):
    """transformers would only warn: of a tensor that is not there, and of a head that config.json no longer ties."""
    victim = Victim(bundle, tmp_path)
    kept = load_file(bundle / "model.safetensors")
    del kept[QUERY]
    victim.rewrite("model.safetensors", save(kept, {"format": "pt"}))
    victim.sign(lambda manifest: manifest["model"].update(architecture="MixtralForCausalLM"))  # and its config names it
    for name in (QUERY, HEAD):
        with pytest.raises(BundleError, match=f"has no tensor {name} of its model"):
            moepack.load(victim.path, policy="static:bf16")
        victim.restore()
        document = json.loads((bundle / "config.json").read_text()) | UNTIED | {"rms_norm_eps": 0.5}
        document |= {f"rope_parameters.{name}": value for name, value in document.pop("rope_parameters").items()}
        victim.rewrite("config.json", json.dumps(document).encode())
    found = " ".join(map(str, verify(victim.path, demo_model)))
    assert f"{HEAD} is a tensor of its own in the bundle alone" in found
    assert "rms_norm_eps is 0.5, the checkpoint's 1e-06" in found
    assert "rope_parameters.rope_theta is 10000.0, the checkpoint's None" in found  # a setting of that whole name


def test_what_a_bundle_has_more_than_its_checkpoint_is_found(bundle, demo_model, tmp_path):
    """A head beside config.json's tie is served, and other files than tensors make what a model reads and says."""
    victim = Victim(bundle, tmp_path)
    more = load_file(bundle / "model.safetensors")
    victim.rewrite("model.safetensors", save(more | {HEAD: more[TABLE].flip(0).contiguous()}, {"format": "pt"}))
    settings = json.loads((bundle / "tokenizer_config.json").read_text())
    victim.rewrite("tokenizer_config.json", json.dumps({**settings, "eos_token": "the"}).encode())
    found = " ".join(map(str, verify(victim.path, demo_model)))
    assert f"has a tensor {HEAD}, which the checkpoint's model lacks" in found
    assert "tokenizer_config.json: differs from the checkpoint's" in found


def test_biases_of_a_router_stay_in_float32(demo_model, text, tmp_path):
    """`e_score_correction_bias` is a buffer in FP32: with the bits of BF16 other experts are chosen.

    MiniMax-M2's class, unlike others, does not say so to transformers.
    """
    path = tmp_path / "checkpoint"
    families.save(families.small("minimax_m2"), path, demo_model)
    name = next(n for n in load_file(path / "model.safetensors") if n.endswith("e_score_correction_bias"))
    exact = torch.linspace(0.1, 0.2, 8) + 1e-6
    edit_tensors(path, lambda t: t.update({name: exact[: len(t[name])]}))
    place = account(path)[name].why
    build_from(f"versions: [bf16, w2]\n{RTN}", path, tmp_path / "bundle", [text])
    model = moepack.load(tmp_path / "bundle", policy="static:bf16")
    assert model.dtype == torch.bfloat16
    served = model.get_parameter_or_buffer(place)
    assert served.dtype == torch.float32 and torch.equal(served, exact[: len(served)])
    model.moepack.close()
