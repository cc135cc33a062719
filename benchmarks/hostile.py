"""Hostile bundles: what opening, checking and shrinking one does with a manifest, headers, extents, tables and files
that somebody made to break it.

    python -m benchmarks.hostile [--cases 100000] [--first 0] [--json FILE]

Case N is made from its number alone: `--first N --cases 1` makes it again. Every case changes a small whole bundle in
one to three places, and mostly signs it again, so that what is behind the digests is reached. It may open or be refused
by an error of moepack's own (or of the file system). Anything else counts: another exception, ten seconds, two
gigabytes, the end of the process, a byte changed outside the directory that was named.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.common import Target, arguments, finish
from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.errors import MoepackError
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.manifest import MANIFEST, Manifest
from moepack.pack.reader import open_bundle, verify
from moepack.pack.safetensors_file import make_header
from moepack.pack.spec import (
    DenseMatrix,
    ExpertLayer,
    Matrix,
    Version,
    dense_file,
    dense_layers,
    expert_file,
)
from moepack.pack.tables import TABLES, metadata
from moepack.pack.writer import BundleWriter
from moepack.pipeline.shrink import shrink

BATCH, PATIENCE, MEMORY = 500, 10, 2 << 30
LAYERS = tuple(
    ExpertLayer(n, f"model.layers.{n}.mlp.experts", 2, (Matrix("gate_up", 16, 64), Matrix("down", 64, 8)))
    for n in (0, 1)
)
VERSIONS = tuple(Version.of(name, 64) for name in ("bf16", "w4", "w2"))
# What holds the checkpoint in turn, by a case's number: half of them are bundles of BF16 checkpoints.
RELEASED = (
    *(Version.of(name) for name in ("mxfp4", "nvfp4", "mxfp8", "fp8row")),
    *(Version.of(name, 32) for name in ("fp8", "int4", "int8", "int4fp16")),
)
HOLDING = tuple(v for released in RELEASED for v in (VERSIONS[0], released))
DENSE = (
    DenseMatrix(1, "model.layers.1.self_attn.q_proj", Matrix("weight", 17, 64, True)),
    DenseMatrix(None, "lm_head", Matrix("weight", 20, 65)),
)
DENSE_VERSIONS = tuple(Version.of(name, 64) for name in ("bf16", "w8"))
PACKED = ("experts/", "dense/")
NUMBERS = (0, -1, 1, 2, 3, 255, 4095, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 47, 1 << 63, (1 << 64) - 1, 10**400)
TEXTS = (
    "", "..", "../../outside/file", "/etc/passwd", "a/../b", "\0", "w9", "\ud800", "A" * 70_000, "CON", "%s", "{}",
    "config.json",
)  # fmt: skip
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, False, 0.5, 1e308, [], {}, [[]], {"": ""})


class Hang(BaseException):
    """A case took too long."""


def whole(target: Path, holding: Version = VERSIONS[0]) -> None:
    """A bundle with everything that can be changed, of a few pages; `holding` is its version of the checkpoint."""
    versions = (holding, *VERSIONS[1:])
    numbers = np.random.default_rng(0)
    with BundleWriter(target) as writer:
        config: dict[str, Any] = {"model_type": "qwen3_moe", "architectures": ["X"]}
        config["quantization_config"] = {"quant_method": "moepack"}
        writer.path("config.json").write_text(json.dumps(config))
        dense = {"model.norm.weight": ("F32", (8,))} | {f"{x.module}.down_proj": ("BF16", (1,)) for x in LAYERS}
        writer.path("model.safetensors").write_bytes(make_header(dense, {}) + bytes(32 + 2 * len(LAYERS)))
        tables: dict[str, Any] = {}
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
                path = target.with_name(f"{version.name}-{layer.index}")
                with LayerFileWriter(path, version.name, layer) as file:
                    for _ in range(layer.experts):
                        file.add(*_extent(layer.matrices, version, numbers))
                assert file.entry is not None
                writer.adopt(expert_file(version.name, layer.index), path, file.entry)
                path.unlink()
        for version in DENSE_VERSIONS:
            for part in dense_layers(DENSE):
                path = target.with_name(f"dense-{version.name}-{part.label}")
                with LayerFileWriter(path, version.name, part) as file:
                    for m in part.matrices:
                        file.add(*_extent((m.matrix,), version, numbers))
                assert file.entry is not None
                writer.adopt(dense_file(version.name, part.index), path, file.entry)
                path.unlink()
        shape = (len(DENSE), len(DENSE_VERSIONS))
        tables |= {f"dense.{name}": np.full(shape, 0.1, np.float32) for name in ("relative", "mse")}
        tables |= {"dense.method": np.zeros(shape, np.uint8), "dense.signal": np.ones(len(DENSE), np.float32)}
        tables["dense.tokens"] = np.full(len(DENSE), 7)
        columns = metadata([v.name for v in versions], ["rtn"])
        columns["dense_versions"] = ",".join(v.name for v in DENSE_VERSIONS)
        save_file(tables, writer.path(TABLES), columns)
        for name in ("config.json", "model.safetensors", TABLES):
            writer.add(name)
        model: dict[str, Any] = {"model_type": "qwen3_moe", "architecture": "X", "decoder_layers": 2}
        manifest = Manifest(
            {**model, "expert_dtype": next(iter(holding.holds))}, LAYERS, versions, {}, {}, {"recipe": "none"}
        )
        writer.finish(replace(manifest, dense=DENSE, dense_versions=DENSE_VERSIONS))


def _extent(matrices: tuple[Matrix, ...], version: Version, numbers: np.random.Generator) -> tuple[Any, int]:
    if version.plain:
        weights = [numbers.integers(0, 1 << 15, (m.rows, m.cols)).astype(np.uint16) for m in matrices]
        return version.encode(matrices, [LosslessMatrix(w, _bias(m)) for w, m in zip(weights, matrices, strict=True)])
    made: list[Any] = []
    for m in matrices:
        groups = (m.rows, -(-m.cols // (version.group_size or m.cols)))
        codes = numbers.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8)
        if version.released and version.zero == "none":
            bits = np.full(groups, 1, np.float32 if version.scale_dtype == "F32" else np.uint8)
            outer = np.ones(m.rows, np.float32) if version.name == "nvfp4" else None
            made.append(ReleasedMatrix(codes & np.uint8(0xBF), bits, outer, _bias(m)))
            continue
        made.append(AffineMatrix(codes, np.full(groups, 0x3C00, np.uint16), np.ones(groups, np.uint8), _bias(m)))
    return version.encode(matrices, made)


def _bias(matrix: Matrix) -> Any:
    return np.full(matrix.rows, 0x3F80, np.uint16) if matrix.bias else None


class Case:
    """A copy of the whole bundle, as one case changes it; on disk once `write` was called.

    Attributes:
        files: bytes of each, None where there is none.
        others: what stands in place of a file: links, directories, pipes.
        manifest: the manifest's document, without its digest.
        raw: its bytes, where they are no document.
        outside: a file that is nobody's.
    """

    def __init__(self, base: dict[str, bytes], chance: random.Random, outside: Path) -> None:
        self.files: dict[str, bytes | None] = dict(base)
        self.others: dict[str, Callable[[Path], object]] = {}
        self.manifest = json.loads(base[MANIFEST])
        del self.manifest["sha256"]
        self.chance, self.outside = chance, outside
        self.raw: bytes | None = None

    def sign(self, name: str) -> None:
        """Let the manifest say of a file what is true."""
        data, entry = self.files[name], self.manifest["files"].get(name)
        if data is None or not isinstance(entry, dict):
            return
        if "sha256" in entry:
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        else:
            head = data[: entry["header_size"]]
            entry |= {"size": len(data), "header_sha256": hashlib.sha256(head).hexdigest()}

    def write(self, root: Path) -> None:
        """Make the directory of it, whatever stands there."""
        for name, data in self.files.items():
            path = root / name
            if name != MANIFEST and name not in self.others and data is not None:
                if not path.is_file() or path.is_symlink() or path.read_bytes() != data:
                    _clear(path)
                    path.write_bytes(data)
            else:
                _clear(path)
        for name, make in self.others.items():
            make(root / name)
        if MANIFEST not in self.others:
            (root / MANIFEST).write_bytes(self.signed() if self.raw is None else self.raw)

    def signed(self) -> bytes:
        """The manifest's bytes; now and then its digest is left wrong."""
        document = dict(self.manifest)
        if self.chance.random() < 0.95:
            document["sha256"] = hashlib.sha256(_canonical(document)).hexdigest()
        return _canonical(document)


