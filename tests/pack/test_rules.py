"""Every rule of FORMAT.md with an edit that breaks it and nothing else: refused in one line, by the kind of problem.

What is edited is signed again where a digest would find it, so that the rule is tested. Random edits are at the end;
`python -m benchmarks.hostile` makes others.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_edits import KINDS as RANDOM
from hostile_edits import Victim, attack, canonical, one_line, read_all, refusal, signed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_bundle import DENSE as DENSE_MATRICES
from small_bundle import (
    DENSE_VERSIONS,
    LAYERS,
    MATRICES,
    VERSIONS,
    affine,
    lossless,
    write_small_bundle,
)
from support import ROOT

from moepack.cli import main
from moepack.pack.checks import check_affine, check_lossless
from moepack.pack.errors import KINDS, BundleError, InputError, Problem, printable
from moepack.pack.files import open_file
from moepack.pack.reader import open_bundle, unlisted
from moepack.pack.spec import affine_sections

Do = Callable[[Victim], object]
BF16, W4, W3, W1 = (f"experts/{v}/layer-001.safetensors" for v in ("bf16", "w4", "w3", "w1"))
Q1, Q8, HEAD = "dense/bf16/layer-001.safetensors", "dense/w8/layer-001.safetensors", "dense/w4/head.safetensors"
MANIFEST, CONFIG, DENSE, TABLES = "manifest.json", "config.json", "model.safetensors", "calibration.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_bundle(tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture(scope="module")
def copied(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim(small, tmp_path_factory.mktemp("victim"))


@pytest.fixture
def victim(copied: Victim) -> Iterator[Victim]:
    yield copied
    copied.restore()


def problems_of(path: Path) -> list[Problem]:
    """What opening, the tables or `verify` says."""
    try:
        bundle = open_bundle(path)
        bundle.calibration()
        return bundle.verify()
    except BundleError as error:
        return list(error.problems)


# --- edits of the manifest


def put(*path: Any) -> Callable[[Any], Do]:
    """Set a field of the manifest, and sign it."""

    def with_value(value: Any) -> Do:
        def change(document: Any) -> None:
            for key in path[:-1]:
                document = document[key]
            document[path[-1]] = value

        return lambda v: v.sign(change)

    return with_value


def signs(change: Callable[[Any], object]) -> Do:
    return lambda v: v.sign(change)


def listed(path: str) -> Do:
    """One more file in the manifest."""
    return signs(lambda d: d["files"].update({path: dict(d["files"][CONFIG])}))


def replaced(old: str, new: str) -> Do:
    """Text of the manifest replaced, and what comes of it signed as it stands: what no JSON writer would write."""

    def edit(v: Victim) -> None:
        document = {k: x for k, x in v.manifest.items() if k != "sha256"}
        text = canonical(document).decode()
        assert text.count(old) >= 1, old
        digest = hashlib.sha256(text.replace(old, new, 1).encode()).hexdigest()
        text = canonical({**document, "sha256": digest}).decode()
        v.write(MANIFEST, text.replace(old, new, 1).encode())

    return edit


def renamed(first: str) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for layer in document["layers"]:
            layer["matrices"][0]["name"] = first

    return change


def encoded(encoding: str) -> Do:
    return lambda v: v.write(MANIFEST, signed(dict(v.manifest)).decode().encode(encoding))


def without_dense(document: Any) -> None:
    """As if no dense matrix had versions; its files stay listed."""
    document.pop("dense")
    document["allocation"].pop("dense")


def all_without_dense(document: Any) -> None:
    """The same, and its files go."""
    without_dense(document)
    for name in [n for n in document["files"] if n.startswith("dense/")]:
        document["files"].pop(name)


MODEL = put("model")
ROWS, COLS = (lambda m, value, k=k: put("layers", 0, "matrices", m, k)(value) for k in ("rows", "cols"))
MANIFESTS: dict[str, tuple[Do, str]] = {
    "larger than 64 MiB": (lambda v: (v.write(MANIFEST, b""), os.truncate(v.path / MANIFEST, (64 << 20) + 1)), "size"),
    "empty": (lambda v: v.write(MANIFEST, b""), "json"),
    "not an object": (lambda v: v.write(MANIFEST, b"[]\n"), "format"),
    "nested deeply": (lambda v: v.write(MANIFEST, b'{"a":' * 90_000), "json"),
    "UTF-16": (encoded("utf-16"), "json"),
    "a byte-order mark": (encoded("utf-8-sig"), "json"),
    "no UTF-8": (lambda v: v.write(MANIFEST, b'{"format": "\xff"}'), "json"),
    "a name twice": (replaced(' "format": "moepack",\n', ' "format": "moepack",\n "format": "moepack",\n'), "json"),
    "white space": (replaced('": ', '":  '), "canonical"),
    "an escape of a letter": (replaced('"moepack"', '"m\\u006fepack"'), "canonical"),
    "not signed": (lambda v: v.write(MANIFEST, canonical({**v.manifest, "sha256": "0" * 64})), "digest"),
    "a digest that is no text": (lambda v: v.write(MANIFEST, canonical({**v.manifest, "sha256": 1})), "digest"),
    "a later version": (put("format_version")(4), "format-version"),
    "w8 in version 2": (put("format_version")(2), "value"),
    "a version that is true": (put("format_version")(True), "format-version"),
    "a version with a point": (put("format_version")(2.0), "json"),
    "a number with a point": (put("layers", 0, "experts")(3.0), "json"),
    "a number with a point in the provenance": (put("provenance")({"a": [1.5]}), "json"),
    "a number with an exponent": (replaced('"experts": 3', '"experts": 3e0'), "json"),
    "minus zero": (replaced('"index": 1', '"index": -0'), "canonical"),
    "NaN": (put("provenance")({"a": float("nan")}), "json"),
    "an infinite number": (put("provenance")({"a": float("inf")}), "json"),
    "a number of 5000 digits": (replaced('"experts": 3', '"experts": ' + "3" * 5000), "json"),
    "a key less": (signs(lambda d: d.pop("provenance")), "keys"),
    "a key more": (put("x")(1), "keys"),
    "provenance no object": (put("provenance")([]), "type"),
    "model no object": (MODEL(None), "type"),
    "no model type": (signs(lambda d: d["model"].pop("model_type")), "text"),
    "an escape sequence": (put("model", "model_type")("\x1b[31mred"), "text"),
    "a model type of two lines": (put("model", "model_type")("a\nb"), "text"),
    "architecture no text": (put("model", "architecture")(7), "text"),
    "an unknown dtype": (put("model", "expert_dtype")("F4"), "value"),
    "no decoder layers": (put("model", "decoder_layers")(0), "range"),
    "fewer decoder layers than have experts": (put("model", "decoder_layers")(4), "count"),
    "no layers": (put("layers")([]), "count"),
    "layers that fall": (put("layers", 1, "index")(0), "order"),
    "an index too large": (put("layers", 1, "index")(4096), "range"),
    "no experts": (put("layers", 0, "experts")(0), "range"),
    "too many experts": (put("layers", 0, "experts")(65537), "range"),
    "true experts": (put("layers", 0, "experts")(True), "range"),
    "a module that is no name": (put("layers", 0, "module")("model layers"), "text"),
    "a module with an escape": (put("layers", 0, "module")("a.\x1b"), "text"),
    "one module twice": (put("layers", 1, "module")("model.layers.1.mlp.experts"), "value"),
    "one matrix": (signs(lambda d: d["layers"][0]["matrices"].pop()), "count"),
    "three matrices": (signs(lambda d: d["layers"][0]["matrices"].append({})), "type"),
    "another matrix": (put("layers", 0, "matrices", 1, "name")("gate"), "value"),
    "no rows": (ROWS(0, 0), "range"),
    "rows below zero": (ROWS(0, -18), "range"),
    "rows past the limit": (ROWS(0, (1 << 24) + 1), "range"),
    "an expert past 4 GiB": (
        signs(lambda d: [m.update(rows=1 << 17, cols=1 << 16) for m in d["layers"][0]["matrices"]]), "overflow"
    ),
    "gate_up without two rows a column of down": (ROWS(0, 20), "shape"),
    "up with two rows a column of down": (signs(renamed("up")), "shape"),
    "down without a row a column of gate_up": (COLS(0, 36), "shape"),
    "a bias that is a number": (put("layers", 0, "matrices", 0, "bias")(1), "type"),
    "no versions": (put("versions")([]), "order"),
    "an unknown version": (put("versions", 1, "name")("w9"), "value"),
    "versions out of order": (signs(lambda d: d["versions"].reverse()), "order"),
    "a version twice": (signs(lambda d: d["versions"].insert(1, d["versions"][1])), "order"),
    "another encoding": (put("versions", 1, "encoding")("gguf"), "encoding"),
    "other bits": (put("versions", 1, "bits")(5), "encoding"),
    "bits that are true": (put("versions", 5, "bits")(True), "encoding"),
    "another group": (put("versions", 1, "group_size")(48), "encoding"),
    "another zero": (put("versions", 5, "zero")("stored"), "encoding"),
    "a file of no list": (put("files")([]), "type"),
    "an entry of no object": (put("files", CONFIG)([]), "type"),
    "an entry with more": (put("files", CONFIG, "mode")(1), "keys"),
    "a size below zero": (put("files", CONFIG, "size")(-1), "range"),
    "a size past the limit": (put("files", CONFIG, "size")((1 << 48) + 1), "range"),
    "a digest in capitals": (signs(lambda d: d["files"][CONFIG].update(sha256="A" * 64)), "digest"),
    "a short digest": (put("files", W4, "header_sha256")("a" * 63), "digest"),
    "the manifest lists itself": (listed(MANIFEST), "path"),
    "a header not of whole pages": (put("files", W4, "header_size")(4000), "alignment"),
    "a header larger than its file": (put("files", W4, "header_size")(1 << 30), "range"),
    "a header of 200 MB": (signs(lambda d: d["files"][BF16].update(size=1 << 30, header_size=200 << 20)), "range"),
    "a payload larger than its file": (put("files", BF16, "payload")(1 << 30), "range"),
    "the payload of w4": (signs(lambda d: d["files"][W4].update(payload=d["files"][W4]["payload"] - 1)), "size"),
    "the payload of bf16": (signs(lambda d: d["files"][BF16].update(payload=d["files"][BF16]["payload"] + 1)), "size"),
    "a layer file less": (signs(lambda d: d["files"].pop(W4)), "missing"),
    "a layer file more": (
        signs(lambda d: d["files"].update({"experts/w4/layer-002.safetensors": d["files"][W4]})), "unexpected"
    ),
    "a layer file by another name": (
        signs(lambda d: d["files"].update({"experts/w4/layer-1.safetensors": d["files"].pop(W4)})), "unexpected"
    ),
    "no config": (signs(lambda d: d["files"].pop(CONFIG)), "missing"),
    "no tables": (lambda v: (v.sign(lambda d: d["files"].pop(TABLES)), v.replace(TABLES, str)), "missing"),
    "no dense tensors": (signs(lambda d: d["files"].pop(DENSE)), "missing"),
    "dense tensors and an index": (listed("model.safetensors.index.json"), "missing"),
    "an allocation that is a list": (put("allocation")([]), "type"),
    "an allocation with more": (put("allocation", "x")(1), "keys"),
    "an allocation of another layer": (signs(lambda d: d["allocation"]["versions"].append(["w4"] * 3)), "count"),
    "an allocation of fewer experts": (signs(lambda d: d["allocation"]["versions"][0].pop()), "count"),
    "an allocation to no version": (put("allocation", "versions", 0, 0)("w9"), "value"),
    "an allocation to a list": (put("allocation", "versions", 0, 0)([]), "value"),
    "dense: null": (put("dense")(None), "type"),
    "dense: a key more": (put("dense", "x")(1), "keys"),
    "dense: a key less": (signs(lambda d: d["dense"].pop("versions")), "keys"),
    "dense: no matrices": (put("dense", "matrices")([]), "count"),
    "dense: matrices that are an object": (put("dense", "matrices")({}), "type"),
    "dense: a matrix with more": (put("dense", "matrices", 0, "name")("weight"), "keys"),
    "dense: a layer past the limit": (put("dense", "matrices", 0, "layer")(4096), "range"),
    "dense: a layer that is true": (put("dense", "matrices", 0, "layer")(True), "range"),
    "dense: layers that fall": (put("dense", "matrices", 1, "layer")(0), "order"),
    "dense: what is outside first": (put("dense", "matrices", 0, "layer")(None), "order"),
    "dense: a layer that the model does not have": (put("model", "decoder_layers")(5), "count"),
    "dense: one module twice": (put("dense", "matrices", 3, "module")("model.layers.5.mlp.up_proj"), "value"),
    "dense: a module that is no name": (put("dense", "matrices", 3, "module")("lm head"), "text"),
    "dense: no rows": (put("dense", "matrices", 3, "rows")(0), "range"),
    "dense: columns past the limit": (put("dense", "matrices", 3, "cols")((1 << 24) + 1), "range"),
    "dense: a matrix past 4 GiB": (
        signs(lambda d: d["dense"]["matrices"][3].update(rows=1 << 16, cols=1 << 15)), "overflow"
    ),
    "dense: a bias that is a number": (put("dense", "matrices", 3, "bias")(0), "type"),
    "dense: no versions": (put("dense", "versions")([]), "order"),
    "dense: versions out of order": (signs(lambda d: d["dense"]["versions"].reverse()), "order"),
    "dense: an unknown version": (put("dense", "versions", 1, "name")("w9"), "value"),
    "dense: other bits": (put("dense", "versions", 1, "bits")(7), "encoding"),
    "dense: a file less": (signs(lambda d: d["files"].pop(HEAD)), "missing"),
    "dense: a file more": (
        signs(lambda d: d["files"].update({"dense/w8/layer-003.safetensors": d["files"][Q8]})), "unexpected"
    ),
    "dense: files, and no matrices": (signs(without_dense), "unexpected"),
    "dense: the size of w8": (put("files", Q8, "size")(1 << 20), "size"),
    "dense: the payload of w8": (signs(lambda d: d["files"][Q8].update(payload=d["files"][Q8]["payload"] - 1)), "size"),
    "dense: the payload of bf16": (
        signs(lambda d: d["files"][Q1].update(payload=d["files"][Q1]["payload"] + 1)), "size"
    ),
    "dense: in format 2": (put("format_version")(2), "keys"),
    "an allocation of fewer dense matrices": (signs(lambda d: d["allocation"]["dense"].pop()), "count"),
    "an allocation of a dense matrix to no version": (put("allocation", "dense", 0)("w3"), "value"),
    "an allocation of dense matrices that have no versions": (signs(lambda d: d.pop("dense")), "keys"),
    "an allocation's name with an escape": (put("allocation", "name")("\x1b]0;x\x07"), "text"),
}  # fmt: skip
PATHS = (
    "", ".", "..", "/etc/passwd", "../evil", "a/../b", "a/./b", "a//b", "a/", "./a", "a\\b", "C:x", "a*b", 'a"b', "a|b",
    "a\nb", "a\x1b[31m", "a\x7fb", "\u202eb", ".hidden", "a/.git/b", "a.", "a ", " a", "x" * 256, "é" * 128,
    "a/" * 512 + "a",
    "e\u0301", "\ud800", "CONFIG.json", "Manifest.json", "config.json/a", "Experts", "experts",
)  # fmt: skip
MANIFESTS |= {f"a path {path[:20]!r}": (listed(path), "path") for path in PATHS}


# --- edits of files


def linked(name: str, target: str) -> Do:
    return lambda v: v.replace(name, lambda p: p.symlink_to(target))


def to_itself(name: str, elsewhere: str) -> Do:
    """A link to what stood there, moved to another name in the bundle's own directory or above."""

    def edit(v: Victim) -> None:
        moved = v.path / elsewhere
        if moved.is_dir():
            shutil.rmtree(moved)
        shutil.copytree(v.path / name, moved) if (v.path / name).is_dir() else shutil.copyfile(v.path / name, moved)
        v.replace(name, lambda p: p.symlink_to(moved))

    return edit


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s, contextlib.chdir(path.parent):
        s.bind(path.name)


