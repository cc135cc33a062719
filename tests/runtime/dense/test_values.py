"""Keys of modules: equal for those that differ in weights alone, since their trials would give the same result."""

import copy

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from moepack.pack.spec import Matrix, Version
from moepack.runtime.dense.packed import PackedLinear
from moepack.runtime.dense.values import ReadValues


class Layer(nn.Module):
    """A module with a setting of each type, a norm inside, and its layer's number."""

    def __init__(self, number=0):
        super().__init__()
        self.config = PretrainedConfig(sizes=[1, 2], tables={"a": [3]})
        self.number, self.window, self.rates, self.names = number, None, [1.0], {"x": {1, 2}}
        self.norm = nn.LayerNorm(4, eps=1e-6)
        self.gate = nn.Buffer(torch.zeros(3))


def test_what_differs_in_weights_alone():
    """Another module, another configuration object and another number of the layer, if that does not count."""
    one, other, values = Layer(), Layer(number=1), ReadValues()
    other.norm.weight.data.fill_(2.0)
    other.gate.fill_(5.0)
    assert values.of(one, without="number") == values.of(other, without="number")
    assert values.of(one) != values.of(other)
    assert len({values.of(one), values.of(copy.deepcopy(one)), ReadValues().of(one)}) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 8),
        ("window", 0),
        ("window", False),
        ("rates", [1.0, 2.0]),
        ("rates", (1.0,)),
        ("names", {"x": {1}}),
        ("training", False),
        ("config", PretrainedConfig(sizes=[1, 2], tables={"a": [4]})),
        ("norm", nn.LayerNorm(4, eps=1e-5)),
        ("norm", nn.LayerNorm(5, eps=1e-6)),
        ("norm", nn.LayerNorm(4, eps=1e-6, bias=False)),
        ("norm", nn.LayerNorm(4, eps=1e-6, dtype=torch.bfloat16)),
        ("norm", None),
        ("gate", None),
        ("more", 1),
    ],
)
def test_what_differs_otherwise(name, value):
    """Each may change what the module's code computes, so none shares the trial of the first."""
    other = Layer()
    setattr(other, name, value)
    values = ReadValues()
    assert values.of(other) != values.of(Layer())
    assert values.of(other) == values.of(other)


def test_zero_is_not_none_nor_false():
    """`0 == False` in Python: code may ask `is False`."""
    found = set()
    for window in (0, False, None, 0.0):
        layer = Layer()
        layer.window = window
        found.add(ReadValues().of(layer))
    assert len(found) == 4


def test_packed_maps_are_told_apart_by_shape_and_version():
    """Not by the number under which the compiler knows them, which every map has for itself."""
    maps = [(16, "w4"), (16, "w4"), (16, "w8"), (32, "w4")]
    keys = [ReadValues().of(PackedLinear(Matrix("m", rows, 64), Version.of(name, 32))) for rows, name in maps]
    assert keys[0] == keys[1] and len(set(keys)) == 3
