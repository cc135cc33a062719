"""Numbers that are not finite: in every kind of tensor that a build reads, in activations, moments and losses."""

import math
import pickle

import pytest
import torch
from passes import begun, through
from support import edit_tensors
from tiny_models import save_tiny

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.dense import DenseWatch
from moepack.calibrate.finite import not_finite
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import NotFiniteError
from moepack.pipeline.tasks.result import check_numbers
from moepack.quantize.losses import measure

NAN, INF = float("nan"), float("inf")
IDS = torch.arange(4 * 8).view(4, 8) + 1


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2))
def test_the_first_number_that_is_not_finite_is_found(dtype):
    """Planted anywhere, of either sign; the largest number is one."""
    largest = torch.finfo(dtype).max
    for at in ((0, 0), (3, 17), (6, 32)):
        for value in (NAN, INF, -INF):
            x = torch.full((7, 33), largest, dtype=torch.float64)
            assert not_finite(x.to(dtype)) is None and not_finite((-x).to(dtype)) is None
            x[at] = value
            found = not_finite(x.to(dtype))
            assert found is not None and found[0] == at and (found[1] == value or math.isnan(value))
            assert (not_finite(x.to(dtype), bounds=True) is None) == (not math.isnan(value))
            assert not_finite(torch.tensor(value, dtype=torch.float64).to(dtype)) is not None  # without an axis
    assert not_finite(torch.empty(0, dtype=dtype)) is None and not_finite(torch.tensor([1 << 40])) is None


# One of each way in which tensors are read: the family, the tensor, the index, the value, and what the error says.
EXPERT, LAST = "mlp.experts", "model.layers.1."
PLANTED = {
    "an expert's NaN": ("qwen3_moe", f"{LAST}{EXPERT}.5.down_proj.weight", (3, 7), NAN, "[3, 7] is nan"),
    "stacked experts": ("gpt_oss", f"{LAST}{EXPERT}.down_proj", (2, 9, 1), INF, "[2, 9, 1] (expert 2) is inf"),
    "stacked biases": ("gpt_oss", f"{LAST}{EXPERT}.down_proj_bias", (3, 5), NAN, "[3, 5] (expert 3) is nan"),
    "a dense matrix": ("qwen3_moe", f"{LAST}self_attn.q_proj.weight", (1, 2), NAN, "[1, 2] is nan"),
    "an embedding": ("qwen3_moe", "model.embed_tokens.weight", (4095, 63), NAN, "[4095, 63] is nan"),
    "sinks": ("gpt_oss", f"{LAST}self_attn.sinks", (1,), -INF, "[1] is -inf"),
    "a correction": ("deepseek_v3", "model.layers.2.mlp.gate.e_score_correction_bias", (4,), NAN, "[4] is nan"),
}


def planted(folder, family, name, at, value, dtype=torch.bfloat16):
    path = save_tiny(family, folder / "checkpoint", dtype=dtype)
    edit_tensors(path, lambda tensors: tensors[name].__setitem__(at, value))
    return StreamedModel(open_checkpoint(path))


@pytest.mark.parametrize("kind", PLANTED)
def test_a_tensor_is_refused_by_name_as_it_is_read(kind, tmp_path):
    """A bundle was made of NaN without a word; a later layer, or a calibration text, was blamed."""
    family, name, at, value, said = PLANTED[kind]
    stream = planted(tmp_path, family, name, at, value)
    wanted = f"{tmp_path / 'checkpoint'}: {name}{said}: the checkpoint is damaged"
    part = stream.layer_of(name)
    reads = [lambda: stream.load(part)]
    if EXPERT in name:
        expert = int(name.split(".experts.")[1].split(".")[0]) if family == "qwen3_moe" else at[0]
        reads.append(lambda: stream.experts(1, range(expert, expert + 1)))
        assert stream.experts(1, range(expert - 1, expert) if expert else range(1, 2)), "others can be read"
    else:
        own = next(target for target in stream.names(part) if name in stream.weights_of(target))
        reads.append(lambda: stream.tensors(part, [own]))
    for read in reads:
        with pytest.raises(NotFiniteError) as error:
            read()
        assert str(error.value).startswith(wanted)
        again = pickle.loads(pickle.dumps(error.value))  # as Ray sends it
        assert (type(again), str(again)) == (NotFiniteError, str(error.value))
    stream.load(0)  # nothing is wrong there


def test_a_buffer_may_mask_and_float32_may_be_beyond_bf16_where_it_stays(tmp_path):
    """Infinity in a buffer masks or bounds. What is served in BF16 must not be rounded to infinity."""
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert planted(tmp_path / "a", "deepseek_v3", bias, (4,), -INF).load(2)[bias][4] == -INF
    weight = "model.layers.2.self_attn.o_proj.weight"
    with pytest.raises(NotFiniteError, match=r"o_proj.weight\[0, 0\] is 3.4e\+38"):
        planted(tmp_path / "b", "deepseek_v3", weight, (0, 0), 3.4e38, torch.float32).load(2)


@pytest.mark.parametrize(
    ("dtype", "value", "remedy"),
    ((torch.float16, 6e4, "FP16 ends at 65,504"), (torch.bfloat16, 3e38, "{dtype: float32}")),
)
def test_activations_that_overflow_are_refused_by_layer(dtype, value, remedy, tmp_path):
    """Weights are finite, what they make is not: moments and losses of later layers would be of NaN."""
    name = "model.layers.1.self_attn.o_proj.weight"
    stream = planted(tmp_path, "qwen3_moe", name, (slice(None), slice(None)), value)
    walk = begun(stream, IDS, 2, dtype)
    through(walk, stream, [0], dtype)
    with pytest.raises(NotFiniteError, match=r"what layer 1 makes is \S+ in window \d of the calibration") as error:
        through(walk, stream, [1], dtype)
    assert remedy in str(error.value)


def test_moments_beyond_float32_are_refused_by_module():
    linear = torch.nn.Linear(4, 4, bias=False)
    watch = DenseWatch({"model.layers.3.q_proj": linear}, {}, 1, 8)
    with watch.watching(), torch.no_grad():
        linear(torch.full((1, 8, 4), 1e20))
    with pytest.raises(NotFiniteError, match=r"^model.layers.3.q_proj reads inputs whose squares"):
        watch.moments()


def test_a_loss_of_nan_is_not_none():
    """It was counted as 0: the version that computes NaN was the best of all."""
    exact, gates, groups = torch.ones(4, 3), torch.ones(4), torch.arange(4)
    got = torch.full((4, 3), NAN)
    found = measure(exact, got, gates, groups, torch.zeros(4, dtype=torch.bool), None)
    assert math.isnan(found.loss.relative) and math.isnan(found.loss.mse)
    fine = torch.ones(1)
    check_numbers("expert 5", [fine], [0.0])
    for scales, losses, named in (([fine, fine * INF], [0.0], "scales"), ([fine], [0.0, found.loss.mse], "losses")):
        with pytest.raises(NotFiniteError, match=f"^expert 5 gets {named} that are not finite"):
            check_numbers("expert 5", scales, losses)
