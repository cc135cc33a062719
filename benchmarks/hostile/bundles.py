"""Small whole bundles of each version that holds a checkpoint, ways to change them, and what then uses them."""

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.common import Row
from benchmarks.limited.bundle import put_layer
from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.bits import Bf16Bits, Buffer
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.errors import MoepackError
from moepack.pack.manifest import MANIFEST, Manifest, canonical
from moepack.pack.reader import open_bundle, verify
from moepack.pack.safetensors_file import make_header
from moepack.pack.spec import DenseMatrix, ExpertLayer, Matrix, Version, dense_layers
from moepack.pack.tables import TABLES, metadata
from moepack.pack.writer import BundleWriter
from moepack.pipeline.shrink import shrink

from .edits import Case, Subject, change, damaged, header_of, with_header

LAYERS = tuple(
    ExpertLayer(n, f"model.layers.{n}.mlp.experts", 2, (Matrix("gate_up", 16, 64), Matrix("down", 64, 8)))
    for n in (0, 1)
)
VERSIONS = tuple(Version.of(name, 64) for name in ("bf16", "w4", "w2"))
# What holds the checkpoint.
HOLDING = (
    VERSIONS[0],
    *(Version.of(name) for name in ("mxfp4", "nvfp4", "mxfp8", "fp8row")),
    *(Version.of(name, 32) for name in ("fp8", "int4", "int8", "int4fp16")),
)
DENSE = (
    DenseMatrix(1, "model.layers.1.self_attn.q_proj", Matrix("weight", 17, 64, True)),
    DenseMatrix(None, "lm_head", Matrix("weight", 20, 65)),
)
DENSE_VERSIONS = tuple(Version.of(name, 64) for name in ("bf16", "w8"))
PACKED = ("experts/", "dense/")


class BundleCase(Case):
    """A copy of a whole bundle.

    Attributes:
        manifest: the manifest's document, without its digest.
        raw: its bytes, where they are no document.
    """

    def __init__(self, base: dict[str, bytes], chance: random.Random, outside: Path) -> None:
        super().__init__(base, chance, outside)
        self.manifest = json.loads(base[MANIFEST])
        del self.manifest["sha256"]
        self.raw: bytes | None = None

    def sign(self, name: str) -> None:
        """Let the manifest say of a file what is true."""
        data = self.files[name]
        entry = self.manifest["files"].get(name)
        if data is None or not isinstance(entry, dict):
            return
        if "sha256" in entry:
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        else:
            head = data[: entry["header_size"]]
            entry |= {"size": len(data), "header_sha256": hashlib.sha256(head).hexdigest()}

    def write(self, root: Path) -> None:
        """See Case; the manifest is made last."""
        self.files[MANIFEST] = self.signed() if self.raw is None else self.raw
        super().write(root)

    def signed(self) -> bytes:
        """The manifest's bytes; now and then its digest is left wrong."""
        document = dict(self.manifest)
        if self.chance.random() < 0.95:
            document["sha256"] = hashlib.sha256(canonical(document)).hexdigest()
        return canonical(document)


