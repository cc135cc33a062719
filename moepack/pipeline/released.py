"""Keep beside a bundle's lossless version what else its checkpoint's tensors need to be written again byte for byte.

`released.json` has the checkpoint's quantisation config and the names, dtypes and shapes of its tensors by file;
`released.safetensors` has, as they were, the tensors that what is served does not give back. Which these are is decided
here, for a build and for an export alike; moepack/export makes the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.manifest import LEFTOVERS
from moepack.pack.safetensors_file import DTYPES, merge
from moepack.pack.spec import DenseMatrix, Version, lossless
from moepack.pack.writer import BundleWriter
from moepack.shared.progress import Reporter

from .recipe import Recipe

if TYPE_CHECKING:
    from moepack.calibrate.stream import StreamedModel

TENSORS = "released.json"


@dataclass(frozen=True, slots=True)
class Holding:
    """The form in which a bundle holds each tensor of its checkpoint, by name."""

    served: frozenset[str]  # those that what is served gives back, byte for byte
    carried: tuple[str, ...]  # those that are kept as they are, for an export alone

    @staticmethod
    def of(stream: StreamedModel, dense: Mapping[str, Version], mtp: bool) -> Holding:
        """`dense`: the lossless version of each dense matrix that has versions, by module. `mtp`: whether MTP is kept.

        Raises InputError for experts whose layout is not undone.
        """
        checkpoint = stream.checkpoint
        served = {name for layer in stream.expert_layers for name in of_experts(stream, layer)}
        for name in (n for part in (None, *range(len(stream.layers))) for n in stream.dense_names(part)):
            module, _, leaf = name.rpartition(".")
            version = dense.get(module)
            if version is None or not version.released or leaf != "weight":
                served.update(as_it_is(stream, name, version is not None))
            else:
                served.update(n for key in stream.weights_of(name) for n in checkpoint.encoded[key].stored)
        if mtp:
            served.update(name for name in stream.mtp if name not in checkpoint.encoded)
        dropped = set() if mtp else {n for w in stream.mtp for n in _stored(stream, w)}
        return Holding(frozenset(served), tuple(sorted(set(checkpoint.file_of) - served - dropped)))


def held(stream: StreamedModel, exact: Version | None, dense: Mapping[str, Version], mtp: bool) -> Holding:
    """Return the holding of a bundle whose lossless version of experts is `exact`. Other arguments: see `Holding.of`.

    Raises InputError where it does not give the checkpoint back: no version holds the experts as they were, or
    transformers makes them in another way than by joining rows.
    """
    if exact is None:
        raise InputError(f"{stream.checkpoint.name}: no version holds its experts as they were")
    if stream.native != exact or (not exact.released and stream.expert_dtype != "BF16"):
        raise InputError(f"{stream.checkpoint.name}: {exact.name} is not how its {stream.expert_dtype} experts were")
    return Holding.of(stream, dense, mtp)


def as_it_is(stream: StreamedModel, name: str, bf16: bool = False) -> tuple[str, ...]:
    """The tensor of the checkpoint that a parameter or buffer is; none if it is made of more, or not just renamed.

    `bf16`: it is kept in BF16, whatever the tensor has.
    """
    import torch

    checkpoint = stream.checkpoint
    keys = stream.weights_of(name)
    if len(keys) != 1 or keys[0] in checkpoint.encoded or name in stream.ledger.converted:
        return ()
    model = stream.model.get_parameter_or_buffer(name)
    dtype = DTYPES[checkpoint.dtype(keys[0])][1]
    wanted = torch.bfloat16 if bf16 else model.dtype
    return keys if checkpoint.shape(keys[0]) == tuple(model.shape) and f"torch.{dtype}" == str(wanted) else ()


def of_experts(stream: StreamedModel, layer: int) -> Iterator[str]:
    """The tensors that a layer's experts give back."""
    import torch

    matrices = stream.expert_layers[layer].matrices
    if not stream.native.released:  # raises for a layout that is not undone
        stream.write_back(layer, range(1), [torch.empty(1, m.rows, m.cols, dtype=torch.int8) for m in matrices])
    for name in set(stream.names(layer)) - set(stream.dense_names(layer)):
        if name.endswith("_bias"):
            yield from as_it_is(stream, name, bf16=True)
            continue
        for key in stream.weights_of(name):
            encoded = stream.checkpoint.encoded.get(key)
            yield from (key,) if encoded is None else encoded.stored


