"""Verify a bundle: its digests, its structure, and its bits against the checkpoint it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.encodings.bf16 import EXPERT_DTYPES
from moepack.pack.errors import BundleError, InputError, Problem, printable
from moepack.pack.manifest import CONFIG, LEFTOVERS
from moepack.pack.reader import Bundle, open_bundle, unlisted
from moepack.pack.reader import verify as verify_digests
from moepack.pack.spec import Version, lossless
from moepack.shared.progress import SILENT, Reporter

if TYPE_CHECKING:
    from torch import Tensor

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.dense import DenseTensors

# Entries of a configuration that do not change what its model computes, or that a build replaces.
_BOOKKEEPING = {"_name_or_path", "quantization_config", "transformers_version"}
_AT_ONCE = 1 << 30  # bytes of MTP tensors that are compared at a time


def verify(path: str | Path, checkpoint: str | Path | None = None, reporter: Reporter = SILENT) -> list[Problem]:
    """List the problems of a bundle; with a checkpoint, also its tensors that the bundle does not hold bit for bit."""
    try:
        bundle = open_bundle(path)
    except BundleError as error:
        return list(error.problems)
    stream = None if checkpoint is None else _comparable(bundle, checkpoint, reporter)
    problems: list[Problem] = []
    layer_files = bundle.manifest.layer_files(bundle.versions, bundle.dense_versions)
    reporter.stage("verify digests", len(bundle.files) + len(layer_files))
    for name, found in verify_digests(bundle):
        reporter.step(name)
        problems += found
    reporter.step("done")
    if more := unlisted(bundle):
        shown = ", ".join(printable(name) for name in more[:5]) + ", ..." * (len(more) > 5)
        reporter.note(f"not in the manifest, so not part of the bundle: {shown}")
    if stream is not None and not problems:
        problems += _against(bundle, stream, reporter)
    return problems


def agreement(path: str | Path) -> str:
    """Return how a bundle without problems agrees with its checkpoint."""
    bundle = open_bundle(path)
    exact = lossless(bundle.versions)
    held = EXPERT_DTYPES.get(str(bundle.manifest.model.get("expert_dtype")), "")
    rounded = exact is not None and not exact.released and "rounded" in held
    return "bit-identical, once rounded to BF16, with" if rounded else "bit-identical with"


def _comparable(bundle: Bundle, checkpoint: str | Path, reporter: Reporter) -> StreamedModel:
    """Open a checkpoint, or raise InputError where the bundle cannot be compared with it."""
    from moepack.calibrate.checkpoint import open_checkpoint

    exact = lossless(bundle.versions)
    dense_exact = lossless(bundle.dense_versions)
    alone = "leave --checkpoint out to check its digests"
    if exact is None:
        raise InputError(f"{bundle.path}: has no lossless version here to compare with a checkpoint: {alone}")
    if bundle.manifest.dense and dense_exact is None:
        raise InputError(f"{bundle.path}: has no lossless version of its dense matrices here to compare: {alone}")
    reporter.stage("open checkpoint", 1)
    reporter.step("the model")
    opened = open_checkpoint(checkpoint)

    from moepack.calibrate.stream import StreamedModel  # imports torch

    stream = StreamedModel(opened)
    if exact.released and exact != stream.native:
        raise InputError(f"{bundle.path}: holds {exact.name} experts, those of {checkpoint} are {stream.native.name}")
    return stream


def _against(bundle: Bundle, stream: StreamedModel, reporter: Reporter) -> list[Problem]:
    exact = lossless(bundle.versions)
    dense_exact = lossless(bundle.dense_versions)
    assert exact is not None
    if tuple(stream.expert_layers.values()) != bundle.layers:
        which = stream.checkpoint.name
        return [Problem(str(bundle.path), "layers", f"its experts are not those of {which}: another model")]
    problems = _compare_models(bundle, stream) + _compare_companions(bundle, stream.checkpoint.path)
    positions = {layer.index: p for p, layer in enumerate(bundle.layers)}
    dense = bundle.dense(check_digests=False)  # verified above
    packed = {f"{d.module}.{part}" for d in bundle.manifest.dense for part in ("weight", "bias")}
    not_compared = set(dense)  # such a tensor would be served too: transformers unties a head that is there
    keeps_mtp = bundle.manifest.model.get("mtp") == "keep"
    carries = LEFTOVERS in bundle.files
    reporter.stage("compare with checkpoint", 1 + len(stream.layers) + keeps_mtp + carries)
    for i in (None, *range(len(stream.layers))):
        reporter.step("outside the layers" if i is None else f"layer {i}")
        tensors = stream.load(i)
        rest, experts = (tensors, None) if i is None else stream.split(i, tensors)
        not_compared -= set(rest)
        for name, tensor in rest.items():
            if name not in packed:
                problems += _compare(dense, str(bundle.path), name, tensor)
        stream.free(i)
        if experts is not None and i is not None:
            problems += _compare_experts(bundle, exact, positions[i], experts, stream)
        for number, described in enumerate(bundle.manifest.dense):
            if described.layer == i:
                assert dense_exact is not None
                problems += _compare_dense(bundle, dense_exact, number, rest, stream)
    if keeps_mtp:
        reporter.step("multi-token prediction")
    for group in stream.mtp_groups(_AT_ONCE) if keeps_mtp else ():
        not_compared -= set(group)
        for name, tensor in group.items():
            problems += _compare(dense, str(bundle.path), name, tensor)
        group.clear()  # frees the tensors before the next group is read
    for name in sorted(not_compared):
        what = f"has a tensor {name}, which the checkpoint's model lacks"
        problems.append(Problem(str(bundle.path), "unexpected", what))
    if carries:
        reporter.step("tensors for an export")
        problems += _compare_carried(bundle, stream)
    reporter.step("done")
    return problems


def _compare_models(bundle: Bundle, stream: StreamedModel) -> list[Problem]:
    """Compare the model that the bundle's config.json makes with the checkpoint's: settings, tensors, ties.

    The settings are those that transformers' class reads, with its own values where config.json has none.
    """
    import torch

    from moepack.calibrate.checkpoint import make_config, read_config
    from moepack.runtime.planning.config import read_config as served_config
    from moepack.runtime.planning.skeleton import on_meta

    where = str(bundle.path / CONFIG)
    checkpoint = stream.checkpoint
    own_config = make_config(bundle.path, read_config(bundle.path))
    config = make_config(checkpoint.path, read_config(checkpoint.path))
    ours = _settings(own_config.to_dict())
    said = theirs = _settings(config.to_dict())
    if stream.untied:
        theirs = _settings(checkpoint.untied().config.to_dict())
    problems = []
    for at in sorted(ours.keys() | theirs.keys()):
        if ours.get(at) != theirs.get(at):
            what = f"{'.'.join(at)} is {ours.get(at)!r}, the checkpoint's {theirs.get(at)!r}"
            if said.get(at) != theirs.get(at):
                what += f": its config.json says {said.get(at)!r}, but its output projection is a tensor of its own"
            problems.append(Problem(where, "value", what))
    served = on_meta(served_config(bundle.path, bundle.manifest), torch.bfloat16)
    own, other = (set(m.state_dict()) - set(m.all_tied_weights_keys) for m in (served, stream.model))
    for name in sorted(own ^ other):
        of = "the checkpoint alone" if name in other else "the bundle alone"
        problems.append(Problem(where, "unexpected", f"{name} is a tensor of its own in {of}"))
    return problems


def _compare_companions(bundle: Bundle, checkpoint: Path) -> list[Problem]:
    from moepack.calibrate.checkpoint import companions

    ours, theirs = set(companions(bundle.path)) & set(bundle.files), set(companions(checkpoint))
    problems = [Problem(str(bundle.path / n), "missing", "the checkpoint has this file") for n in theirs - ours]
    problems += [Problem(str(bundle.path / n), "unexpected", "the checkpoint has no such file") for n in ours - theirs]
    for name in ours & theirs:
        if _meaning(bundle.path / name) != _meaning(checkpoint / name):
            problems.append(Problem(str(bundle.path / name), "bits", "differs from the checkpoint's"))
    return sorted(problems, key=lambda problem: problem.location)


def _meaning(file: Path) -> object:
    """Return a copied file's contents to compare; JSON values without those that say how it was saved."""
    data = file.read_bytes()
    try:
        value = json.loads(data) if file.suffix == ".json" else data
    except (ValueError, RecursionError):
        return data
    return {k: v for k, v in value.items() if k not in _BOOKKEEPING} if isinstance(value, dict) else value