def whole(target: Path, holding: Version = VERSIONS[0]) -> None:
    """A bundle with everything that can be changed, of a few pages; `holding` is its version of the checkpoint."""
    versions = (holding, *VERSIONS[1:])
    numbers = np.random.default_rng(0)
    with BundleWriter(target) as writer:
        config: Row = {"model_type": "qwen3_moe", "architectures": ["X"]}
        config["quantization_config"] = {"quant_method": "moepack"}
        writer.path("config.json").write_text(json.dumps(config))
        dense = {"model.norm.weight": ("F32", (8,))} | {f"{x.module}.down_proj": ("BF16", (1,)) for x in LAYERS}
        writer.path("model.safetensors").write_bytes(make_header(dense, {}) + bytes(32 + 2 * len(LAYERS)))
        tables: Row = {}
        for layer in LAYERS:
            shape = (layer.experts, len(versions))
            found = {"tokens": np.full(2, 7), "gate_sum": np.ones(2, np.float32), "method": np.zeros(shape, np.uint8)}
            for loss in ("mse", "relative", "gated"):
                found |= {loss: np.full(shape, 0.1, np.float32), f"{loss}_error": np.full(shape, 0.01, np.float32)}
            found |= {f"{half}_counts": np.ones((3, 2), np.int32) for half in ("prefill", "decode")}
            found |= {"prefill_gates": np.ones((3, 2), np.float32), "coactivation": np.eye(2, dtype=np.int64)}
            found["reuse"] = np.full((), 0.5, np.float32)
            tables |= {f"layers.{layer.index}.{name}": value for name, value in found.items()}
            for version in versions:
                extents = (_extent(layer.matrices, version, numbers) for _ in range(layer.experts))
                put_layer(writer, target.with_name("aside"), version, layer, extents)
        for version in DENSE_VERSIONS:
            for part in dense_layers(DENSE):
                extents = (_extent((m.matrix,), version, numbers) for m in part.matrices)
                put_layer(writer, target.with_name("aside"), version, part, extents)
        shape = (len(DENSE), len(DENSE_VERSIONS))
        tables |= {f"dense.{name}": np.full(shape, 0.1, np.float32) for name in ("relative", "mse")}
        tables |= {"dense.method": np.zeros(shape, np.uint8), "dense.signal": np.ones(len(DENSE), np.float32)}
        tables["dense.tokens"] = np.full(len(DENSE), 7)
        columns = metadata([v.name for v in versions], ["rtn"])
        columns["dense_versions"] = ",".join(v.name for v in DENSE_VERSIONS)
        save_file(tables, writer.path(TABLES), columns)
        for name in ("config.json", "model.safetensors", TABLES):
            writer.add(name)
        model: Row = {"model_type": "qwen3_moe", "architecture": "X", "decoder_layers": 2}
        manifest = Manifest(
            {**model, "expert_dtype": next(iter(holding.holds))}, LAYERS, versions, {}, {}, {"recipe": "none"}
        )
        writer.finish(replace(manifest, dense=DENSE, dense_versions=DENSE_VERSIONS))