def _canonical(document: Any) -> bytes:
    text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True)
    return (text + "\n").encode()


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*at, key)
        yield from _places(value, (*at, key))


def change(document: Any, chance: random.Random) -> None:
    """A value somewhere in it becomes another, goes, or comes twice."""
    places = list(_places(document))
    if not places:
        return
    at = chance.choice(places)
    where = document
    for key in at[:-1]:
        where = where[key]
    kind = chance.random()
    if kind < 0.6:
        where[at[-1]] = copy.deepcopy(chance.choice(VALUES))
    elif kind < 0.7:
        del where[at[-1]]
    elif kind < 0.8 and isinstance(where, dict):
        where[chance.choice(TEXTS)] = where.pop(at[-1])
    elif isinstance(where, list):
        where.extend(copy.deepcopy(where) * chance.choice((1, 3, 500)))
    else:
        other = document
        for key in chance.choice(places):
            other = other[key]
        where[at[-1]] = copy.deepcopy(other)


def _bytes(data: bytes, chance: random.Random) -> bytes:
    """Bits turned, bytes cut out, doubled or put in."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, size = chance.randrange(len(out) + 1), chance.choice((1, 2, 8, 64, 4096))
        kind = chance.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del out[at : at + size]
        elif kind == 2:
            out[at:at] = out[at : at + size]
        elif kind == 3:
            out[at:at] = chance.choice(
                (b"\xff\xfe\xfd", b"\0" * size, b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000, b"NaN")
            )
        else:
            out[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS[:-1]) & (1 << 64) - 1)
    return bytes(out)


def manifests(case: Case) -> None:
    """The manifest's values."""
    for _ in range(case.chance.choice((1, 1, 2, 3))):
        change(case.manifest, case.chance)