def longer(name: str, by: int) -> Do:
    def edit(v: Victim) -> None:
        data = (v.path / name).read_bytes()
        v.write(name, data + bytes(by) if by > 0 else data[:by])

    return edit


FILES: dict[str, tuple[Do, str]] = {
    "a link out": (linked(CONFIG, "/etc/passwd"), "link"),
    "a link to nowhere": (linked(CONFIG, "nowhere"), "link"),
    "a link to itself": (linked(CONFIG, CONFIG), "link"),
    "a link in the bundle": (to_itself(CONFIG, ".config"), "link"),
    "a layer file that is a link": (to_itself(W4, "../w4"), "link"),
    "a folder that is a link": (to_itself("experts/w4", "../folder"), "link"),
    "all experts behind a link": (to_itself("experts", "../all"), "link"),
    "the manifest a link": (to_itself(MANIFEST, ".manifest"), "link"),
    "the manifest a pipe": (lambda v: v.replace(MANIFEST, os.mkfifo), "file-type"),
    "the manifest a folder": (lambda v: v.replace(MANIFEST, Path.mkdir), "file-type"),
    "the config a pipe": (lambda v: v.replace(CONFIG, os.mkfifo), "file-type"),
    "the config a socket": (lambda v: v.replace(CONFIG, listening), "file-type"),
    "a layer file a pipe": (lambda v: v.replace(W4, os.mkfifo), "file-type"),
    "a layer file a folder": (lambda v: v.replace(W4, Path.mkdir), "file-type"),
    "no config": (lambda v: v.replace(CONFIG, str), "missing"),
    "no tables": (lambda v: v.replace(TABLES, str), "missing"),
    "part of a version": (lambda v: v.replace(W4, str), "missing"),
    "no version": (lambda v: v.replace("experts", str), "missing"),
    "part of a version of dense matrices": (lambda v: v.replace(Q8, str), "missing"),
    "no version of dense matrices": (lambda v: v.replace("dense", str), "missing"),
    "a file of dense matrices that is a link": (to_itself(Q8, "../q8"), "link"),
    "a folder of dense matrices that is a link": (to_itself("dense/w8", "../folder8"), "link"),
    "a file of dense matrices a pipe": (lambda v: v.replace(Q8, os.mkfifo), "file-type"),
    "a short file": (longer(W4, -4096), "size"),
    "a long file": (longer(DENSE, 1), "size"),
    "a byte of the config": (lambda v: v.write(CONFIG, (v.path / CONFIG).read_bytes().replace(b"q", b"Q")), "digest"),
    "a byte of the tables": (
        lambda v: v.write(TABLES, (d := (v.path / TABLES).read_bytes())[:-1] + bytes([d[-1] ^ 1])), "digest"
    ),
    "a config that is no JSON": (lambda v: v.rewrite(CONFIG, b"{"), "json"),
    "a config that is a list": (lambda v: v.rewrite(CONFIG, b"[]"), "value"),
    "a config of another quantiser": (
        lambda v: v.rewrite(CONFIG, b'{"quantization_config": {"quant_method": "gptq"}}'), "value"
    ),
}  # fmt: skip


