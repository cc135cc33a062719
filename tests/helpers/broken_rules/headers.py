"""Edits of safetensors headers: of layer files, of dense tensors and of the tables."""

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

from hostile_edits import Victim

from .names import BF16, DENSE, HEAD, Q1, Q8, TABLES, W4, Do


def head(name: str, *path) -> Callable[[Any], Do]:
    """Set a field of a safetensors header, and sign it."""

    def with_value(value) -> Do:
        def change(document):
            inner = document
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            return document

        return lambda v: v.header(name, change)

    return with_value


def fields(name: str, tensor: str, **values) -> Do:
    """Set fields of a tensor in a safetensors header, and sign it."""
    return lambda v: v.header(name, lambda document: {**document, tensor: {**document[tensor], **values}})


def digests(name: str, change: Callable[[str], str]) -> Do:
    """Change the digests of a layer file's extents."""
    return lambda v: v.header(name, lambda d: {**d, META: {**d[META], "sha256": change(d[META]["sha256"])}})


def headed(name: str, change: Callable[[Any], Any]) -> Do:
    return lambda v: v.header(name, change)


def texted(name: str, old: bytes, new: bytes) -> Do:
    """Text of a header replaced, by text as long, or shorter."""

    def change(document) -> bytes:
        text = json.dumps(document, separators=(",", ":")).encode()
        assert old in text
        return text.replace(old, new, 1)

    return lambda v: v.header(name, change)


def lengthened(v: Victim):
    """A length in the first 8 bytes that leaves a page of the header out; the manifest has the digest of the rest."""
    data = (v.path / W4).read_bytes()
    v.write(W4, struct.pack("<Q", struct.unpack("<Q", data[:8])[0] - 8) + data[8:])
    size = v.manifest["files"][W4]["header_size"]
    digest = hashlib.sha256((v.path / W4).read_bytes()[:size]).hexdigest()
    v.sign(lambda d: d["files"][W4].update(header_sha256=digest))


def swapped(document):
    a, b = (document[f"expert.0000{e}"]["data_offsets"] for e in (0, 1))
    document["expert.00000"]["data_offsets"], document["expert.00001"]["data_offsets"] = b, a
    return document


E0, META, TRIPWIRE = "expert.00000", "__metadata__", "model.layers.1.mlp.experts.down_proj"
HEADERS: dict[str, tuple[Do, str]] = {
    "a byte that is not signed": (
        lambda v: v.write(W4, (d := (v.path / W4).read_bytes())[:200] + bytes([d[200] ^ 16]) + d[201:]), "digest"
    ),
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
    "another dtype": (fields(W4, E0, dtype="I8"), "header"),
    "an unknown dtype": (head(W4, E0, "dtype")("U3"), "header"),
    "a dtype that is a list": (head(W4, E0, "dtype")(["U8"]), "header"),
    "two dimensions": (headed(W4, lambda d: (d[E0]["shape"].insert(0, 1), d)[1]), "header"),
    "experts out of order": (headed(W4, swapped), "alignment"),
    "an extent of a page less": (fields(BF16, E0, shape=[0], data_offsets=[0, 0]), "offsets"),
    "another layer": (head(W4, META, "layer")("4"), "header"),
    "a layer with a zero before it": (head(W4, META, "layer")("01"), "header"),
    "another version": (head(W4, META, "version")("w3"), "header"),
    "another format": (head(W4, META, "format")("moepack.experts/2"), "header"),
    "metadata with more": (head(W4, META, "x")(""), "header"),
    "metadata that are numbers": (head(W4, META, "layer")(1), "header"),
    "a digest less": (digests(W4, lambda text: text[65:]), "header"),
    "digests in capitals": (digests(W4, str.upper), "digest"),
    "dense matrices: another layer": (head(HEAD, META, "layer")("1"), "header"),
    "dense matrices: another version": (head(Q8, META, "version")("w4"), "header"),
    "dense matrices: the format of experts": (head(Q8, META, "format")("moepack.experts/1"), "header"),
    "dense matrices: another number": (texted(HEAD, b"dense.00003", b"dense.00000"), "header"),
    "dense matrices: the name of an expert": (texted(HEAD, b"dense.00003", b"expert.00003"), "header"),
    "dense matrices: a digest less": (digests(Q8, lambda text: text[65:]), "header"),
    "dense matrices: an extent of a page less": (fields(Q1, "dense.00000", shape=[0], data_offsets=[0, 0]), "offsets"),
    "dense: a weight that has versions": (texted(DENSE, b'"a.weight"', b'"lm_head.weight"'), "tables"),
    "dense: a bias that has versions": (texted(DENSE, b'"b"', b'"lm_head.bias"'), "tables"),
    "tables: a name twice": (texted(TABLES, b'"layers.4.mse"', b'"layers.1.mse"'), "header"),
    "dense: a name twice": (texted(DENSE, b'"a.weight"', b'"b"'), "header"),
    "dense: no tripwire": (texted(DENSE, b"down_proj", b"down_porj"), "tables"),
    "dense: a tripwire of another shape": (fields(DENSE, TRIPWIRE, shape=[1, 1]), "tables"),
    "dense: an escape in a name": (texted(DENSE, b'"data_offsets":[0', b'"\\u001b[31m":[0'), "header"),
    "dense: half a surrogate pair in a name": (texted(DENSE, b'"a.weight"', b'"\\ud800"'), "header"),
    "dense: offsets that fall": (fields(DENSE, "b", data_offsets=[4, 0]), "offsets"),
    "dense: an offset past the end": (fields(DENSE, "b", data_offsets=[18, 99]), "offsets"),
}  # fmt: skip