def texts(case: Case) -> None:
    """The manifest's bytes."""
    case.raw = _bytes(case.signed(), case.chance)


def headers(case: Case) -> None:
    """A layer file's header: overlapping extents, holes, counts, names, digests; the file's size stays right."""
    name = case.chance.choice([n for n in case.files if n.startswith(PACKED)])
    data = case.files[name]
    assert data is not None
    (length,) = struct.unpack("<Q", data[:8])
    document = json.loads(data[8 : 8 + length])
    change(document, case.chance)
    text = json.dumps(document, separators=(",", ":")).encode()
    if len(text) <= length or case.chance.random() < 0.5:
        text = text.ljust(length)
    case.files[name] = struct.pack("<Q", len(text)) + text + data[8 + length :]
    if case.chance.random() < 0.9:
        case.sign(name)


def extents(case: Case) -> None:
    """An extent's bytes, with its digest and those above it made right again."""
    name = case.chance.choice([n for n in case.files if n.startswith(PACKED)])
    data = case.files[name]
    assert data is not None
    (length,) = struct.unpack("<Q", data[:8])
    head, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    tensors = sorted(n for n in head if n != "__metadata__")
    number = case.chance.randrange(len(tensors))
    begin, end = head[tensors[number]]["data_offsets"]
    for _ in range(case.chance.choice((1, 4, 64))):
        at = begin + (case.chance.randrange(32) if case.chance.random() < 0.5 else case.chance.randrange(end - begin))
        body[at : at + 4] = struct.pack("<I", case.chance.choice((0, 1, 0xFFFFFFFF, case.chance.getrandbits(32))))
    digests = head["__metadata__"]["sha256"].split(",")
    digests[number] = hashlib.sha256(body[begin:end]).hexdigest()
    head["__metadata__"]["sha256"] = ",".join(digests)
    text = json.dumps(head, separators=(",", ":")).encode().ljust(length)
    case.files[name] = data[:8] + text[:length] + bytes(body[: len(data) - 8 - length])
    case.sign(name)


def tables(case: Case) -> None:
    """The loss tables, header or bytes."""
    data = case.files[TABLES]
    assert data is not None
    if case.chance.random() < 0.6:
        (length,) = struct.unpack("<Q", data[:8])
        document = json.loads(data[8 : 8 + length])
        change(document, case.chance)
        text = json.dumps(document).encode()
        case.files[TABLES] = struct.pack("<Q", len(text)) + text + data[8 + length :]
    else:
        case.files[TABLES] = _bytes(data, case.chance)
    case.sign(TABLES)


def links(case: Case) -> None:
    """Links out, to themselves and to nowhere, directories, pipes and devices in place of files; and missing files."""
    for _ in range(case.chance.choice((1, 1, 3))):
        name = case.chance.choice(list(case.files))
        case.others[name] = case.chance.choice(
            (
                lambda p: p.symlink_to(case.outside),
                lambda p: p.symlink_to(p.name), lambda p: p.symlink_to("nowhere"), lambda p: p.symlink_to("/dev/zero"),
                lambda p: p.symlink_to("."), lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: None,
            )
        )  # fmt: skip
        entry = case.manifest["files"].get(name)
        if isinstance(entry, dict) and case.chance.random() < 0.5:
            entry["size"] = case.chance.choice((0, 12))


