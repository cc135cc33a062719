"""Experts behind transformers' interface give what their own code gives; checkpoints of odd layouts are read."""

import pytest
import torch
from passes import begun, through
from safetensors.torch import load_file
from support import edit_tensors
from support import ids as token_ids

from benchmarks import families
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import is_experts_module
from moepack.calibrate.stream import StreamedModel
from moepack.families.layouts import adapt
from moepack.families.model_class import auto_class, model_of
from moepack.families.passed import between_layers
from moepack.pack.errors import InputError

IDS = token_ids(24, 1, 2)


def plain_model(name):
    """A random model with its own experts' code."""
    torch.manual_seed(0)
    model = auto_class(families.small(name)).from_config(families.small(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if "experts" in n:
                parameter.normal_(0, 0.2)
    return model


def kinds(model):
    return [type(m).__name__ for m in model.modules() if is_experts_module(m)]


@pytest.mark.parametrize("name", ["step3p7", "dbrx", "longcat_flash", "ernie4_5_vl_moe", "llama4_text"])
def test_an_adapted_model_gives_what_its_own_code_gives(name):
    """Step-3.7 clamps the last layer at 0.05; of LongCat's choices some are of experts without weights."""
    model = plain_model(name)
    with torch.inference_mode():
        want = model(input_ids=IDS).logits
        adapt(model)
        made = kinds(model)
        adapt(model)
        got = model(input_ids=IDS).logits
    assert made and made == kinds(model) and len(made) <= 2
    exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    assert all(any(name in tensor for tensor in model.state_dict()) for name in exact)
    # float32 on both sides: sums in another order
    assert float((got - want).norm() / want.norm()) <= 1e-5


def test_experts_for_images_run_by_their_own_code():
    model = plain_model("ernie4_5_vl_moe")
    block = next(m for m in model.modules() if type(m).__name__ == "Ernie4_5_VLMoeMoeBlock")
    x, kinds_of_token = torch.randn(1, 6, 64), torch.tensor([[0, 1, 1, 0, 2, 0]])
    with torch.inference_mode():
        want, text = block(x, kinds_of_token)[0], block(x)[0]
        adapt(model)
        got = block(x, kinds_of_token)[0]
    assert torch.allclose(got, want, atol=1e-6)
    assert float((want - text)[0, 1].abs().max()) > 1e-3  # the second set is another
    assert not is_experts_module(block.vision_moe.experts) and is_experts_module(block.text_moe.experts)


@pytest.mark.parametrize("as_published", [True, False])
def test_longcat_checkpoints_with_and_without_rows_of_no_expert(as_published, demo_model, tmp_path):
    """Published ones have tensors of experts with weights alone; transformers writes rows for the others too."""
    families.save(families.small("longcat_flash"), tmp_path, demo_model)
    tensors = load_file(tmp_path / "model.safetensors")
    odd = {n for n in tensors if any(f"experts.{e}." in n for e in range(8, 12))}
    assert len(odd) == 2 * 2 * 4
    if as_published:
        edit_tensors(tmp_path, lambda own: [own.pop(n) for n in odd])
    stream = StreamedModel(open_checkpoint(tmp_path))
    assert {layer.experts for layer in stream.expert_layers.values()} == {8}
    got = stream.load(0)["model.layers.0.mlp.experts.gate_up_proj"]
    want = torch.cat([tensors[f"model.layers.0.mlp.experts.7.{n}_proj.weight"] for n in ("gate", "up")])
    assert got.shape == (8, 96, 64) and torch.equal(got[7], want)
    assert set(stream.unused) == (set() if as_published else odd)


def test_choices_of_no_expert_are_not_counted(demo_model, tmp_path):
    from moepack.calibrate.statistics import routing_statistics

    families.save(families.small("longcat_flash"), tmp_path, demo_model)
    stream = StreamedModel(open_checkpoint(tmp_path))
    (seen,) = through(begun(stream, IDS, 2), stream, [0])
    real = seen.experts < 8
    assert 0 < int(real.sum()) < real.numel() and int(seen.experts.max()) == 8
    made = routing_statistics(seen, 8)
    assert torch.equal(made["tokens"], torch.bincount(seen.experts[real], minlength=8))
    assert torch.equal(made["tokens"], made["coactivation"].diagonal())
    halves = made["prefill_counts"] + made["decode_counts"]
    assert torch.equal(halves.sum(0).long(), made["tokens"])
    assert abs(float(made["gate_sum"].sum() - seen.gates[real].sum())) <= 1e-4


def test_experts_of_no_known_layout_stay_refused(demo_model, tmp_path):
    families.save(families.small("jetmoe"), tmp_path, demo_model)
    with pytest.raises(InputError, match="jetmoe has experts"):
        StreamedModel(open_checkpoint(tmp_path))
    assert not kinds(model_of(families.small("jetmoe"), dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["mistral_large4", "inkling2_text", "zaya", "gemma4_text", "hy_v4"])
def test_bytes_between_layers_are_bounded(name, demo_model, tmp_path):
    """What a pass holds between layers is no more than the configuration's numbers say."""
    families.save(families.small(name), tmp_path, demo_model)
    stream = StreamedModel(open_checkpoint(tmp_path))
    hidden, beside = between_layers(stream.model.config, 24, 4)
    walk, most = begun(stream, IDS, 1), 0
    for i in range(len(stream.layers)):
        through(walk, stream, [i])
        kept = walk.kept()
        assert sum(kept.pop(f"{b:06d}").nbytes for b in range(2)) == 2 * hidden
        most = max(most, sum(x.nbytes for x in kept.values()))
    assert most <= 2 * beside and (most > beside / 2) == (beside > 0)