def _extent(matrices: tuple[Matrix, ...], version: Version, numbers: np.random.Generator) -> tuple[Buffer, int]:
    if version.plain:
        weights = [numbers.integers(0, 1 << 15, (m.rows, m.cols)).astype(np.uint16) for m in matrices]
        return version.encode(matrices, [LosslessMatrix(w, _bias(m)) for w, m in zip(weights, matrices, strict=True)])
    made: list[AffineMatrix | ReleasedMatrix] = []
    for m in matrices:
        groups = (m.rows, -(-m.cols // (version.group_size or m.cols)))
        codes = numbers.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8)
        if version.entropy_coded and m.cols > 8:  # of few values, so that they are kept coded; others plain
            codes &= np.uint8(0x83)
        if version.released and version.zero == "none":
            bits = np.full(groups, 1, np.float32 if version.scale_dtype == "F32" else np.uint8)
            outer = np.ones(m.rows, np.float32) if version.name == "nvfp4" else None
            made.append(ReleasedMatrix(codes & np.uint8(0xBF), bits, outer, _bias(m)))
            continue
        made.append(AffineMatrix(codes, np.full(groups, 0x3C00, np.uint16), np.ones(groups, np.uint8), _bias(m)))
    return version.encode(matrices, made)


def _bias(matrix: Matrix) -> Bf16Bits | None:
    return np.full(matrix.rows, 0x3F80, np.uint16) if matrix.bias else None


def manifests(case: BundleCase) -> None:
    """The manifest's values."""
    for _ in range(case.chance.choice((1, 1, 2, 3))):
        change(case.manifest, case.chance)


def texts(case: BundleCase) -> None:
    """The manifest's bytes."""
    case.raw = damaged(case.signed(), case.chance)


def headers(case: BundleCase) -> None:
    """A layer file's header: overlapping extents, holes, counts, names, digests; the file's size stays right."""
    name = case.chance.choice([n for n in case.files if n.startswith(PACKED)])
    data = case.data(name)
    document, body = header_of(data)
    length = len(data) - len(body) - 8
    change(document, case.chance)
    changed = with_header(document, body)
    if len(changed) <= len(data) or case.chance.random() < 0.5:
        changed = with_header(document, body, length)
    case.files[name] = changed
    if case.chance.random() < 0.9:
        case.sign(name)


def extents(case: BundleCase) -> None:
    """An extent's bytes, with its digest and those above it made right again."""
    name = case.chance.choice([n for n in case.files if n.startswith(PACKED)])
    data = case.data(name)
    head, rest = header_of(data)
    body = bytearray(rest)
    tensors = sorted(n for n in head if n != "__metadata__")
    number = case.chance.randrange(len(tensors))
    begin, end = head[tensors[number]]["data_offsets"]
    for _ in range(case.chance.choice((1, 4, 64))):
        at = begin + case.chance.randrange(case.chance.choice((32, 1024, end - begin)))
        body[at : at + 4] = struct.pack("<I", case.chance.choice((0, 1, 0xFFFFFFFF, case.chance.getrandbits(32))))
    digests = head["__metadata__"]["sha256"].split(",")
    digests[number] = hashlib.sha256(body[begin:end]).hexdigest()
    head["__metadata__"]["sha256"] = ",".join(digests)
    case.files[name] = with_header(head, bytes(body), len(data) - len(rest) - 8)
    case.sign(name)


def tables(case: BundleCase) -> None:
    """The loss tables, header or bytes."""
    data = case.data(TABLES)
    if case.chance.random() < 0.6:
        document, body = header_of(data)
        change(document, case.chance)
        case.files[TABLES] = with_header(document, body)
    else:
        case.files[TABLES] = damaged(data, case.chance)
    case.sign(TABLES)


def links(case: BundleCase) -> None:
    """Links out, to themselves and to nowhere, directories, pipes and devices in place of files; and missing files."""
    for _ in range(case.chance.choice((1, 1, 3))):
        name = case.chance.choice(list(case.files))
        case.others[name] = case.chance.choice(
            (
                lambda p: p.symlink_to(case.outside),
                lambda p: p.symlink_to(p.name),
                lambda p: p.symlink_to("nowhere"),
                lambda p: p.symlink_to("/dev/zero"),
                lambda p: p.symlink_to("."),
                lambda p: p.mkdir(),
                lambda p: os.mkfifo(p),
                lambda p: None,
            )
        )
        entry = case.manifest["files"].get(name)
        if isinstance(entry, dict) and case.chance.random() < 0.5:
            entry["size"] = case.chance.choice((0, 12))


def bodies(case: BundleCase) -> None:
    """Any file's bytes, its size and digests made right again or not."""
    name = case.chance.choice([n for n in case.files if n != MANIFEST])
    case.files[name] = damaged(case.data(name), case.chance)
    if case.chance.random() < 0.7:
        case.sign(name)


KINDS: dict[Callable[[BundleCase], None], int] = {
    manifests: 30,
    texts: 10,
    headers: 20,
    extents: 15,
    tables: 10,
    links: 10,
    bodies: 5,
}


def attempt(root: Path, out: Path, shrinks: bool) -> str:
    """Open, check, read tables, decode, now and then shrink: "opened" or "refused"."""
    try:
        bundle = open_bundle(root)
        found = [p for _, problems in verify(bundle) for p in problems]
        bundle.calibration()
        with np.errstate(invalid="ignore", over="ignore"):  # scales and codes that verify has found
            for version in bundle.versions:
                for layer in bundle.layers:
                    bundle.expert(version.name, layer.index, 0).numpy()
        if shrinks:
            shrink(root, out, [bundle.versions[-1].name])
        return "refused" if found else "opened"
    except (MoepackError, OSError):
        return "refused"


SUBJECTS = tuple(Subject(f"bundle of {v.name}", partial(whole, holding=v), BundleCase, KINDS, attempt) for v in HOLDING)