def bodies(case: Case) -> None:
    """Any file's bytes, its size and digests made right again or not."""
    name = case.chance.choice([n for n in case.files if n != MANIFEST])
    data = case.files[name]
    assert data is not None
    case.files[name] = _bytes(data, case.chance)
    if case.chance.random() < 0.7:
        case.sign(name)


KINDS: tuple[Callable[[Case], None], ...] = (manifests, texts, headers, extents, tables, links, bodies)
WEIGHTS = (30, 10, 20, 15, 10, 10, 5)


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


def _late(*_: Any) -> None:
    raise Hang


def run(first: int, count: int, work: str, results: Any) -> None:
    """Cases from `first` on, in a process of their own."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0],) * 2)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    signal.signal(signal.SIGALRM, _late)
    place = Path(work)
    bases = {
        base.name: {str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()}
        for base in (place / "base").iterdir()
    }
    out = place / "out"
    for number in range(first, first + count):
        chance, holding = random.Random(number), HOLDING[number % len(HOLDING)]
        case = place / f"case-{holding.name}"
        made = Case(bases[holding.name], chance, place / "outside" / "file")
        kind = chance.choices(KINDS, WEIGHTS)[0]
        kind(made)
        shrinks = not number % 20
        results.send(("begin", number, kind.__name__))
        with contextlib.suppress(ValueError, OverflowError):  # what no file can hold
            made.write(case)
        signal.alarm(PATIENCE)
        try:
            became = attempt(case, out, shrinks)
        except Hang:
            became = f"took more than {PATIENCE} s"
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            became = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        finally:
            signal.alarm(0)
        if out.exists() or shrinks:
            left = [p for p in place.iterdir() if p.name.partition("-")[0] not in ("base", "case", "out", "outside")]
            if left:
                became = f"left {left[0].name}"
            shutil.rmtree(out, ignore_errors=True)
        results.send(("end", number, became))
    results.send(("over", 0, ""))


def outside(work: Path) -> list[tuple[str, int, str]]:
    """Everything that no case may change."""
    found = [p for name in ("base", "outside") for p in sorted((work / name).rglob("*")) if p.is_file()]
    return [(str(p), p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in found]


def hostile(cases: int, first: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows by what was changed, and a line for each case that did something else than open or be refused."""
    counts: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in KINDS}
    wrong: list[str] = []
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "base").mkdir()
        for version in dict.fromkeys(HOLDING):
            whole(work / "base" / version.name, version)
            case = shutil.copytree(work / "base" / version.name, work / f"case-{version.name}")
            assert attempt(case, work / "out", True) == "opened", version.name
            shutil.rmtree(work / "out")
        (work / "outside").mkdir()
        (work / "outside" / "file").write_bytes(b"not yours\n  ")
        before, number = outside(work), first
        while number < first + cases:
            end = min(first + cases, number + BATCH)
            here, there = context.Pipe(False)
            process = context.Process(target=run, args=(number, end - number, folder, there))
            process.start()
            there.close()
            kind = ""
            try:
                while True:
                    said, number, what = here.recv()
                    if said == "over":
                        break
                    kind = what if said == "begin" else kind
                    if said == "end":
                        right = what in ("opened", "refused")
                        counts[kind][what if right else "wrong"] += 1
                        wrong += [] if right else [f"case {number} ({kind}): {what}"]
                number = end
            except EOFError:  # it is gone
                process.join()
                counts[kind]["wrong"] += 1
                wrong.append(f"case {number} ({kind}): the process ended with {process.exitcode}")
                number += 1
            process.join()
            if outside(work) != before:
                wrong.append(f"cases up to {number}: something outside was changed")
                before = outside(work)
    rows: list[dict[str, Any]] = [
        {"changed": name, "cases": sum(c.values()), **{k: c[k] for k in ("opened", "refused", "wrong")}}
        for name, c in counts.items()
    ]
    return rows, wrong


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, help="100,000 without it, or 2,000 with --quick")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    options = parser.parse_args()
    rows, wrong = hostile(options.cases or (2000 if options.quick else 100_000), options.first)
    for line in wrong[:50]:
        print(line)
    targets = [Target("cases that neither opened nor were refused", len(wrong), 0, "lower")]
    finish("Hostile bundles", ["changed", "cases", "opened", "refused", "wrong"], rows, targets, options.json)


if __name__ == "__main__":
    main()