_Path = tuple[str, ...]  # the names that lead to a configuration's value


def _settings(config: dict[str, object], within: _Path = ()) -> dict[_Path, object]:
    """A configuration's values by their path, without those that say how it was saved."""
    out: dict[_Path, object] = {}
    for name, value in config.items():
        if name in _BOOKKEEPING:
            continue
        if isinstance(value, dict):
            out |= _settings(value, (*within, str(name)))
        else:
            out[*within, str(name)] = value
    return out


def _compare_carried(bundle: Bundle, stream: StreamedModel) -> list[Problem]:
    from safetensors import safe_open

    path = bundle.path / LEFTOVERS
    problems = list[Problem]()
    for file in stream.checkpoint.headers:
        with safe_open(path, "pt") as ours, safe_open(stream.checkpoint.path / file, "pt") as theirs:
            for name in set(ours.keys()) & set(theirs.keys()):
                if not _same(ours.get_tensor(name), theirs.get_tensor(name)):
                    problems.append(Problem(str(path), "bits", f"tensor {name} differs from the checkpoint"))
    return problems


def _compare_experts(
    bundle: Bundle, version: Version, position: int, experts: ExpertWeights, stream: StreamedModel
) -> list[Problem]:
    """Compare a layer's extents, byte for byte, with those that the checkpoint makes."""
    import numpy as np

    from moepack.calibrate.native import expert_extent

    problems = []
    for expert in range(experts.layer.experts):
        index = experts.layer.index
        codes = stream.native_experts(index, range(expert, expert + 1)) if version.released else ()
        made, _ = expert_extent(version, experts, expert, codes)
        if not np.array_equal(made, bundle.extent(version.name, position, expert, check_digest=False)):
            where = bundle.layer_file(version.name, position).place(expert)
            problems.append(Problem(where, "bits", "differs from the checkpoint"))
    return problems


