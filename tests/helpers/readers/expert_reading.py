"""Some experts of a checkpoint's layer, read alone and out of the whole layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import spy

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.stream import StreamedModel


def compare_parts(stream: StreamedModel, layer: int):
    """Load a layer with three experts read at a time, against loading it at once."""
    import moepack.calibrate.skeleton as module

    whole = {name: tensor.clone() for name, tensor in stream.load(layer).items()}
    at_once = stream.loading_bytes(layer)
    stream.free(layer)
    names = stream._expert_parameters(layer)
    each = sum(stream._bytes[layer][name] for name in names) // stream.expert_layers[layer].experts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AT_ONCE", 3 * each)
        told = stream._expert_parts(layer, range(1)) is not None
        ranges = stream.expert_ranges(layer)
        assert [e for r in ranges for e in r] == list(range(stream.expert_layers[layer].experts if told else 0))
        assert not told or (len(ranges) > 1 and len(ranges[0]) == 3)
        parts = stream.load(layer)
        patch.setattr(module, "AT_ONCE", each)
        assert stream.loading_bytes(layer) < at_once or not told
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[n], t) and parts[n].dtype == t.dtype for n, t in whole.items())


def compare(checkpoint: Path, every: bool = True):
    """Read the middle experts of the last layer both ways, and count what was read."""
    stream = StreamedModel(open_checkpoint(checkpoint))
    layer = max(stream.expert_layers)
    some = range(1, 3)
    read: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, stream, "_read", read.update)
        got = stream.experts(layer, some)
    assert all(p.is_meta for p in stream.experts_module(layer).parameters()), "nothing is left in the model"
    _, want = stream.split(layer, stream.load(layer))
    assert want is not None
    want = want.select(some)
    assert got.layer == want.layer and got.transposed == want.transposed
    for a, b in zip((*got.weights, *got.biases), (*want.weights, *want.biases), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))
    compare_parts(stream, layer)
    sizes = [stream.checkpoint.shape(key) for key in read]
    elements = sum(
        torch.Size(s).numel() if part is None else torch.Size((len(part), *s[1:])).numel()
        for s, part in zip(sizes, read.values(), strict=True)
    )
    whole = sum(torch.Size(stream.checkpoint.shape(key)).numel() for key in stream._sources[layer])
    assert elements < whole * len(some) / stream.expert_layers[layer].experts or not every
    stream.free(layer)
    assert stream.expert_files(layer, some) <= set(stream.checkpoint.headers)
