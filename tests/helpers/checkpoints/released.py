"""Read tensors as a released checkpoint has them, and send every weight of one through the native form and back."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.native import NativeWeight
from moepack.calibrate.released import Encoded, find_encoded, read_scheme
from moepack.calibrate.released.values import decode
from moepack.calibrate.stream import StreamedModel
from moepack.pack.safetensors_file import DTYPES, TensorEntry

NAMES = {name: dtype for dtype, (_, name, _) in DTYPES.items()}


def entry(tensor: Tensor) -> TensorEntry:
    return TensorEntry(NAMES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), 0, tensor.nbytes)


def found(quantization, tensors: dict[str, Tensor], **config) -> dict[str, Encoded]:
    """The encoded weights among tensors, by a configuration's `quantization_config`."""
    scheme = read_scheme("here", {**config, "quantization_config": quantization})
    return find_encoded("here", scheme, {name: entry(tensor) for name, tensor in tensors.items()})


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def decoded(quantization, tensors: dict[str, Tensor], **config) -> dict[str, Tensor]:
    """Decode all encoded weights, after restoring their tensors bit for bit from their arrays."""
    out = {}
    for name, encoded in found(quantization, tensors, **config).items():
        get = tensors.__getitem__
        back = encoded.restore(encoded.codes(get), encoded.scale(get), encoded.outer(get), encoded.zeros(get))
        assert set(back) == set(encoded.stored) and set(encoded.stored).isdisjoint(encoded.leftovers)
        assert all(same(tensor, tensors[n]) for n, tensor in back.items())
        out[name] = encoded.decode(get)
    return out


def values(weight: NativeWeight) -> Tensor:
    return decode(weight.version, weight.group, weight.codes, weight.scale, weight.outer, weight.zeros)


def round_trip(path: Path, every: bool = True) -> StreamedModel:
    """Assert that native matrices are the decoded ones, and that what they restore is the checkpoint, bit for bit.

    With `every`, that is all of the encoded weights: there are none but experts and Linears.
    """
    stream = StreamedModel(open_checkpoint(path))
    stored: dict[str, Tensor] = {}
    for file in stream.checkpoint.headers:
        stored |= load_file(path / file)
    restored: dict[str, Tensor] = {}
    for layer, described in stream.expert_layers.items():
        total = range(described.experts)
        weights = stream.native_experts(layer, total)
        own = stream.experts(layer, total)
        for at, weight in enumerate(weights):
            want = torch.stack([own.matrix(e, at) for e in total])
            assert same(values(weight), want)
        few = stream.native_experts(layer, range(1, 3))
        for weight, part in zip(weights, few, strict=True):
            whole = weight.arrays()
            assert all(bytes_of(array) == bytes_of(whole[n][1:3]) for n, array in part.arrays().items())
        restored |= stream.write_back(layer, total, weights)
    for name, module in stream.model.named_modules():
        if type(module) is torch.nn.Linear and (weight := stream.native_dense(name)) is not None:
            part_of = stream.layer_of(f"{name}.weight")
            assert same(values(weight), stream.tensors(part_of, [f"{name}.weight"])[f"{name}.weight"])
            restored |= stream.write_back_dense(name, weight)
    own_names = {n for e in stream.checkpoint.encoded.values() for n in e.stored}
    assert set(restored) <= own_names and (set(restored) == own_names or not every)
    assert all(same(tensor, stored[n]) for n, tensor in restored.items())
    return stream