def _compare_dense(
    bundle: Bundle, version: Version, number: int, tensors: Mapping[str, Tensor], stream: StreamedModel
) -> list[Problem]:
    """Compare the extent of a dense matrix, by its number, byte for byte with that which the checkpoint makes."""
    import numpy as np

    from moepack.calibrate.native import dense_extent

    described = bundle.manifest.dense[number]
    layer, at = bundle.dense_place(number)
    file = bundle.dense_file(version.name, layer)
    matrix = described.matrix
    weight, bias = (tensors.get(f"{described.module}.{name}") for name in ("weight", "bias"))
    as_stored = not version.released or stream.dense_versions.get(described.module) == version
    as_stored = as_stored and matrix.bias == (bias is not None)
    if as_stored and weight is not None and weight.shape == (matrix.rows, matrix.cols):
        native = stream.native_dense(described.module) if version.released else None
        made, _ = dense_extent(version, matrix, weight, bias, native)
        if np.array_equal(made, file.extent(at, check_digest=False)):
            return []
    return [Problem(file.place(at), "bits", "differs from the checkpoint")]


def _compare(dense: DenseTensors, location: str, name: str, tensor: Tensor) -> list[Problem]:
    if name not in dense:
        return [Problem(location, "missing", f"has no tensor {name}, which the checkpoint has")]
    if _same(dense.torch(name), tensor):
        return []
    return [Problem(location, "bits", f"tensor {name} differs from the checkpoint")]


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are the same bit for bit."""
    import torch

    alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)))
