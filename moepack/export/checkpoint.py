"""Write the checkpoint of a bundle again from its lossless version: every tensor byte for byte, file by file.

The bundle says which tensors there were (`moepack.pipeline.released`); the formats' readers make them from codes and
scales, or they are kept as they were. Dropped layers for multi-token prediction are left out and named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError
from moepack.pack.manifest import LEFTOVERS, strict_json
from moepack.pack.manifest.parser import safe_path
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.reader import Bundle
from moepack.pack.safetensors_file import DTYPES, Header, TensorEntry, read_header
from moepack.pack.spec import EXPERT_DTYPES, Version, lossless
from moepack.pipeline.released import TENSORS, Holding, as_it_is, of_experts
from moepack.shared.progress import SILENT, Reporter

from .beside import copy_others, identity, libraries, open_for
from .files import TensorFiles, working
from .report import Exported, released_bits

if TYPE_CHECKING:
    from torch import Tensor

    from moepack.calibrate.native import NativeWeight
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.codec.affine import AffineMatrix
    from moepack.pack.codec.released import ReleasedMatrix

    Written = Iterator[tuple[str, int, Tensor]]  # a tensor's name, an index of its first axis, values from there on

_FEW = 8  # experts whose codes are in memory at once
# of a described tensor: dimensions, and elements
_DIMENSIONS = 8
_LARGEST = 1 << 44


def export_checkpoint(
    path: str | Path, output: str | Path, reporter: Reporter = SILENT, dry_run: bool = False
) -> Exported:
    """Write the checkpoint that the bundle at `path` was made from into the new directory `output`.

    Raises InputError for a bundle that does not hold its checkpoint as it was, TargetError if `output` is not new or
    empty, or in the bundle. Nothing is left at `output` after an error.
    """
    target = Path(output)
    bundle = open_for(path, target)
    stream, config = _stream(bundle)
    held = _held(bundle, stream)
    carried = _carried(bundle, stream)
    wanted = carried | held.served
    headers = {name: h for name, h in stream.checkpoint.headers.items() if wanted.intersection(h.tensors)}
    needed = sum(e.end for h in headers.values() for n, e in h.tensors.items() if n in wanted)
    whole = sum(f.size for f in bundle.manifest.files.values())
    whole += sum(f.size for f in bundle.manifest.expert_files.values())
    if needed > 4 * whole:
        raise InputError(f"{bundle.path / TENSORS}: describes {needed:,} bytes, more than the bundle holds: damaged")
    left_out = tuple(sorted(set(stream.checkpoint.file_of) - wanted))
    exact = stream.native
    counts = {exact.name: sum(x.experts for x in bundle.layers)}
    dense = lossless(bundle.dense_versions)
    of_dense = (dense.name,) if dense else ()
    bits = released_bits(bundle, exact)
    report = Exported("checkpoint", target, needed, bits, (), True, 0.0, counts, of_dense, len(wanted), left_out)
    if dry_run:
        return report
    made_for = {"target": "released", "bundle": identity(bundle), "libraries": libraries()}
    with working(target, made_for, needed, reporter) as work:
        parts = {
            file: {n: (e.dtype, e.shape) for n, e in header.tensors.items() if n in wanted}
            for file, header in headers.items()
        }
        files = TensorFiles(work, parts)
        reporter.stage("write the checkpoint", len(stream.layers) + 1)
        _write(bundle, stream, files, carried, held.served - carried, reporter)
        files.close()
        copy_others(bundle, work, config)
    reporter.step("done")
    return replace(report, files=tuple(files.names))


def _stream(bundle: Bundle) -> tuple[StreamedModel, JsonObject]:
    """The skeleton of the checkpoint, from what the bundle says of its tensors; and its config.json."""
    from transformers import AutoConfig

    from moepack.calibrate.checkpoint import Checkpoint
    from moepack.calibrate.released import find_encoded, read_scheme
    from moepack.calibrate.stream import StreamedModel

    exact = lossless(bundle.versions)
    if exact is None:
        here = ", ".join(v.name for v in bundle.versions)
        raise InputError(f"{bundle.path}: has no version here that holds its checkpoint as it was: here are {here}")
    if TENSORS not in bundle.manifest.files:
        raise InputError(f"{bundle.path}: does not hold its checkpoint as it was: {_why_not(bundle, exact)}")
    if LEFTOVERS in bundle.manifest.files.keys() - bundle.files.keys():  # serving from the Hub does not fetch it
        raise InputError(f"{bundle.path}: {LEFTOVERS} is not here, which export needs: pull the bundle")
    bundle.check(TENSORS, "config.json", *([LEFTOVERS] if LEFTOVERS in bundle.files else []))
    config = json.loads((bundle.path / "config.json").read_text())
    try:
        known = strict_json.loads((bundle.path / TENSORS).read_bytes())
        del config["quantization_config"]
        if known["quantization_config"] is not None:
            config["quantization_config"] = known["quantization_config"]
        headers = {_plain(file): _header(tensors) for file, tensors in known["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{bundle.path / TENSORS}: is not what moepack writes ({error}): damaged") from None
    tensors = {n: t for h in headers.values() for n, t in h.tensors.items()}
    file_of = {n: file for file, h in headers.items() for n in h.tensors}
    encoded = find_encoded(bundle.path, read_scheme(bundle.path, config), tensors)
    plain = AutoConfig.from_pretrained(bundle.path)
    del plain.quantization_config
    stream = StreamedModel(Checkpoint(bundle.path, str(bundle.path), plain, headers, file_of, encoded, here=False))
    if tuple(stream.expert_layers.values()) != bundle.layers or stream.native != exact:
        raise InputError(f"{bundle.path / TENSORS}: does not describe the checkpoint of this bundle: damaged")
    return stream, config


def _why_not(bundle: Bundle, exact: Version) -> str:
    """Say why a bundle without a description of its checkpoint has none, and what to do."""
    from moepack.calibrate.released.parts import FLOATS

    dtype = str(bundle.manifest.model.get("expert_dtype"))
    values = f"--bits {exact.name} writes its values in BF16"
    if exact.released or dtype == "BF16":
        return f"its layout is not undone, or it was built or shrunk without what that takes: {values}"
    held = f"{exact.name} holds {EXPERT_DTYPES[dtype]}"
    return f"{held}: {values}" if dtype in FLOATS else f"{held}: build it with native experts, or {values}"


def _plain(file: str) -> str:
    """A file's name, if it is one in the directory itself."""
    if "/" in file or not safe_path(file) or not file.endswith(".safetensors"):
        raise ValueError(f"the file {file!r}")
    return file