# --- edits of headers


def head(name: str, *path: Any) -> Callable[[Any], Do]:
    """Set a field of a safetensors header, and sign it."""

    def with_value(value: Any) -> Do:
        def change(document: Any) -> Any:
            inner = document
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            return document

        return lambda v: v.header(name, change)

    return with_value


def headed(name: str, change: Callable[[Any], Any]) -> Do:
    return lambda v: v.header(name, change)


def texted(name: str, old: bytes, new: bytes) -> Do:
    """Text of a header replaced, by text as long, or shorter."""

    def change(document: Any) -> bytes:
        text = json.dumps(document, separators=(",", ":")).encode()
        assert old in text
        return text.replace(old, new, 1)

    return lambda v: v.header(name, change)


def lengthened(v: Victim) -> None:
    """A length in the first 8 bytes that leaves a page of the header out; the manifest has the digest of the rest."""
    data = (v.path / W4).read_bytes()
    v.write(W4, struct.pack("<Q", struct.unpack("<Q", data[:8])[0] - 8) + data[8:])
    size = v.manifest["files"][W4]["header_size"]
    digest = hashlib.sha256((v.path / W4).read_bytes()[:size]).hexdigest()
    v.sign(lambda d: d["files"][W4].update(header_sha256=digest))


def swapped(document: Any) -> Any:
    a, b = (document[f"expert.0000{e}"]["data_offsets"] for e in (0, 1))
    document["expert.00000"]["data_offsets"], document["expert.00001"]["data_offsets"] = b, a
    return document


