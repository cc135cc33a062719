"""Parse a manifest strictly: canonical form, digest, every field and how fields agree (FORMAT.md).

It reports every problem at once, and reads no other file.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .. import manifest, spec
from ..errors import BundleError, Kind, Problem
from ..spec import DenseLayer, DenseMatrix, ExpertLayer, Matrix, Version
from . import Allocation, ExpertFileEntry, FileEntry, Manifest, canonical, strict_json

_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_LINE = re.compile(r".+")
Json = object  # a value of the document; `Checker` finds its type


class Checker:
    """Notes the problems of fields. Checks return a default for a wrong field, so that the rest is still checked."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def wrong(self, where: str, kind: Kind, message: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(f"{manifest.MANIFEST}: {where}", kind, message))

    def integer(self, where: str, value: Json, low: int, high: int) -> int:
        """Check an integer within bounds; return the lower bound for any other value."""
        if type(value) is int and low <= value <= high:
            return value
        self.wrong(where, "range", f"not an integer from {low} to {high}: {show(value)}")
        return low

    def text(self, where: str, value: Json, allowed: Sequence[str] | None = None) -> str:
        """Check a string, one of `allowed` if given; return a default for any other value."""
        if isinstance(value, str) and (allowed is None or value in allowed):
            return value
        self.wrong(where, "value", f"not {'one of ' + ', '.join(allowed) if allowed else 'a string'}: {show(value)}")
        return allowed[0] if allowed else ""

    def matching(self, where: str, value: Json, pattern: re.Pattern[str], what: str) -> str:
        """Check a printable string that the whole pattern matches; return an empty string for any other value."""
        short = isinstance(value, str) and len(value) <= manifest.MAX_PATH
        if isinstance(value, str) and short and value.isprintable() and pattern.fullmatch(value):
            return value
        self.wrong(where, "text", f"not {what}: {show(value)}")
        return ""

    def items(self, where: str, value: Json, most: int) -> list[Json]:
        """Check a list of at most `most` items; return an empty list for any other value."""
        if isinstance(value, list) and len(value) <= most:
            return value
        self.wrong(where, "type", f"not a list of at most {most}: {show(value)}")
        return []

    def object(self, where: str, value: Json, keys: Sequence[str] | None = None) -> dict[str, Json]:
        """Check an object, with exactly these keys if given; return an empty object for any other type."""
        if not isinstance(value, dict):
            self.wrong(where, "type", f"not an object: {show(value)}")
            return {}
        if keys is not None and set(value) != set(keys):
            self.wrong(where, "keys", f"has keys {show(sorted(value))}, not {show(sorted(keys))}")
        return value