def _header(tensors: JsonObject) -> Header:
    out = {}
    for name, (dtype, shape) in tensors.items():
        known = (
            dtype in DTYPES and len(shape) <= _DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
        )
        if not known or math.prod(shape) > _LARGEST:
            raise ValueError(f"{name}: {dtype} {shape}")
        out[name] = TensorEntry(dtype, tuple(shape), 0, DTYPES[dtype][0] * math.prod(shape))
    return Header(0, out, {})


def _held(bundle: Bundle, stream: StreamedModel) -> Holding:
    """What the bundle holds. Raises InputError where a lossless version of its dense matrices is not here."""
    exact = lossless(bundle.dense_versions)
    if bundle.manifest.dense and exact is None:
        raise InputError(f"{bundle.path}: has no lossless version of its dense matrices here")
    own = {m.module: exact for m in bundle.manifest.dense} if exact else {}
    return Holding.of(stream, own, bundle.manifest.model.get("mtp") == "keep")


def _carried(bundle: Bundle, stream: StreamedModel) -> set[str]:
    """The names of the checkpoint's tensors that the bundle keeps as they were."""
    if LEFTOVERS not in bundle.manifest.files:
        return set()
    return set(read_header(bundle.path / LEFTOVERS).tensors) & set(stream.checkpoint.file_of)