E0, META = "expert.00000", "__metadata__"
HEADERS: dict[str, tuple[Do, str]] = {
    "a name twice": (texted(W4, b'"expert.00001"', b'"expert.00000"'), "header"),
    "a number with a point": (texted(BF16, b'"shape":[', b'"shape":[0.0,'), "header"),
    "not an object": (headed(W4, lambda d: [d]), "header"),
    "white space before it": (headed(W4, lambda d: b" " + json.dumps(d).encode()), "header"),
    "no UTF-8": (texted(W4, b'"version"', b'"versi\xffn"'), "header"),
    "the length": (lengthened, "header"),
    "a tensor with more": (head(W4, E0, "x")(1), "header"),
    "a tensor less": (headed(W4, lambda d: {k: v for k, v in d.items() if k != "expert.00002"}), "trailing"),
    "a tensor more": (head(W4, "x")({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "header"),
    "another name": (headed(W4, lambda d: {("expert.0000" if k == E0 else k): v for k, v in d.items()}), "header"),
    "another dtype": (headed(W4, lambda d: (d[E0].update(dtype="I8"), d)[1]), "header"),
    "an unknown dtype": (head(W4, E0, "dtype")("U3"), "header"),
    "a dtype that is a list": (head(W4, E0, "dtype")(["U8"]), "header"),
    "two dimensions": (headed(W4, lambda d: (d[E0].update(shape=[1, *d[E0]["shape"]]), d)[1]), "header"),
    "experts out of order": (headed(W4, swapped), "alignment"),
    "an extent of a page less": (
        headed(BF16, lambda d: (d[E0].update(shape=[0], data_offsets=[0, 0]), d)[1]), "offsets"
    ),
    "another layer": (head(W4, META, "layer")("4"), "header"),
    "a layer with a zero before it": (head(W4, META, "layer")("01"), "header"),
    "another version": (head(W4, META, "version")("w3"), "header"),
    "another format": (head(W4, META, "format")("moepack.experts/2"), "header"),
    "metadata with more": (head(W4, META, "x")(""), "header"),
    "metadata that are numbers": (head(W4, META, "layer")(1), "header"),
    "a digest less": (headed(W4, lambda d: (d[META].update(sha256=d[META]["sha256"][65:]), d)[1]), "header"),
    "digests in capitals": (
        headed(W4, lambda d: (d[META].update(sha256=d[META]["sha256"].upper()), d)[1]), "digest"
    ),
    "dense matrices: another layer": (head(HEAD, META, "layer")("1"), "header"),
    "dense matrices: another version": (head(Q8, META, "version")("w4"), "header"),
    "dense matrices: the format of experts": (head(Q8, META, "format")("moepack.experts/1"), "header"),
    "dense matrices: another number": (texted(HEAD, b"dense.00003", b"dense.00000"), "header"),
    "dense matrices: the name of an expert": (texted(HEAD, b"dense.00003", b"expert.00003"), "header"),
    "dense matrices: a digest less": (
        headed(Q8, lambda d: (d[META].update(sha256=d[META]["sha256"][65:]), d)[1]), "header"
    ),
    "dense matrices: an extent of a page less": (
        headed(Q1, lambda d: (d["dense.00000"].update(shape=[0], data_offsets=[0, 0]), d)[1]), "offsets"
    ),
    "dense: a weight that has versions": (texted(DENSE, b'"a.weight"', b'"lm_head.weight"'), "tables"),
    "dense: a bias that has versions": (texted(DENSE, b'"b"', b'"lm_head.bias"'), "tables"),
    "tables: a name twice": (texted(TABLES, b'"layers.4.mse"', b'"layers.1.mse"'), "header"),
    "dense: a name twice": (texted(DENSE, b'"a.weight"', b'"b"'), "header"),
    "dense: no tripwire": (texted(DENSE, b"down_proj", b"down_porj"), "tables"),
    "dense: a tripwire of another shape": (
        headed(DENSE, lambda d: (d["model.layers.1.mlp.experts.down_proj"].update(shape=[1, 1]), d)[1]), "tables"
    ),
    "dense: an escape in a name": (texted(DENSE, b'"data_offsets":[0', b'"\\u001b[31m":[0'), "header"),
    "dense: offsets that fall": (headed(DENSE, lambda d: (d["b"].update(data_offsets=[4, 0]), d)[1]), "offsets"),
    "dense: an offset past the end": (headed(DENSE, lambda d: (d["b"].update(data_offsets=[18, 99]), d)[1]), "offsets"),
}  # fmt: skip


# --- edits of extents

SECTIONS = {v.name: affine_sections(MATRICES, v) for v in VERSIONS if not v.is_lossless}


def at(name: str, place: int, value: int, expert: int = 0) -> Do:
    """Set a byte of an extent, and sign it."""
    return lambda v: v.extent(name, expert, lambda room: room.__setitem__(place, value))


def section(version: str, kind: str, matrix: int = 0) -> Any:
    return next(s for s in SECTIONS[version] if (s.matrix, s.kind) == (matrix, kind))


def gap(version: str) -> int:
    """A byte between two sections that is in neither."""
    return next(a.end for a, b in zip(SECTIONS[version], SECTIONS[version][1:], strict=False) if a.end < b.offset)


def scaled(bits: int) -> Do:
    low = section("w4", "scale").offset
    return lambda v: v.extent(W4, 1, lambda room: room[low : low + 2].view("<u2").__setitem__(0, bits))


def word(place: int, value: int, expert: int = 1, matrix: int = 0) -> Do:
    """Set a 32-bit word of a coded matrix."""

    def change(room: np.ndarray[Any, Any]) -> None:
        offset = int(room[16 * matrix : 16 * matrix + 4].view("<u4")[0]) + place
        room[offset : offset + 4].view("<u4")[0] = value

    return lambda v: v.extent(BF16, expert, change)


def coded(change: Callable[[np.ndarray[Any, Any], dict[str, Any]], object], expert: int = 1) -> Do:
    """Change the first coded matrix of an expert, given its bytes and where its parts are in them."""

    def edit(room: np.ndarray[Any, Any]) -> None:
        offset, size = (int(x) for x in room[:8].view("<u4"))
        data = room[offset : offset + size]
        _, tiles, words, patches = (int(x) for x in data[:16].view("<u4"))
        at_patches = 48 + 8 * (tiles + 1)
        parts = {
            "patches": data[at_patches : at_patches + 4 * patches].view("<u4"),
            "stream": data[at_patches + 4 * patches : at_patches + 4 * (patches + words)].view("<u4"),
        }
        change(data, parts)

    return lambda v: v.extent(BF16, expert, edit)


def reversed_patches(data: np.ndarray[Any, Any], parts: dict[str, Any]) -> None:
    assert len(parts["patches"]) > 1
    parts["patches"][:] = parts["patches"][::-1].copy()


def twice(data: np.ndarray[Any, Any], parts: dict[str, Any]) -> None:
    parts["patches"][1] = parts["patches"][0]


def loose(data: np.ndarray[Any, Any], parts: dict[str, Any]) -> None:
    """The last bit of a coded tile's last word, which this tile does not fill."""
    stream = parts["stream"]
    total = 32 * int(stream[0] & 0xFFFF) + int(stream[1:9].view(np.uint8).sum())
    assert total % 32 and not stream[-1] & 1 and stream[0] >> 16 == 0
    stream[-1] |= 1


def raw_tail(data: np.ndarray[Any, Any], parts: dict[str, Any]) -> None:
    assert parts["stream"][0] >> 16 == 1
    parts["stream"][-1] |= 1 << 31


def unused_symbol(data: np.ndarray[Any, Any], parts: dict[str, Any]) -> None:
    """Give up a symbol: its code word's length stands at another, so that the code stays complete."""
    data[16 + 15] = 3


def moved(part: int, by: int) -> Do:
    """Another offset of a part of a lossless extent: 0 the first matrix, 1 its bias, 2 ..."""
    return lambda v: v.extent(BF16, 1, lambda room: room[8 * part : 8 * part + 4].view("<u4").__iadd__(by))


Q8_SECTIONS = affine_sections((DENSE_MATRICES[0].matrix,), DENSE_VERSIONS[1])
EXTENTS: dict[str, tuple[Do, str]] = {
    "a byte of a dense matrix that is not signed": (
        lambda v: v.write(Q8, (v.path / Q8).read_bytes()[:-1] + b"\x01"), "digest"
    ),
    "a dense scale that is NaN": (
        lambda v: v.extent(Q8, 0, lambda r: r[(o := Q8_SECTIONS[1].offset) : o + 2].view("<u2").__setitem__(0, 0x7FC0)),
        "number",
    ),
    "a dense row past the last": (at(Q8, Q8_SECTIONS[0].end - 1, 1), "padding"),
    "a dense column past the last": (at(Q8, Q8_SECTIONS[0].offset + 4 * 9 * 16 + 3, 1), "padding"),
    "the end of a dense page": (at(HEAD, -1, 1), "padding"),
    "bf16: an offset of a dense matrix that leaves": (
        lambda v: v.extent(Q1, 0, lambda r: r[:4].view("<u4").__iadd__(1 << 20)), "codec"
    ),
    "bf16: the end of a dense page": (at(Q1, -1, 1, 1), "padding"),
    "a byte that is not signed": (
        lambda v: v.write(W4, (v.path / W4).read_bytes()[:-1] + b"\x01"), "digest"
    ),
    "a scale that is NaN": (scaled(0x7FC0), "number"),
    "a scale that is infinite": (scaled(0xFF80), "number"),
    "a gap": (at(W4, gap("w4"), 1), "padding"),
    "the end of a page": (at(W1, -1, 1), "padding"),
    "a row past the last: codes": (at(W4, section("w4", "plane0").end - 1, 0x10), "padding"),
    "a row past the last: scales": (at(W3, section("w3", "scale").end - 1, 1), "padding"),
    "a row past the last: zeros": (at(W4, section("w4", "zero").end - 1, 1), "padding"),
    "a column past the last": (at(W4, section("w4", "plane0").offset + 4 * 4 * 16 + 3, 0x10), "padding"),
    "a column past the last, of one bit": (at(W3, section("w3", "plane1").offset + 4 * 16 + 3, 0x80), "padding"),
    "bf16: an offset that leaves": (moved(0, 1 << 20), "codec"),
    "bf16: an offset between multiples of 64": (moved(2, 4), "codec"),
    "bf16: a part out of place": (moved(2, 64), "codec"),
    "bf16: a bias of another size": (lambda v: v.extent(BF16, 1, lambda r: r.__setitem__(12, 2)), "codec"),
    "bf16: a bias out of place": (moved(3, 64), "offsets"),
    "bf16: a gap": (at(BF16, 40, 1, 1), "padding"),
    "bf16: the end of a page": (at(BF16, -1, 1, 1), "padding"),
    "bf16: another count of weights": (word(0, 667), "codec"),
    "bf16: another count of tiles": (word(4, 2), "codec"),
    "bf16: another size of the stream": (word(8, 1), "codec"),
    "bf16: a code that is not complete": (coded(lambda d, p: d[32:48].__setitem__(0, 8)), "codec"),
    "bf16: a code word of 9 bits": (coded(lambda d, p: d[32:48].__setitem__(0, 9)), "codec"),
    "bf16: tiles that do not begin at 0": (word(48, 1), "codec"),
    "bf16: patches that end elsewhere": (word(48 + 12, 1), "codec"),
    "bf16: patches out of order": (coded(reversed_patches), "order"),
    "bf16: two patches of one weight": (coded(twice), "order"),
    "bf16: a patch past the tile": (coded(lambda d, p: p["patches"].__setitem__(-1, 700)), "codec"),
    "bf16: a patch with more bits": (coded(lambda d, p: p["patches"].__ior__(1 << 24)), "codec"),
    "bf16: the exponent of the escape": (coded(unused_symbol), "padding"),
    "bf16: another mode": (coded(lambda d, p: p["stream"].__setitem__(0, 2 << 16)), "codec"),
    "bf16: a lane's length": (coded(lambda d, p: p["stream"][1:2].__iadd__(1)), "codec"),
    "bf16: bits past the last lane": (coded(loose), "padding"),
    "bf16: a raw tile with a base": (coded(lambda d, p: p["stream"][:1].__iadd__(1), 2), "codec"),
    "bf16: a raw tile's last word": (coded(raw_tail, 2), "padding"),
}  # fmt: skip


# --- edits of the tables


def table(name: str, change: Callable[[Any], Any]) -> Do:
    def edit(arrays: Any, metadata: Any) -> None:
        changed = change(arrays[name])
        arrays.pop(name)
        if changed is not None:
            arrays[name] = changed

    return lambda v: v.tables(edit)


def named(key: str, value: str | None) -> Do:
    return lambda v: v.tables(lambda a, m: m.pop(key) if value is None else m.update({key: value}))


def without_errors(arrays: Any, layers: tuple[int, ...]) -> None:
    for index in layers:
        for name in ERRORS:
            arrays.pop(f"layers.{index}.{name}")


def one(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array.reshape(-1)[-1] = value
        return array

    return change


ERRORS = ("mse_error", "relative_error", "gated_error")
NUMBERS = dict.fromkeys(("mse", "relative", "gated", *ERRORS, "gate_sum", "prefill_gates", "reuse"), float)
COUNTS = ("tokens", "prefill_counts", "decode_counts", "coactivation")
TABLE_EDITS: dict[str, tuple[Do, str]] = {
    f"no {name}": (table(f"layers.4.{name}", lambda a: None), "tables") for name in (*NUMBERS, *COUNTS, "method")
}
for _name in NUMBERS:
    for _value in (float("nan"), float("inf"), -1.0):
        TABLE_EDITS[f"{_name} {_value}"] = (table(f"layers.1.{_name}", one(_value)), "number")
TABLE_EDITS |= {f"{name} -1": (table(f"layers.1.{name}", one(-1)), "number") for name in COUNTS}
TABLE_EDITS |= {
    "float64": (table("layers.1.mse", lambda a: a.astype(np.float64)), "tables"),
    "errors of another shape": (table("layers.1.gated_error", lambda a: a[:, :4]), "tables"),
    "errors in float64": (table("layers.4.relative_error", lambda a: a.astype(np.float64)), "tables"),
    "errors of one layer alone": (lambda v: v.tables(lambda a, m: without_errors(a, (4,))), "tables"),
    "one of three errors": (
        lambda v: v.tables(lambda a, m: [a.pop(f"layers.{i}.{k}") for i in (1, 4) for k in ERRORS[:2]]), "tables"
    ),
    "a method without a name": (table("layers.1.method", one(2)), "tables"),
    "experts": (table("layers.1.tokens", lambda a: a[:2]), "tables"),
    "a column less": (table("layers.1.mse", lambda a: a[:, :4]), "tables"),
    "windows that differ": (table("layers.1.decode_counts", lambda a: a[:1]), "tables"),
    "no columns named": (named("versions", None), "tables"),
    "a column w9": (named("versions", "bf16,w8,w4,w3,w2,w9"), "tables"),
    "a column twice": (named("versions", "bf16,w8,w4,w4,w2,w1"), "tables"),
    "columns out of order": (named("versions", "w4,bf16,w8,w3,w2,w1"), "tables"),
    "no column of w1": (
        lambda v: v.tables(
            lambda a, m: (
                m.update(versions="bf16,w8,w4,w3,w2"),
                [a.update({k: x[:, :5]}) for k, x in a.items() if x.shape == (3, 6)],
            )
        ), "tables",
    ),
    "no dense.relative": (table("dense.relative", lambda a: None), "tables"),
    "no dense.mse": (table("dense.mse", lambda a: None), "tables"),
    "no dense.method": (table("dense.method", lambda a: None), "tables"),
    "no dense.signal": (table("dense.signal", lambda a: None), "tables"),
    "no dense.tokens": (table("dense.tokens", lambda a: None), "tables"),
    "dense.relative nan": (table("dense.relative", one(float("nan"))), "number"),
    "dense.mse -1": (table("dense.mse", one(-1)), "number"),
    "dense.signal inf": (table("dense.signal", one(float("inf"))), "number"),
    "dense.tokens -1": (table("dense.tokens", one(-1)), "number"),
    "a dense method without a name": (table("dense.method", one(2)), "tables"),
    "a dense matrix less": (table("dense.relative", lambda a: a[:3]), "tables"),
    "a dense column less": (table("dense.mse", lambda a: a[:, :2]), "tables"),
    "no dense columns named": (named("dense_versions", None), "tables"),
    "dense columns out of order": (named("dense_versions", "w8,bf16,w4"), "tables"),
    "no column of a dense w4": (named("dense_versions", "bf16,w8,w3"), "tables"),
    "no methods named": (named("methods", None), "tables"),
    "a method with an escape": (named("methods", "none,\x1b[31m"), "tables"),
    "a method twice": (named("methods", "rtn,rtn"), "tables"),
    "an empty method": (named("methods", "none,"), "tables"),
}  # fmt: skip

EDITS: dict[str, tuple[Do, str]] = {}
for _group, _edits in (
    ("manifest", MANIFESTS), ("files", FILES), ("headers", HEADERS), ("extents", EXTENTS), ("tables", TABLE_EDITS),
):  # fmt: skip
    EDITS |= {f"{_group}: {name}": edit for name, edit in _edits.items()}
MANIFEST_EDITS = {f"manifest: {name}" for name in MANIFESTS}


def command(*words: object) -> tuple[int, str, str]:
    """Run moepack in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["moepack", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
            main()
            sys.exit(0)
    finally:
        sys.argv = before
    return int(stop.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", EDITS)
def test_every_rule_is_kept(name: str, victim: Victim) -> None:
    edit, kind = EDITS[name]
    edit(victim)
    found = problems_of(victim.path)
    kinds = {p.kind for p in found}  # a field of a manifest has others that go by it
    assert kind in kinds if name in MANIFEST_EDITS else kinds == {kind}, [f"{p.kind}: {p}" for p in found]
    for problem in found:
        one_line(str(problem))
        assert problem.location.startswith(str(victim.path))
    assert refusal(victim.path) is not None
    code, out, err = command("verify", victim.path, "-q")
    assert code == 2 and printable(out + err, keep="\n") == out + err and err.count("\n") == 1
    assert len(out.splitlines()) == len(found) or "and" in err


def test_the_bundle_itself_is_good(victim: Victim) -> None:
    assert problems_of(victim.path) == [] and refusal(victim.path) is None
    assert command("verify", victim.path, "-q")[0] == 0


def test_there_is_an_edit_of_every_kind() -> None:
    """Those aside that need a disk that fails, or a checkpoint to compare with."""
    assert {kind for _, kind in EDITS.values()} == {*KINDS} - {"read", "bits", "layers", "truncated"}
    told = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "reading.md").read_text(), re.M)
    assert told == sorted(KINDS)


ALLOWED: dict[str, Do] = {
    "a manifest that is signed again": signs(lambda d: None),
    "headers that are signed again": lambda v: [v.header(n, lambda d: d) for n in (W4, Q8, TABLES, DENSE)],
    "extents that are signed again": lambda v: [v.extent(n, 1, lambda room: None) for n in (BF16, W4)],
    "tables that are signed again": lambda v: v.tables(lambda a, m: None),
    "no versions of dense matrices in the manifest": signs(all_without_dense),
    "no version w8 of dense matrices": lambda v: v.replace("dense/w8", str),
    "no bf16 version of dense matrices": lambda v: v.replace("dense/bf16", str),
    "an allocation without dense matrices": signs(lambda d: d["allocation"].pop("dense")),
    "files that nothing lists": lambda v: v.write("notes.txt", b"\x1b[31m"),
    "a link that nothing lists": lambda v: v.replace("notes", lambda p: p.symlink_to("/etc/passwd")),
    "no version w4": lambda v: v.replace("experts/w4", str),
    "anything in the provenance": put("provenance")({"\x1b[31m": ["\x00", None, True, -(1 << 80)], "recipe": "a\nb\t"}),
    "more about the model": put("model", "vision")({"layers": 3}),
    "no allocation": put("allocation")(None),
    "no standard errors": lambda v: v.tables(lambda a, m: without_errors(a, (1, 4))),
    "errors of a layer that is not there": lambda v: v.tables(
        lambda a, m: (without_errors(a, (1, 4)), a.update({"layers.2.mse_error": np.ones((3, 5), np.float32)}))
    ),
    "a table more": lambda v: v.tables(lambda a, m: a.update(x=np.full(3, np.nan, np.float32))),
    "a column of a version that is not in the manifest": lambda v: v.sign(
        lambda d: (
            d["versions"].pop(), d.update(allocation=None),
            [d["files"].pop(n) for n in list(d["files"]) if n.startswith("experts/w1/")],
        )
    ),
    "version 2": lambda v: v.sign(
        lambda d: (
            all_without_dense(d), d.update(format_version=2, allocation=None), d["versions"].pop(1),
            [d["files"].pop(n) for n in list(d["files"]) if n.startswith("experts/w8/")],
        )
    ),
    "a scale below zero": scaled(0xBF80),
    "a bias that is infinite": at(W4, section("w4", "bias").offset + 1, 0x7F),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_opens(name: str, victim: Victim) -> None:
    ALLOWED[name](victim)
    assert problems_of(victim.path) == []
    read_all(victim.path)


def test_unlisted_files_are_named_by_verify(victim: Victim, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b\x1b.txt", "README.md", ".hidden", "experts/w4/more"):
        victim.write(name, b"")
    assert unlisted(open_bundle(victim.path)) == ["b\x1b.txt", "experts/w4/more"]
    code, _, err = command("verify", victim.path)
    assert code == 0 and "b\\x1b.txt, experts/w4/more" in err.replace("\n", " ") and "\x1b." not in err


# --- links of the Hub's cache


def cached(small: Path, room: Path, blobs: str = "blobs") -> Path:
    """The bundle as huggingface_hub has it in its cache."""
    home = room / "models--someone--mini"
    for file in (p for p in small.rglob("*") if p.is_file()):
        link = home / "snapshots" / ("0" * 40) / file.relative_to(small)
        blob = home / blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        for path in (link, blob):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return home / "snapshots" / ("0" * 40)


def test_links_into_the_cache_of_the_hub_are_followed(small: Path, tmp_path: Path) -> None:
    snapshot = cached(small, tmp_path)
    read_all(snapshot)
    (tmp_path / "other").symlink_to(snapshot)
    read_all(tmp_path / "other")


def test_links_of_a_cache_lead_to_its_blobs_alone(small: Path, tmp_path: Path) -> None:
    outside = cached(small, tmp_path / "a", "others")
    with pytest.raises(BundleError) as error:
        open_bundle(outside)
    assert {p.kind for p in error.value.problems} == {"link"}
    snapshot = cached(small, tmp_path / "b")
    home = snapshot.parent.parent
    (home / "blobs").rename(tmp_path / "elsewhere")
    (home / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError) as error:
        open_bundle(snapshot)
    assert {p.kind for p in error.value.problems} == {"link"}
    snapshot = cached(small, tmp_path / "c")
    (snapshot / CONFIG).unlink()
    os.mkfifo(snapshot.parent.parent / "blobs" / "pipe")
    (snapshot / CONFIG).symlink_to("../../blobs/pipe")
    with pytest.raises(BundleError) as error:
        open_bundle(snapshot)
    assert [p.kind for p in error.value.problems] == ["file-type"]


def test_what_is_replaced_after_it_was_looked_at(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a link that takes a file's place between a look and the opening."""
    real = os.stat(small / CONFIG)  # noqa: PTH116
    monkeypatch.setattr("moepack.pack.files.os.stat", lambda *a, **k: real)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(small / CONFIG)
    for name, kind in (("pipe", "file-type"), ("link", "link")):
        with pytest.raises(BundleError) as error:
            open_file(tmp_path, name)
        assert [p.kind for p in error.value.problems] == [kind]


# --- the public reading interface


def test_experts_are_the_values_that_were_packed(small: Path) -> None:
    bundle = open_bundle(small)
    for layer in LAYERS:
        for e in range(3):
            seed = 100 * layer.index + e
            got = bundle.expert("bf16", layer.index, e)
            for m, want in zip(MATRICES, lossless(seed), strict=True):
                weight, bias = got.torch()[m.name], got.torch()[f"{m.name}.bias"]
                assert np.array_equal(weight.view(__import__("torch").int16).numpy().view(np.uint16), want.weight)
                assert want.bias is not None
                as_float = (want.bias.astype(np.uint32) << 16).view(np.float32)
                assert (
                    np.array_equal(got.numpy()[f"{m.name}.bias"], as_float)
                    and bias.float().tolist() == as_float.tolist()
                )
            for version in VERSIONS[1:]:
                values = bundle.expert(version.name, layer.index, e)
                for m, packed in zip(MATRICES, affine(version, seed), strict=True):
                    want = packed.dequantise(version)
                    assert np.array_equal(values.numpy()[m.name], want) and values.numpy()[m.name].shape == (
                        m.rows,
                        m.cols,
                    )
                    assert np.array_equal(values.torch()[m.name].numpy(), want)
    for wrong, message in ((("w9", 1, 0), "no version"), (("w4", 0, 0), "layer 0"), (("w4", 1, 3), "expert 3")):
        with pytest.raises(InputError, match=message):
            bundle.expert(*wrong)


def test_an_expert_that_is_damaged_is_not_given(victim: Victim) -> None:
    EXTENTS["bf16: another mode"][0](victim)
    with pytest.raises(BundleError, match=r"layer 1, expert 1, version bf16"):
        open_bundle(victim.path).expert("bf16", 1, 1).numpy()
    victim.restore()
    victim.write(W4, (victim.path / W4).read_bytes()[:-1] + b"\x01")
    with pytest.raises(BundleError, match="expert 2, version w4: its bytes do not match"):
        open_bundle(victim.path).expert("w4", 1, 2)


def test_dense_matrices_are_the_values_that_were_packed(small: Path) -> None:
    import torch

    bundle = open_bundle(small)
    assert bundle.manifest.dense == DENSE_MATRICES and bundle.dense_versions == DENSE_VERSIONS
    for number, described in enumerate(DENSE_MATRICES):
        shape = (described.matrix,)
        for version in DENSE_VERSIONS:
            got = bundle.dense_matrix(version.name, described.module)
            if version.is_lossless:
                want = lossless(1000 + number, shape)[0]
                weight = got.torch()["weight"]
                assert np.array_equal(weight.view(torch.int16).numpy().view(np.uint16), want.weight)
            else:
                packed = affine(version, 1000 + number, shape)[0]
                assert np.array_equal(got.numpy()["weight"], packed.dequantise(version))
                assert got.torch()["weight"].dtype == torch.float32
            assert got.numpy().keys() == ({"weight", "bias"} if described.matrix.bias else {"weight"})
    for wrong, message in ((("w3", "lm_head"), "here are bf16, w8, w4"), (("w8", "lm"), "is no dense matrix")):
        with pytest.raises(InputError, match=message):
            bundle.dense_matrix(*wrong)


def test_a_dense_matrix_that_is_damaged_is_not_given(victim: Victim) -> None:
    EXTENTS["a byte of a dense matrix that is not signed"][0](victim)
    with pytest.raises(BundleError, match=r"model\.layers\.1\.self_attn\.o_proj, version w8: its bytes do not match"):
        open_bundle(victim.path).dense_matrix("w8", "model.layers.1.self_attn.o_proj")
    open_bundle(victim.path).dense_matrix("w8", "model.layers.1.self_attn.q_proj")


def test_dense_tensors(victim: Victim) -> None:
    import torch

    dense = open_bundle(victim.path).dense()
    assert dict(dense) == {"a.weight": (4, 2), "b": ()}
    assert dense.numpy("b") == 1.5 and dense.torch("b").item() == 1.5
    assert dense.dtype("a.weight") == "BF16" and dense.torch("a.weight").dtype == torch.bfloat16
    assert dense.torch("a.weight").view(torch.int16).reshape(-1).tolist() == list(range(8))
    assert np.array_equal(dense.numpy("a.weight"), dense.torch("a.weight").float().numpy())
    data = (victim.path / DENSE).read_bytes()
    victim.write(DENSE, data[:-1] + b"\x01")
    with pytest.raises(BundleError, match="its bytes do not match"):
        open_bundle(victim.path).dense().numpy("b")
    open_bundle(victim.path).dense(check_digests=False).numpy("b")


def test_dense_tensors_in_several_files(victim: Victim) -> None:
    from moepack.pack.safetensors_file import make_header

    whole = open_bundle(victim.path).dense().numpy("a.weight")
    first = make_header({"model.layers.1.mlp.experts.down_proj": ("BF16", (1,))}, {}) + bytes(2)
    second = make_header({"a.weight": ("BF16", (4, 2))}, {}) + np.arange(8, dtype=np.uint16).tobytes()
    names = {"model.layers.1.mlp.experts.down_proj": "model-1.safetensors", "a.weight": "model-2.safetensors"}

    def split(index: object) -> list[Problem]:
        files = {
            "model-1.safetensors": first, "model-2.safetensors": second,
            "model.safetensors.index.json": index if isinstance(index, bytes) else json.dumps(index).encode(),
        }  # fmt: skip
        for name, data in files.items():
            victim.write(name, data)
        entries = {n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()}
        victim.sign(lambda d: (d["files"].pop(DENSE, None), d["files"].update(entries)))
        return problems_of(victim.path)

    assert split({"metadata": {}, "weight_map": names}) == []
    assert np.array_equal(open_bundle(victim.path).dense().numpy("a.weight"), whole)
    tripwire, weight = names
    for index in (
        {"weight_map": {**names, "c": "model-2.safetensors"}}, {"weight_map": {tripwire: "model-1.safetensors"}},
        {"weight_map": {**names, weight: "../model-2.safetensors"}}, {"weight_map": {**names, weight: CONFIG}},
        {"weight_map": []}, {"weight_map": {**names, weight: 3}}, [],
    ):  # fmt: skip
        if index == {"weight_map": {tripwire: "model-1.safetensors"}}:
            assert split(index) == []  # a file that the index does not name is none of the dense ones
            continue
        assert [p.kind for p in split(index)] == ["tables"], index
    assert [p.kind for p in split(b'{"weight_map": {}, "weight_map": {}}')] == ["json"]


# --- the checks by themselves, and random edits


def test_checks_find_nothing_in_what_is_written() -> None:
    from small_bundle import encode_affine, encode_lossless

    for seed in range(6):
        extent, _ = encode_lossless(MATRICES, lossless(seed))
        assert list(check_lossless(MATRICES, extent)) == []
        for version in VERSIONS[1:]:
            assert list(check_affine(MATRICES, version, encode_affine(MATRICES, version, affine(version, seed)))) == []


def test_full_tiles_of_a_large_matrix_have_no_loose_bits() -> None:
    from moepack.pack.lossless import LosslessMatrix, encode_lossless
    from moepack.pack.spec import Matrix

    rng = np.random.default_rng(0)
    matrices = (Matrix("up", 100, 333), Matrix("down", 333, 100))
    values = []
    for m in matrices:
        bits = (rng.standard_cauchy((m.rows, m.cols)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        bits[: m.rows // 2] = rng.integers(0, 1 << 16, (m.rows // 2, m.cols))  # raw tiles beside coded ones
        values.append(LosslessMatrix(bits))
    extent, _ = encode_lossless(matrices, values)
    assert list(check_lossless(matrices, extent)) == []


def test_printable() -> None:
    assert printable("a\x1b[31m\n\u202e\ud800é") == "a\\x1b[31m\\n\\u202e\\ud800é"
    assert printable("a\nb", keep="\n") == "a\nb"
    problem = Problem("/b\x07/x", "size", "y" * 5000)
    assert problem.location == "/b\\x07/x" and len(problem.message) == 1000


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(RANDOM)), st.randoms(use_true_random=False))
def test_random_edits_end_in_a_line(copied: Victim, kind: str, rng: Any) -> None:
    try:
        RANDOM[kind](copied, rng)
        refusal(copied.path)
    finally:
        copied.restore()


def test_the_command_counts(small: Path) -> None:
    found = attack(small, 60, seed=7)
    assert sum(sum(c.values()) for c in found.values()) == 60
    assert sum(c["refused"] for c in found.values()) > 30


def test_a_traceback_is_found(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a reader that lets an edit through as an error of another class; one that takes for ever."""
    import time

    import hostile_edits as hostile

    monkeypatch.setattr(hostile, "open_bundle", lambda path: json.loads(b"{"))
    with pytest.raises(AssertionError, match=r"number 0: JSONDecodeError"):
        attack(small, 5)
    monkeypatch.setattr(hostile, "SECONDS", 1)
    monkeypatch.setattr(hostile, "open_bundle", lambda path: time.sleep(30))
    with pytest.raises(AssertionError, match="TimeoutError"):
        attack(small, 5)