def show(value: Json) -> str:
    """A value for a message: its JSON, cut to 200 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."


def parse_manifest(data: bytes) -> Manifest:
    """Read manifest.json; raises BundleError with every problem found."""
    if len(data) > manifest.MAX_BYTES:
        raise BundleError.single(manifest.MANIFEST, "size", f"{len(data)} bytes, more than {manifest.MAX_BYTES}")
    try:
        document = strict_json.loads(data)
    except ValueError as error:
        raise BundleError.single(manifest.MANIFEST, "json", f"cannot be parsed: {error}") from None
    if not isinstance(document, dict) or document.get("format") != spec.FORMAT_NAME:
        raise BundleError.single(manifest.MANIFEST, "format", "not a moepack manifest")
    number = document.get("format_version")
    if type(number) is not int or number != spec.FORMAT_VERSION:
        message = f"format version {show(number)}, and this moepack reads {spec.FORMAT_VERSION}: build the bundle again"
        raise BundleError.single(manifest.MANIFEST, "format-version", message)
    try:
        again = canonical(document)
    except RecursionError:
        raise BundleError.single(manifest.MANIFEST, "json", "cannot be parsed: nested too deeply") from None
    if again != data:
        raise BundleError.single(manifest.MANIFEST, "canonical", "not in canonical form: damaged or edited")
    digest = document.pop("sha256", None)  # on a line of its own, cut out below: faster than `canonical` again
    without = data.replace(b'\n "sha256": "%s",' % str(digest).encode(), b"", 1)
    if digest != hashlib.sha256(without).hexdigest():
        raise BundleError.single(manifest.MANIFEST, "digest", "its digest does not match: damaged or edited")
    check = Checker()
    keys = ["format", "format_version", "model", "layers", "versions", "files", "provenance", "allocation"]
    has_dense = "dense" in document
    check.object("top level", document, [*keys, "dense"] if has_dense else keys)
    layers = _layers(check, document.get("layers"))
    versions = _versions(check, "versions", document.get("versions"), spec.version_names(), of_experts=True)
    dense, dense_versions = _dense(check, document["dense"]) if has_dense else ((), ())
    files, expert_files = _files(check, document.get("files"))
    found = Manifest({}, layers, versions, files, expert_files, dense=dense, dense_versions=dense_versions)
    if not check.problems:
        _layer_files(check, found)
    model = _model(check, document.get("model"), layers, dense)
    provenance = check.object("provenance", document.get("provenance"))
    allocation = _allocation(check, document.get("allocation"), found)
    if check.problems:
        raise BundleError(check.problems)
    return replace(found, model=model, provenance=provenance, allocation=allocation)


def _model(check: Checker, value: Json, layers: Sequence[ExpertLayer], dense: Sequence[DenseMatrix]) -> dict[str, Json]:
    model = check.object("model", value)
    for key in ("model_type", "architecture"):
        check.matching(f"model.{key}", model.get(key), _NAME, "a name of letters, digits, '.', '_' and '-'")
    check.text("model.expert_dtype", model.get("expert_dtype"), list(spec.EXPERT_DTYPES))
    count = check.integer("model.decoder_layers", model.get("decoder_layers"), 1, spec.MAX_LAYERS)
    last = {"experts": [x.index for x in layers], "dense matrices": [d.layer for d in dense if d.layer is not None]}
    for what, indices in last.items():
        if not check.problems and max(indices, default=0) >= count:
            check.wrong("model.decoder_layers", "count", f"{count}, and layer {max(indices)} has {what}")
    return model


def _layers(check: Checker, value: Json) -> tuple[ExpertLayer, ...]:
    out: list[ExpertLayer] = []
    modules: set[str] = set()
    for i, item in enumerate(check.items("layers", value, spec.MAX_LAYERS)):
        at = f"layers[{i}]"
        item = check.object(at, item, ["index", "module", "experts", "matrices"])
        matrices = []
        for k, m in enumerate(check.items(f"{at}.matrices", item.get("matrices"), 2)):
            here = f"{at}.matrices[{k}]"
            m = check.object(here, m, ["name", "rows", "cols", "bias"])
            name = check.text(f"{here}.name", m.get("name"), ["down"] if k else ["gate_up", "up"])
            matrices.append(_matrix(check, here, m, name))
        if len(matrices) != 2:
            check.wrong(f"{at}.matrices", "count", f"{len(matrices)} matrices, not 2")
        elif wrong := _shapes(*matrices):
            check.wrong(f"{at}.matrices", "shape", wrong)
        if sum(m.weights * 2 for m in matrices) + 64 * spec.PAGE > spec.MAX_EXTENT:
            check.wrong(f"{at}.matrices", "overflow", f"an expert of this shape passes {spec.MAX_EXTENT} bytes")
        index = check.integer(f"{at}.index", item.get("index"), 0, spec.MAX_LAYERS - 1)
        if out and index <= out[-1].index:
            check.wrong(f"{at}.index", "order", f"{index} does not come after {out[-1].index}")
        experts = check.integer(f"{at}.experts", item.get("experts"), 1, spec.MAX_EXPERTS)
        module = check.matching(f"{at}.module", item.get("module"), _MODULE, "a module's name")
        if module in modules:
            check.wrong(f"{at}.module", "value", f"{module} stands twice")
        modules.add(module)
        out.append(ExpertLayer(index, module, experts, tuple(matrices)))
    if not out:
        check.wrong("layers", "count", "no layer has experts")
    return tuple(out)


def _shapes(first: Matrix, down: Matrix) -> str:
    """The reason why an expert's two shapes do not fit; empty where they do."""
    of_one = 2 if first.name == "gate_up" else 1
    if first.rows != of_one * down.cols:
        return f"{first.name} has {first.rows} rows, not {of_one} for each of down's {down.cols} columns"
    if first.cols != down.rows:
        return f"down has {down.rows} rows, and {first.name} {first.cols} columns"
    return ""