def announce(stream: StreamedModel, recipe: Recipe, dense: Iterable[DenseMatrix], reporter: Reporter) -> int:
    """Note which of the checkpoint's tensors a build leaves out, and which it keeps for an export alone.

    Returns the bytes of the latter. `dense`: the matrices that get versions.
    """
    version = lossless(recipe.dense_specs())
    keeps = recipe.mtp == "keep"
    own = {m.module: version for m in dense} if version else {}
    exact = lossless(recipe.version_specs())
    found = None
    try:
        found = held(stream, exact, own, keeps)
    except InputError as error:
        if exact is not None:
            reporter.note(f"moepack export will not make the checkpoint again: {error}")
    carried = set(found.carried if found else ())
    if stream.unused:
        kept = "are kept for moepack export alone" if found else "are left out"
        why = "; ".join(sorted({stream.ledger.left_out[name] for name in stream.unused}))
        reporter.note(f"{len(stream.unused)} tensors of the checkpoint have no place in the model ({why}), and {kept}")
    if stream.untied:
        reporter.note("config.json ties the output projection to the embeddings, and the checkpoint has another: kept")
    if stream.mtp:
        out = "are left out" + ", of moepack export too" * (found is not None)
        are = "are kept beside the model" if keeps else f"{out}: mtp: keep in the recipe keeps them"
        reporter.note(f"{len(stream.mtp)} tensors of layers for multi-token prediction (MTP) {are}")
    encoded = stream.checkpoint.encoded
    places = stream.checkpoint.headers
    known = {n for e in encoded.values() for n in e.leftovers} | {n for w in stream.unused for n in _stored(stream, w)}
    sizes = {n: e.end - e.begin for h in places.values() for n, e in h.tensors.items() if n in carried}
    if more := sorted(carried - known):
        size = sum(sizes[n] for n in more)
        reporter.note(
            f"{len(more)} tensors ({', '.join(more[:3])}{', ...' * (len(more) > 3)}) are kept a second time as they "
            f"are, {size:,} bytes, for moepack export: the model has them in BF16, joined or tied"
        )
    return sum(sizes.values())


def _stored(stream: StreamedModel, weight: str) -> tuple[str, ...]:
    encoded = stream.checkpoint.encoded.get(weight)
    return (weight,) if encoded is None else encoded.names


def keep_released(
    checkpoint: Path, writer: BundleWriter, exact: Version | None, dense: Mapping[str, Version], mtp: bool
) -> None:
    """Add both files to a bundle that is being written, if it gives the checkpoint back. Arguments as of `held`."""
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.stream import StreamedModel

    stream = StreamedModel(open_checkpoint(checkpoint))
    try:
        found = held(stream, exact, dense, mtp)
    except InputError:  # `announce` said why
        return
    config = json.loads((checkpoint / "config.json").read_text())
    headers = stream.checkpoint.headers
    carried = set(found.carried)
    files = {
        file: {name: [entry.dtype, list(entry.shape)] for name, entry in header.tensors.items()}
        for file, header in headers.items()
    }
    # Models with a tower may have it in their `text_config`, where the bundle's config.json has it still: null here.
    document = {"quantization_config": config.get("quantization_config"), "files": files}
    writer.path(TENSORS).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    writer.add(TENSORS)
    if carried:
        parts = [(checkpoint / file, "") for file, header in headers.items() if carried & set(header.tensors)]
        merge(parts, writer.path(LEFTOVERS), {}, set(stream.checkpoint.file_of) - carried)
        writer.add(LEFTOVERS)
