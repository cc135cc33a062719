"""Edits of the manifest, each with the kind of problem that it is."""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from hostile_edits import Victim, canonical, signed

from .names import BF16, CONFIG, DENSE, HEAD, MANIFEST, Q1, Q8, TABLES, W4, Do


def put(*path) -> Callable[[Any], Do]:
    """Set a field of the manifest, and sign it."""

    def with_value(value) -> Do:
        def change(document):
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


def copied(name: str, to: str) -> Do:
    """A file's entry stands at another name, too."""
    return signs(lambda d: d["files"].update({to: d["files"][name]}))


def grown(name: str, **by: int) -> Do:
    """Numbers of a file's entry, larger."""
    return signs(lambda d: d["files"][name].update({key: d["files"][name][key] + more for key, more in by.items()}))


def replaced(old: str, new: str) -> Do:
    """Text of the manifest replaced, and what comes of it signed as it stands: what no JSON writer would write."""

    def edit(v: Victim):
        document = {k: x for k, x in v.manifest.items() if k != "sha256"}
        text = canonical(document).decode()
        assert text.count(old) >= 1, old
        digest = hashlib.sha256(text.replace(old, new, 1).encode()).hexdigest()
        text = canonical({**document, "sha256": digest}).decode()
        v.write(MANIFEST, text.replace(old, new, 1).encode())

    return edit


def renamed(first: str) -> Callable[[Any], None]:
    def change(document):
        for layer in document["layers"]:
            layer["matrices"][0]["name"] = first

    return change


def encoded(encoding: str) -> Do:
    return lambda v: v.write(MANIFEST, signed(dict(v.manifest)).decode().encode(encoding))


def without_dense(document):
    """As if no dense matrix had versions; its files stay listed."""
    document.pop("dense")
    document["allocation"].pop("dense")


def all_without_dense(document):
    """The same, and its files go."""
    without_dense(document)
    for name in [n for n in document["files"] if n.startswith("dense/")]:
        document["files"].pop(name)


def scale_bits(version: int, value, *where) -> Do:
    """Bits of scales in a version's record, of experts or, with `where`, of others."""

    def change(document):
        for part in where:
            document = document[part]
        document["versions"][version]["scale_bits"] = value

    return signs(change)


MODEL = put("model")
MIXED = {"name": "w3d4", "encoding": "affine-mixed", "bits": 3, "group_size": 128, "zero": "stored"}
MXFP4 = {"name": "mxfp4", "encoding": "mxfp4", "bits": 4, "group_size": 32, "zero": "none"}
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
    "another format": (put("format")("zip"), "format"),
    "a later version": (put("format_version")(7), "format-version"),
    "an earlier version": (put("format_version")(5), "format-version"),
    "a number with a point": (put("layers", 0, "experts")(3.0), "json"),
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
    "architecture no text": (put("model", "architecture")(7), "text"),
    "an unknown dtype": (put("model", "expert_dtype")("F4"), "value"),
    "no decoder layers": (put("model", "decoder_layers")(0), "range"),
    "fewer decoder layers than have experts": (put("model", "decoder_layers")(4), "count"),
    "no layers": (put("layers")([]), "count"),
    "layers that fall": (put("layers", 1, "index")(0), "order"),
    "an index too large": (put("layers", 1, "index")(4096), "range"),
    "no experts": (put("layers", 0, "experts")(0), "range"),
    "too many experts": (put("layers", 0, "experts")(65537), "range"),
    "a module that is no name": (put("layers", 0, "module")("model layers"), "text"),
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
    "two versions that hold the checkpoint": (signs(lambda d: d["versions"].insert(1, MXFP4)), "value"),
    "another group of a released version": (
        signs(lambda d: d["versions"].__setitem__(0, {**MXFP4, "group_size": 64})), "encoding"
    ),
    "no versions": (put("versions")([]), "order"),
    "an unknown version": (put("versions", 1, "name")("w9"), "value"),
    "versions out of order": (signs(lambda d: d["versions"].reverse()), "order"),
    "a version twice": (signs(lambda d: d["versions"].insert(1, d["versions"][1])), "order"),
    "another encoding": (put("versions", 1, "encoding")("gguf"), "encoding"),
    "other bits": (put("versions", 1, "bits")(5), "encoding"),
    "another group": (put("versions", 1, "group_size")(48), "encoding"),
    "another zero": (put("versions", 5, "zero")("stored"), "encoding"),
    "symmetric codes of one bit": (put("versions", 5, "zero")("symmetric"), "encoding"),
    "scales of 4 bits": (scale_bits(1, 4), "encoding"),
    "scales of a byte of what holds the checkpoint": (scale_bits(0, 8), "keys"),
    "dense: scales of a byte": (scale_bits(1, 8, "dense"), "keys"),
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
    "the payload of w4": (grown(W4, payload=-1), "size"),
    "the payload of bf16": (grown(BF16, payload=1), "size"),
    "a layer file of a page more": (grown(W4, size=4096), "size"),
    "a layer file less": (signs(lambda d: d["files"].pop(W4)), "missing"),
    "a layer file more": (copied(W4, "experts/w4/layer-002.safetensors"), "unexpected"),
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
    "dense: a matrix with more": (put("dense", "matrices", 0, "name")("weight"), "keys"),
    "dense: a layer past the limit": (put("dense", "matrices", 0, "layer")(4096), "range"),
    "dense: layers that fall": (put("dense", "matrices", 1, "layer")(0), "order"),
    "dense: what is outside first": (put("dense", "matrices", 0, "layer")(None), "order"),
    "dense: a layer that the model does not have": (put("model", "decoder_layers")(5), "count"),
    "dense: one module twice": (put("dense", "matrices", 3, "module")("model.layers.5.mlp.up_proj"), "value"),
    "dense: a module that is no name": (put("dense", "matrices", 3, "module")("lm head"), "text"),
    "dense: no rows": (put("dense", "matrices", 3, "rows")(0), "range"),
    "dense: a matrix past 4 GiB": (
        signs(lambda d: d["dense"]["matrices"][3].update(rows=1 << 16, cols=1 << 15)), "overflow"
    ),
    "dense: a bias that is a number": (put("dense", "matrices", 3, "bias")(0), "type"),
    "dense: no versions": (put("dense", "versions")([]), "order"),
    "dense: versions out of order": (signs(lambda d: d["dense"]["versions"].reverse()), "order"),
    "dense: an unknown version": (put("dense", "versions", 1, "name")("w9"), "value"),
    "dense: a mixed version": (signs(lambda d: d["dense"]["versions"].append(MIXED)), "value"),
    "dense: two versions that hold the checkpoint": (
        signs(lambda d: d["dense"]["versions"].insert(1, MXFP4)), "value"
    ),
    "dense: other bits": (put("dense", "versions", 1, "bits")(7), "encoding"),
    "dense: a file less": (signs(lambda d: d["files"].pop(HEAD)), "missing"),
    "dense: a file more": (copied(Q8, "dense/w8/layer-003.safetensors"), "unexpected"),
    "dense: files, and no matrices": (signs(without_dense), "unexpected"),
    "dense: the size of w8": (put("files", Q8, "size")(1 << 20), "size"),
    "dense: the payload of w8": (grown(Q8, payload=-1), "size"),
    "dense: the payload of bf16": (grown(Q1, payload=1), "size"),
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