def _dense(check: Checker, value: Json) -> tuple[tuple[DenseMatrix, ...], tuple[Version, ...]]:
    document = check.object("dense", value, ["matrices", "versions"])
    out: list[DenseMatrix] = []
    modules: set[str] = set()
    for i, item in enumerate(check.items("dense.matrices", document.get("matrices"), spec.MAX_DENSE)):
        at = f"dense.matrices[{i}]"
        item = check.object(at, item, ["layer", "module", "rows", "cols", "bias"])
        layer = item.get("layer")
        if layer is not None:
            layer = check.integer(f"{at}.layer", layer, 0, spec.MAX_LAYERS - 1)
        if out and _order(layer) < _order(out[-1].layer):
            check.wrong(f"{at}.layer", "order", f"{show(layer)} does not come after {show(out[-1].layer)}")
        module = check.matching(f"{at}.module", item.get("module"), _MODULE, "a module's name")
        if module in modules:
            check.wrong(f"{at}.module", "value", f"{module} stands twice")
        modules.add(module)
        matrix = _matrix(check, at, item, "weight")
        if matrix.weights * 2 + 64 * spec.PAGE > spec.MAX_EXTENT:
            check.wrong(at, "overflow", f"a matrix of this shape passes {spec.MAX_EXTENT} bytes")
        out.append(DenseMatrix(layer, module, matrix))
    if not out:
        check.wrong("dense.matrices", "count", "no matrix has versions")
    known = spec.version_names(dense=True)
    return tuple(out), _versions(check, "dense.versions", document.get("versions"), known)


def _order(layer: int | None) -> int:
    """A layer's rank in the order of dense matrices: those outside the layers (None) come last."""
    return spec.MAX_LAYERS if layer is None else layer


def _matrix(check: Checker, at: str, item: Mapping[str, Json], name: str) -> Matrix:
    if not isinstance(item.get("bias"), bool):
        check.wrong(f"{at}.bias", "type", "not true or false")
    rows = check.integer(f"{at}.rows", item.get("rows"), 1, spec.MAX_DIM)
    cols = check.integer(f"{at}.cols", item.get("cols"), 1, spec.MAX_DIM)
    return Matrix(name, rows, cols, item.get("bias") is True)


def _versions(
    check: Checker, where: str, value: Json, known: Sequence[str], of_experts: bool = False
) -> tuple[Version, ...]:
    """Check a list of versions; those of experts may have `scale_bits`."""
    out: list[Version] = []
    for i, item in enumerate(check.items(where, value, len(known))):
        at = f"{where}[{i}]"
        item = check.object(at, item)
        name = check.text(f"{at}.name", item.get("name"), known)
        may = of_experts and not spec.encoding_of(name).holds
        more = ["scale_bits"] if may and "scale_bits" in item else []
        item = dict(check.object(at, item, ["name", "encoding", "bits", "group_size", "zero", *more]))
        size = item.get("group_size")
        sizes = spec.encoding_of(name).group_sizes
        scale_bits = 8 if more else 16
        group_size = size if size in sizes else max(sizes, default=0)
        expected = Version.of(name, group_size, scale_bits, item.get("zero") == "symmetric")
        if canonical(item) != canonical(expected.record()):  # as JSON: in Python, True == 1
            check.wrong(at, "encoding", f"this moepack does not know this form of {name}: {show(item)}")
        out.append(expected)
    names = [v.name for v in out]
    if names != [n for n in known if n in names] or not names:
        check.wrong(where, "order", f"not a list from most to least precise without repeats: {names}")
    holding = [v.name for v in out if v.holds]
    if len(holding) > 1:
        check.wrong(where, "value", f"more than one version holds the checkpoint: {', '.join(holding)}")
    return tuple(out)


def safe_path(path: str) -> bool:
    """Whether `path` is a relative POSIX path as FORMAT.md, "Paths", allows it."""
    return (
        len(path.encode(errors="replace")) <= manifest.MAX_PATH
        and path.isprintable()
        and unicodedata.is_normalized("NFC", path)
        and not set(path) & set('\\:*?"<>|')
        and all(_safe_part(part) for part in path.split("/"))
    )


def _safe_part(part: str) -> bool:
    return 0 < len(part.encode(errors="replace")) <= manifest.MAX_NAME and part[0] not in ". " and part[-1] not in ". "


