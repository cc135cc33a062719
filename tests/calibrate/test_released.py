"""Released formats: read code for code and scale for scale, decoded, and written back byte for byte."""

import re
from copy import deepcopy

import pytest
import tiny_models
import torch
from native_checkpoints import released
from released import decoded, found, round_trip, same
from released_kinds import KINDS, weight
from safetensors.torch import load_file, save_file
from support import edit_config, edit_tensors

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import InputError

MODULE = "m.experts.0.up_proj"


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_its_codes_and_scales(kind):
    """Its value is that computed apart, its tensors are restored, and nothing of it is left unnamed.

    Of one row, rows that end within a word or a block, one group, and where a format allows it less than one.
    """
    own = KINDS[kind]
    least = 8 if own.quantization["quant_method"] in ("fp8", "gptq", "awq") and own.version[:2] != "mx" else 32
    for rows, cols in ((48, 128), (1, 32), (8, 32), (20, 96), (33, least), (1, least)):
        rows = -(-rows // 8) * 8 if kind == "awq" else rows  # its words hold 8 rows
        tensors, value = weight(kind, rows, cols)
        (encoded,) = found(own.quantization, tensors, **own.config).values()
        assert (encoded.version, encoded.group, encoded.shape) == (own.version, own.group, (rows, cols))
        assert set(encoded.leftovers) == {f"{MODULE}.{n}" for n in own.leftovers}
        assert set(encoded.names) == set(tensors)
        codes = encoded.codes(tensors.__getitem__)
        assert codes.dtype == torch.uint8 and codes.shape == (rows, cols) and int(codes.max()) < 1 << encoded.bits
        scale = encoded.scale(tensors.__getitem__)
        wanted = torch.uint16 if "int" in own.version else torch.float32 if own.version == "fp8" else torch.uint8
        assert scale.dtype == wanted and scale.shape == (rows, -(-cols // own.group) if own.group else 1)
        got = decoded(own.quantization, tensors, **own.config)
        assert list(got) == [f"{MODULE}.weight"] and same(got[f"{MODULE}.weight"], value), (rows, cols)


def test_a_block_larger_than_the_matrix():
    tensors, value = weight("fp8 tensor", 20, 24)
    scale = tensors[f"{MODULE}.weight_scale_inv"].reshape(1, 1)
    tensors = {f"{MODULE}.weight": tensors[f"{MODULE}.weight"], f"{MODULE}.weight_scale_inv": scale}
    quantization = {"quant_method": "fp8", "weight_block_size": [1 << 40, 1 << 40]}
    assert same(decoded(quantization, tensors)[f"{MODULE}.weight"], value)


@pytest.mark.parametrize(("kind", "name"), [("int4 zeros", "weight_zero_point"), ("gptq", "qzeros")])
def test_bits_behind_the_last_zero_point_are_refused(kind, name):
    """They would be lost in an export: 20 rows take two and a half words."""
    tensors, _ = weight(kind, 20, 128)
    words = tensors[f"{MODULE}.{name}"].clone()
    words.view(-1)[-1] |= 1 << 30
    with pytest.raises(InputError, match=f"{MODULE}.{name} has bits behind its last code or zero point"):
        decoded(KINDS[kind].quantization, tensors | {f"{MODULE}.{name}": words})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    small = {"num_experts": 4, "moe_intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    return tiny_models.save_tiny("qwen3_moe", path, **small)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_read_and_written_back(kind, plain, tmp_path):
    path = tmp_path / "c"
    values = released(plain, path, kind, None if kind == "deepseek mxfp4" else KINDS[kind].make)
    stream = round_trip(path)
    assert not stream.unused  # no scale is taken for a tensor without a place
    loaded = stream.load(0)
    for name in ("q_proj", "o_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        assert same(loaded[key], values[key].bfloat16())
    experts = "model.layers.0.mlp.experts"
    want = torch.stack([values[f"{experts}.{e}.up_proj.weight"].bfloat16() for e in range(4)])
    assert same(loaded[f"{experts}.gate_up_proj"][:, 64:], want)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.split()[0] not in ("gptq", "awq", "deepseek")])
def test_experts_in_one_tensor_are_read_some_at_a_time(kind, tmp_path):
    tiny_models.save_tiny("granitemoe", tmp_path, num_local_experts=4, intermediate_size=64, num_hidden_layers=1)
    own, stored = KINDS[kind], {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.ndim == 3:
            parts = [weight(kind, *tensor.shape[1:], name.removesuffix(".weight"), e)[0] for e in range(4)]
            stored |= {n: torch.stack([p[n] for p in parts]) for n in parts[0]}
        else:
            stored[name] = tensor
    edit_config(tmp_path, **own.config, quantization_config=own.quantization)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert round_trip(tmp_path).native.released


def test_groups_of_modules_have_their_own_format(plain, tmp_path):
    """Experts in INT4 and attention in FP8, as Kimi's; the router, in `ignore`, stays as it is."""
    path = tmp_path / "c"
    released(plain, path, "int4", KINDS["ct fp8 rows"].make)
    experts = deepcopy(KINDS["int4"].quantization["config_groups"]["group_0"])
    attention = deepcopy(KINDS["ct fp8 rows"].quantization["config_groups"]["group_0"])
    experts["targets"], attention["targets"] = [r"re:.*mlp\.experts\.\d+\..*"], ["re:.*self_attn.*"]
    groups = {"config_groups": {"group_0": attention, "group_1": experts}, "ignore": ["re:.*gate$", "lm_head"]}
    quantization = {**KINDS["int4"].quantization, "format": "mixed-precision", **groups}
    edit_config(path, quantization_config=quantization)
    stream = round_trip(path)
    assert {e.version for n, e in stream.checkpoint.encoded.items() if "experts" in n} == {"int4"}
    assert {e.version for n, e in stream.checkpoint.encoded.items() if "self_attn" in n} == {"fp8"}
    assert stream.native_dense("model.layers.0.mlp.gate") is None
    attention["targets"] = ["re:.*nothing"]
    edit_config(path, quantization_config=quantization)
    with pytest.raises(InputError, match=r"self_attn.*no target of config.json's config_groups names it"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", [k for k, own in KINDS.items() if own.quantization["quant_method"][0] == "c"])
def test_compressed_tensors_decodes_the_same(kind):
    """Except that it rounds products with FP16 scales to FP16 first."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    own = KINDS[kind]
    tensors, value = weight(kind, 48, 128, "m")
    scheme = QuantizationScheme(**own.quantization["config_groups"]["group_0"])
    library = BaseCompressor.get_value_from_registry(own.quantization["format"])
    got = library.decompress({n.removeprefix("m."): x for n, x in tensors.items()}, scheme)["weight"]
    if own.version.endswith("fp16"):
        assert torch.allclose(got.float(), value.float(), rtol=2**-7, atol=0)  # half a step of BF16, and of FP16
    else:
        assert same(got.to(torch.bfloat16), value)


def edit(name, change):
    def edited(tensors, quantization):
        tensors[f"{MODULE}.{name}"] = change(tensors[f"{MODULE}.{name}"].clone())

    return edited


def put(name, at, value):
    """Set the bits of an element."""

    def change(tensor):
        tensor.view(torch.uint8).view(-1)[at] = value
        return tensor

    return edit(name, change)


def say(**more):
    return lambda tensors, quantization: quantization.update(more)


def weights(**more):
    return lambda tensors, quantization: quantization["config_groups"]["group_0"]["weights"].update(more)


def add(name, tensor):
    return lambda tensors, quantization: tensors.update({f"{MODULE}.{name}": tensor})


BROKEN = {
    "two scales": ("fp8 tensor", add("weight_scale", torch.ones(())), "has both .*weight_scale_inv and"),
    "a block of nothing": ("fp8 blocks", say(weight_block_size=[0, 32]), r"weight_block_size \[0, 32\]"),
    "a code that is NaN": ("fp8 blocks", put("weight", 5, 0x7F), r"weight\[\d+, \d+\] is a code that is NaN"),
    "an infinite scale": (
        "fp8 rows",
        edit("weight_scale", lambda t: t.fill_(torch.inf)),
        r"weight_scale\[0, 0\] is a scale that is NaN or inf",
    ),
    "a divisor of 0": (
        "ct nvfp4",
        edit("weight_global_scale", torch.zeros_like),
        r"weight_global_scale\[0, 0\] is NaN, inf",
    ),
    "an E8M0 of 2^100": ("ct mxfp4", put("weight_scale", 3, 227), r"weight_scale has a scale of 2\^100 or more"),
    "no experts in fp4": ("fp8 blocks", say(expert_dtype="fp4"), "expert_dtype fp4, but no tensor of an expert"),
    "nothing quantised": ("fp8 blocks", lambda t, q: t.clear(), "no tensor is stored so"),
    "a fused weight also plain": ("int4", add("weight", torch.ones(2, 2)), "weight is stored twice"),
    "a vector of codes": ("fp8 tensor", edit("weight", lambda t: t[0]), r"\[128\]; codes have 2"),
    "no group": ("int4", weights(group_size=0), "says group_size 0"),
    "other groups": ("int4", weights(group_size=64), "needs? I32 of 32 words"),
    "5 bits": ("int4", weights(num_bits=5), "says num_bits 5: moepack reads 4, 8"),
    "zero points of symmetric codes": ("int4 zeros", weights(symmetric=True), "zero_point is stored, but .* symmetric"),
    "no order": ("int4", weights(actorder="group"), "has no .*weight_g_idx, which actorder group needs"),
    "an order": ("int4", add("weight_g_idx", torch.arange(128).flip(0) // 32), "weight_g_idx orders columns"),
    "an unknown format": ("int4", lambda t, q: q["config_groups"]["group_0"].update(format="marlin-24"), "'marlin-24'"),
    "a sparse one": ("int4", say(sparsity_config={"format": "sparse-24-bitmask"}), "no sparse weights"),
    "a rotated one": ("int4", say(transform_config={"config_groups": {}}), "no rotated weights"),
    "no config groups": ("int4", say(config_groups=None), "has no config_groups"),
    "a bad target": (
        "int4",
        lambda t, q: q["config_groups"]["group_0"].update(targets=["re:("]),
        "not a valid regular expression",
    ),
    "not compressed": ("int4", say(quantization_status="frozen"), "says quantization_status 'frozen'"),
    "integers that are floats": ("int8 signed", edit("weight", lambda t: t.to(torch.float8_e4m3fn)), "8-bit integers"),
    "a block structure of one number": ("ct fp8 blocks", weights(block_structure=[32]), r"block_structure \[32\]"),
    "NVFP4 in groups of 32": ("ct nvfp4", weights(group_size=32), "says group_size 32: moepack reads 16"),
    "ModelOpt's other algorithm": ("modelopt nvfp4", say(quant_algo="MXFP8"), "stored as nvfp4, but .* MXFP8"),
    "ModelOpt's unknown algorithm": ("modelopt nvfp4", say(quant_algo="NVFP4_AWQ"), "says quant_algo 'NVFP4_AWQ'"),
    "ModelOpt's scaled inputs": ("modelopt nvfp4", add("pre_quant_scale", torch.ones(128)), "pre_quant_scale scales"),
    "GPTQ in an unknown format": ("gptq", say(checkpoint_format="marlin"), "says checkpoint_format 'marlin'"),
    "GPTQ's order": ("gptq", put("g_idx", 0, 2), "g_idx orders columns by activation"),
    "GPTQ's zero 16": ("gptq", put("qzeros", 0, 0xFF), "qzeros has a zero point of 16, beyond 4 bits"),
    "GPTQ with other groups": ("gptq", say(group_size=64), r"scales is F16 \[4, 48\]"),
    "AWQ of gemv": ("awq", say(version="gemv"), "says version 'gemv'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_understood_is_refused(case):
    kind, change, word = BROKEN[case]
    own = KINDS[kind]
    quantization = deepcopy(own.quantization)
    tensors, _ = weight(kind, 48, 128)
    change(tensors, quantization)
    with pytest.raises(InputError, match=word) as error:
        decoded(quantization, tensors, **own.config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_missing_or_wrong_are_refused_by_name(kind):
    """Of every format: scales that are not there, are too few, of another dtype, or no numbers; and zero points."""
    own = KINDS[kind]
    tensors, _ = weight(kind, 48, 128)
    (encoded,) = found(own.quantization, tensors, **own.config).values()
    parts = [p for p in (encoded.scale_in, encoded.outer_in, encoded.zeros_in) if p is not None]
    for name, scale in ((p.name, tensors[p.name]) for p in parts):
        nothing = torch.full((scale.nbytes,), 0xFF, dtype=torch.uint8).view(scale.dtype).reshape(scale.shape)
        bad = {
            rf"{MODULE}\.\w+ has no {MODULE}\.\w+: the checkpoint is not complete|no tensor is stored so": None,
            rf"{name} is F64 .* needs ": torch.zeros(scale.shape, dtype=torch.float64),
            rf"{MODULE}\.\w+ is \w+ \[.* needs? ": nothing.new_empty(3, 5),
        }
        if scale.dtype != torch.int32:
            bad[rf"{name}\[\d+, \d+\] is (a scale that is NaN or infinite|NaN, infinite or no divisor)"] = nothing
        for words, other in bad.items():
            broken = {n: x for n, x in tensors.items() if n != name} | ({} if other is None else {name: other})
            with pytest.raises(InputError, match=words) as error:
                decoded(own.quantization, broken, **own.config)
            assert "\n" not in str(error.value)


def test_codes_that_are_no_numbers_are_refused_by_name(plain, tmp_path):
    released(plain, path := tmp_path / "c", "fp8 blocks")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    edit_tensors(path, lambda t: t[name].view(torch.uint8)[5, 6].fill_(0xFF))
    stream = StreamedModel(open_checkpoint(path))
    for act in (lambda: stream.native_experts(0, range(4)), lambda: stream.load(0)):
        with pytest.raises(InputError, match=rf"{name}\[5, 6\] is a code that is NaN") as error:
            act()
        assert str(error.value).startswith(str(path))


BY_GROUPS = {
    "a": KINDS["ct fp8 rows"].quantization["config_groups"]["group_0"] | {"targets": ["re:.*experts.3.up_proj"]},
    "b": KINDS["int4"].quantization["config_groups"]["group_0"],
}


SEVERAL = {  # the experts' format, that of one, what else to say
    "ModelOpt": ("modelopt nvfp4", "modelopt fp8", {"quant_algo": "MIXED_PRECISION"}, "F8_E4M3 as {}, NVFP4 as {}"),
    "compressed-tensors": ("int4", "ct fp8 rows", {"config_groups": BY_GROUPS}, "F8_E4M3 as {}, INT4 as {}"),
    "scales": ("gptq", "gptq", {}, "int4 with a scale for 32 columns as {}, int4fp16 with a scale"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_experts_in_several_encodings_are_refused(case, plain, tmp_path):
    """By the name of a weight of each, before one is read."""
    kind, other, says, word = SEVERAL[case]
    released(plain, path := tmp_path / "c", kind)
    module = "model.layers.0.mlp.experts.3.up_proj"

    def change(tensors):
        for name in [n for n in tensors if n.startswith(f"{module}.")]:
            del tensors[name]
        made = weight(other, 64, 64, module)[0]
        tensors |= {n: x.bfloat16() if x.dtype == torch.float16 else x for n, x in made.items()}

    edit_tensors(path, change)
    edit_config(path, quantization_config={**KINDS[kind].quantization, **says})
    word = word.format(f"{module}.weight", "model.layers.0.mlp.experts.0.gate_proj.weight")
    with pytest.raises(InputError, match=re.escape(word)):
        _ = StreamedModel(open_checkpoint(path)).native


@pytest.mark.parametrize("quantization", [{"quant_method": "hqq", "bits": 4}, {"bits": 4}, "strange"], ids=str)
def test_other_methods_are_refused(quantization):
    with pytest.raises(InputError, match=r"^here: is already quantised .* moepack reads fp8, ") as error:
        found(quantization, {})
    assert "\n" not in str(error.value)