def _write(
    bundle: Bundle,
    stream: StreamedModel,
    files: TensorFiles,
    carried: set[str],
    served: frozenset[str],
    reporter: Reporter,
) -> None:
    from safetensors import safe_open

    reporter.step("outside the experts")
    dense = bundle.dense()
    for name in dense:  # kept MTP layers have their names in the checkpoint
        for key in as_it_is(stream, name) if stream.weights_of(name) else (name,):
            if key in served and files.wants((key,)):
                files.put_tensor(key, dense.torch(name))
    for m in bundle.manifest.dense:
        for name, tensor in _dense_matrix(bundle, stream, m.module):
            if name in served:
                files.put_tensor(name, tensor)
    if carried:
        with safe_open(bundle.path / LEFTOVERS, framework="pt") as file:
            for name in carried:
                files.put_tensor(name, file.get_tensor(name))
    for position, layer in enumerate(bundle.layers):
        reporter.step(f"layer {layer.index}")
        if not files.wants(served.intersection(of_experts(stream, layer.index))):
            continue
        for start in range(0, layer.experts, _FEW):
            some = range(start, min(start + _FEW, layer.experts))
            for name, at, tensor in _experts(bundle, stream, position, some):
                if name in served:
                    files.put_tensor(name, tensor, at)


def _experts(bundle: Bundle, stream: StreamedModel, position: int, some: range) -> Written:
    """The tensors of some experts, or their part of tensors that all experts share."""
    import numpy as np
    import torch

    exact = stream.native
    layer = bundle.layers[position]
    decoded = [exact.decode(layer.matrices, bundle.extent(exact.name, position, e)) for e in some]
    of_matrix = [[one[m] for one in decoded] for m in range(len(layer.matrices))]
    own: list[NativeWeight | Tensor] = [
        _native(exact.name, exact.group_size, values)
        if exact.released
        else torch.from_numpy(np.stack([v.weight for v in values])).view(torch.bfloat16)
        for values in of_matrix
    ]
    for name, tensor in stream.write_back(layer.index, some, own).items():
        whole = stream.checkpoint.headers[stream.checkpoint.file_of[name]].tensors[name].shape
        yield name, some.start if tensor.shape[:1] != whole[:1] else 0, tensor
    for m, name in enumerate(n for n in _expert_parameters(stream, layer.index) if n.endswith("_bias")):
        for key in stream.weights_of(name):
            bits = np.stack([v.bias for v in of_matrix[m]])
            yield key, some.start, torch.from_numpy(bits).view(torch.bfloat16)


def _expert_parameters(stream: StreamedModel, layer: int) -> list[str]:
    from moepack.calibrate.experts import parameter_names

    prefix = stream.expert_layers[layer].module
    names = parameter_names(stream.experts_module(layer)).values()
    return [f"{prefix}.{name}" for pair in names for name in pair if name is not None]


def _dense_matrix(bundle: Bundle, stream: StreamedModel, module: str) -> Iterator[tuple[str, Tensor]]:
    exact = lossless(bundle.dense_versions)
    assert exact is not None, "_held refuses this"
    values = bundle.dense_matrix(exact.name, module)
    made = values.torch()
    if exact.released:
        one = _native(exact.name, exact.group_size, [values.decode()], stack=False)
        del made["weight"]
        yield from stream.write_back_dense(module, one).items()
    for part, tensor in made.items():
        for key in as_it_is(stream, f"{module}.{part}", bf16=True):
            yield key, tensor


def _native(version: str, group: int, values: list[AffineMatrix | ReleasedMatrix], stack: bool = True) -> NativeWeight:
    """Decoded matrices of some experts, or one dense matrix, as the formats' readers take them."""
    import numpy as np
    import torch

    from moepack.calibrate.native import NativeWeight

    def joined(name: str) -> Tensor | None:
        arrays: list[Any] = [getattr(v, name, None) for v in values]
        if arrays[0] is None:
            return None
        tensor = torch.from_numpy(np.stack(arrays))
        return tensor if stack else tensor[0]

    codes = joined("codes")
    scale = joined("scale")
    outer = joined("outer")
    assert codes is not None and scale is not None
    name = "fp8" if version == "fp8row" else version
    return NativeWeight(name, group, codes, scale, None if outer is None else outer[..., None], joined("zero"))