def _files(check: Checker, value: Json) -> tuple[dict[str, FileEntry], dict[str, ExpertFileEntry]]:
    files: dict[str, FileEntry] = {}
    expert_files: dict[str, ExpertFileEntry] = {}
    for path, item in check.object("files", value).items():
        at = f"files[{show(path)}]"
        if not safe_path(path) or path.casefold() == manifest.MANIFEST:
            check.wrong(at, "path", "not a relative path as the format allows them")
        is_packed = path.startswith(manifest.PACKED)
        digest_key = "header_sha256" if is_packed else "sha256"
        item = check.object(at, item, ["size", digest_key, *(["header_size", "payload"] if is_packed else [])])
        found = len(check.problems)
        size = check.integer(f"{at}.size", item.get("size"), 0, manifest.MAX_SIZE)
        digest = check.text(f"{at}.{digest_key}", item.get(digest_key))
        if not _HEX.fullmatch(digest):
            check.wrong(at, "digest", "not a SHA-256 in lower-case hexadecimal")
        if is_packed:
            most = size if found == len(check.problems) else manifest.MAX_SIZE
            header = check.integer(f"{at}.header_size", item.get("header_size"), 8, min(most, manifest.MAX_FILE_HEADER))
            payload = check.integer(f"{at}.payload", item.get("payload"), 0, max(most - header, 0))
            if found == len(check.problems) and (header % spec.PAGE or (size - header) % spec.PAGE):
                check.wrong(at, "alignment", f"header or data are not whole pages of {spec.PAGE} bytes")
            expert_files[path] = ExpertFileEntry(size, header, digest, payload)
        else:
            files[path] = FileEntry(size, digest)
    _together(check, (*files, *expert_files))
    for path in (manifest.CONFIG, manifest.TABLES):
        if path not in files:
            check.wrong("files", "missing", f"{path} is not listed")
    if (manifest.DENSE in files) == (manifest.DENSE_INDEX in files):
        check.wrong("files", "missing", f"either {manifest.DENSE} or {manifest.DENSE_INDEX} is listed, and not both")
    return files, expert_files


def _together(check: Checker, paths: Sequence[str]) -> None:
    """Check that paths differ even without regard to case, and that no folder is also a file."""
    taken: dict[str, str] = {}
    for path in paths:
        if (other := taken.setdefault(path.casefold(), path)) != path:
            check.wrong(f"files[{show(path)}]", "path", f"differs from {show(other)} in capitals alone")
    for path in paths:
        parts = path.casefold().split("/")
        for i in range(1, len(parts)):
            if "/".join(parts[:i]) in taken:
                check.wrong(f"files[{show(path)}]", "path", "lies below another file")


def _layer_files(check: Checker, found: Manifest) -> None:
    expected = found.layer_files(found.versions, found.dense_versions)
    for path in sorted(set(expected) - set(found.expert_files)):
        check.wrong("files", "missing", f"{path} is not listed")
    for path in sorted(set(found.expert_files) - set(expected)):
        check.wrong("files", "unexpected", f"{path} belongs to no version and layer")
    for path, (version, layer) in expected.items():
        entry = found.expert_files.get(path)
        sizes = _sizes(layer, version)
        if entry and sizes is not None and (entry.size - entry.header_size, entry.payload) != sizes:
            check.wrong(f"files[{show(path)}]", "size", f"not {layer.extents} extents of {sizes[0]} bytes in all")


def _sizes(layer: ExpertLayer | DenseLayer, version: Version) -> tuple[int, int] | None:
    """Bytes of a layer's extents and of their payloads; None where they depend on the values."""
    if isinstance(layer, ExpertLayer):  # all extents have one shape
        sizes = version.stored_sizes(layer.matrices)
        return None if sizes is None else (layer.experts * sizes[0], layer.experts * sizes[1])
    each = [found for m in layer.matrices if (found := version.stored_sizes((m.matrix,))) is not None]
    return (sum(s[0] for s in each), sum(s[1] for s in each)) if each else None


def _allocation(check: Checker, value: Json, found: Manifest) -> Allocation | None:
    if value is None:
        return None
    item = check.object("allocation", value)
    layers = found.layers
    has_dense = bool(found.dense) and "dense" in item
    item = check.object("allocation", value, ["name", "versions", *(["dense"] if has_dense else [])])
    names = [v.name for v in found.versions]
    table = check.items("allocation.versions", item.get("versions"), spec.MAX_LAYERS)
    if len(table) != len(layers):
        check.wrong("allocation.versions", "count", f"{len(table)} layers, not {len(layers)}")
    out = []
    for i, (row, layer) in enumerate(zip(table, layers, strict=False)):
        out.append(_chosen(check, f"allocation.versions[{i}]", row, layer.experts, names))
    chosen = None
    if has_dense:
        names = [v.name for v in found.dense_versions]
        chosen = _chosen(check, "allocation.dense", item["dense"], len(found.dense), names)
    what = f"a line of 1 to {manifest.MAX_PATH} characters that are printed"
    return Allocation(check.matching("allocation.name", item.get("name"), _LINE, what), tuple(out), chosen)


def _chosen(check: Checker, at: str, value: Json, count: int, names: Sequence[str]) -> tuple[str, ...]:
    """Check a list that names a version for each of `count` experts or matrices."""
    row = check.items(at, value, count)
    if len(row) != count:
        check.wrong(at, "count", f"{len(row)} names, not {count}")
    for bad in sorted({show(v) for v in row if v not in names}):
        check.wrong(at, "value", f"{bad} is not a version of this bundle")
    return tuple(str(v) for v in row)
