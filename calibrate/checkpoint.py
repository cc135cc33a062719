"""Open a checkpoint: check that its files and tensors are complete. Reads headers, not weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moepack.pack.codec.bits import Buffer
from moepack.pack.config_counts import check_counts
from moepack.pack.errors import BundleError, InputError, in_a_line
from moepack.pack.hub_errors import in_one_line
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import DENSE, DENSE_INDEX, MANIFEST
from moepack.pack.manifest.parser import safe_path
from moepack.pack.safetensors_file import Header, TensorEntry, read_header
from moepack.pack.spec import EXPERT_DTYPES, LOSSLESS, Version, encoding_of

from .released import Encoded, find_encoded, read_scheme
from .released.parts import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Patterns of the files besides config.json that a bundle copies: those that transformers reads for tokenizers,
# processors and generation, and licences.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "sentencepiece.*",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "*_preprocessor_config.json",
    "*_processor_config.json",
    "audio_tokenizer_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.py", "README.md", *COMPANIONS]
WITHOUT = "moepack build --dry-run needs config.json alone"
ADAPTER = "adapter_config.json"
PIECE = 1 << 26  # bytes of two tensors that are compared at a time
# Files that may name classes of a model's own code.
_NAMES_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def companions(checkpoint: Path) -> list[str]:
    """Names of the files that a bundle copies: those that match COMPANIONS, and Python files if `auto_map` in a
    configuration names classes of the model's own code."""
    patterns = (*COMPANIONS, "*.py") if any(_has_code(checkpoint / n) for n in _NAMES_CODE) else COMPANIONS
    found = {
        p.relative_to(checkpoint).as_posix() for pattern in patterns for p in checkpoint.glob(pattern) if p.is_file()
    }
    return [name for name in sorted(found) if not name.startswith(".") and safe_path(name)]


def _has_code(path: Path) -> bool:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and bool(document.get("auto_map"))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path  # its directory
    name: str  # the name that the user gave, for reports
    config: PreTrainedConfig  # the transformers configuration
    headers: Mapping[str, Header]  # file name -> checked safetensors header
    file_of: Mapping[str, str]  # tensor name -> file name
    encoded: Mapping[str, Encoded] = field(default_factory=dict)  # the weights stored as codes and scales, by name
    here: bool = True  # whether its files can be read; without, only headers are known

    @property
    def weights(self) -> list[str]:
        """Names of the tensors that an unquantised checkpoint would have."""
        parts = {name for e in self.encoded.values() for name in e.names}
        return [*(name for name in self.file_of if name not in parts), *self.encoded]

    def dtype(self, weight: str) -> str:
        """The safetensors dtype of a weight after reading: BF16 if it is encoded."""
        return "BF16" if weight in self.encoded else self._entry(weight).dtype

    def stored_dtype(self, weight: str) -> str:
        """The stored dtype of a weight, or its name in EXPERT_DTYPES if the weight is encoded (codes and scales)."""
        return self.encoded[weight].stored_dtype if weight in self.encoded else self._entry(weight).dtype

    def shape(self, weight: str) -> tuple[int, ...]:
        """The shape of a weight after reading."""
        return self.encoded[weight].decoded_shape if weight in self.encoded else self._entry(weight).shape

    def files_of(self, weights: Iterable[str]) -> set[str]:
        """The files of these weights."""
        stored = ((weight,) if weight not in self.encoded else self.encoded[weight].names for weight in weights)
        return {self.file_of[name] for names in stored for name in names}

    def weight_bytes(self, weight: str) -> int:
        """Bytes of a weight after reading: in BF16 if it is encoded."""
        if weight not in self.encoded:
            entry = self._entry(weight)
            return entry.end - entry.begin
        return 2 * math.prod(self.encoded[weight].shape)

    def same(self, weight: str, others: Sequence[str]) -> bool:
        """Whether a weight has the bits of the only one of `others`; reads both, and never decodes.

        Without the files, config.json is believed: the two are the same.
        """
        if not self.here:
            return True
        if len(others) != 1 or weight in self.encoded or others[0] in self.encoded:
            return False
        (other,) = others
        if (self.dtype(weight), self.shape(weight)) != (self.dtype(other), self.shape(other)):
            return False
        return _same_bytes(self._stored(weight), self._stored(other))

    def is_zero(self, weight: str) -> bool:
        """Return whether all bits of an unencoded weight are 0. Without the checkpoint's files, return True."""
        return not self.here or (weight not in self.encoded and not self._stored(weight).read().any())

    def untied(self) -> Checkpoint:
        """The same tensors under a configuration that ties no embeddings."""
        return replace(self, config=_model_config(type(self.config).from_dict(untied(read_config(self.path)))))

    def _stored(self, tensor: str) -> _Stored:
        path = self.path / self.file_of[tensor]
        entry = self._entry(tensor)
        state = path.stat()
        return _Stored(path, entry.begin, entry.end, state.st_size, state.st_mtime_ns)

    def _entry(self, tensor: str) -> TensorEntry:
        return self.headers[self.file_of[tensor]].tensors[tensor]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.end - t.begin for h in self.headers.values() for t in h.tensors.values())


class _Stored(NamedTuple):
    path: Path
    begin: int
    end: int
    size: int
    time: int

    def read(self) -> Buffer:
        """Map them."""
        size = self.end - self.begin
        if not size:  # nothing can be mapped
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.begin, (size,))


@functools.lru_cache(maxsize=16)  # a build opens its checkpoint several times
def _same_bytes(one: _Stored, other: _Stored) -> bool:
    first = one.read()
    second = other.read()
    return all(np.array_equal(first[i : i + PIECE], second[i : i + PIECE]) for i in range(0, len(first), PIECE))


def open_checkpoint(name: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a model directory, or download a Hub model by its id; `revision` is its branch, tag or commit.

    Raises InputError, which names the missing, truncated or unusable file.
    """
    path = Path(name)
    check_kind(name)
    if path.is_dir() and revision is not None:
        raise InputError(f"{name}: is a directory: --revision is for a model on the Hub")
    if not path.is_dir():
        path = download(str(name), revision)
    document = read_config(path)
    scheme = read_scheme(path, document)
    config = make_config(path, document)
    files = _files(path)
    headers: dict[str, Header] = {}
    for file, expected in files.items():
        try:
            headers[file] = read_header(path / file)
        except OSError as error:
            why = f"{path / file}: cannot be read ({error.strerror})"
            raise InputError(f"{why}: download the checkpoint again") from None
        except BundleError as error:
            raise InputError(f"{error.problems[0]}: download the checkpoint again") from None
        lost = sorted(expected - set(headers[file].tensors))
        if lost:
            raise InputError(f"{path / file}: lacks tensor {lost[0]}, which {DENSE_INDEX} places there")
    return described(path, str(name), config, scheme, headers)


def check_kind(name: str | Path) -> None:
    """Raise InputError for a path or a Hub id of what is plainly no checkpoint: a file, GGUF, or a bundle."""
    path = Path(name)
    safe = "moepack reads safetensors: give the checkpoint that it was made from"
    if path.is_file():
        what = f"a GGUF file: {safe}" if path.suffix.lower() == ".gguf" else "a file: give the directory that holds it"
        raise InputError(f"{name}: is {what}")
    if (path / MANIFEST).is_file():
        raise InputError(f"{name}: is a bundle, not a checkpoint: give the checkpoint that it was made from")
    if not path.is_dir():
        if path.name.lower().endswith("-gguf"):
            raise InputError(f"{name}: is a repository of GGUF files by its name: {safe}")
        return
    gguf = next(path.glob("*.gguf"), None)
    if gguf is not None and not any(path.glob("*.safetensors*")):
        raise InputError(f"{name}: holds GGUF files, as {gguf.name}: {safe}")


def described(
    path: Path,
    name: str,
    config: PreTrainedConfig,
    scheme: Scheme | None,
    headers: Mapping[str, Header],
    here: bool = True,
) -> Checkpoint:
    """The checkpoint with these headers of its files, by file name; `here`: the files are in `path`.

    Raises InputError for a tensor in two files, and as `find_encoded` does.
    """
    file_of: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor in file_of:
                raise InputError(f"{path}: {tensor} is in {file_of[tensor]} and in {file}: take one of them out")
            file_of[tensor] = file
    tensors = {n: t for h in headers.values() for n, t in h.tensors.items()}
    encoded = find_encoded(path, scheme, tensors)
    return Checkpoint(path, name.rstrip("/"), config, headers, file_of, encoded, here)


def download(name: str, revision: str | None, patterns: Sequence[str] = _WANTED) -> Path:
    """Download a model's files with these patterns; return their folder."""
    if on_hub(name, "config.json", revision=revision) is None:
        raise InputError(f"{name}: has no config.json: not a model repository")
    from huggingface_hub import snapshot_download

    with in_one_line(name):
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*.safetensors"]
            )
        )


def read_config(path: Path) -> dict[str, Any]:
    """The document of a model directory's config.json. Raises InputError where it is not one of a model."""
    file = path / "config.json"
    try:
        document = json.loads(file.read_text())
    except OSError:
        raise InputError(f"{path}: has no config.json: not a model directory") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise InputError(f"{file}: names no model_type")
    check_counts(str(file), document)
    return document


def make_config(path: Path, document: Mapping[str, object]) -> PreTrainedConfig:
    """The transformers configuration of a model directory, without quantisation. `document`: from `read_config`."""
    file = path / "config.json"

    from transformers import AutoConfig  # slow to import, so errors above come first

    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # the error's class depends on transformers' version
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if document["model_type"] not in CONFIG_MAPPING:
            message = f"model_type {document['model_type']!r} is unknown to this transformers: upgrade transformers"
            raise InputError(f"{file}: {message}") from None
        raise InputError(f"{file}: {in_a_line(error)}") from None
    return _model_config(config)


def _model_config(config: PreTrainedConfig) -> PreTrainedConfig:
    for owner in (config, config.get_text_config()):
        if hasattr(owner, "quantization_config"):
            del owner.quantization_config
    return config


def untied(document: Mapping[str, object]) -> dict[str, object]:
    """The document of a config.json, changed so that transformers ties no embeddings, of a part either."""
    out = {name: untied(part) if isinstance(part, dict) else part for name, part in document.items()}
    if "model_type" in out or "tie_word_embeddings" in out:
        out["tie_word_embeddings"] = False
    return out


def _files(path: Path) -> dict[str, set[str]]:
    """As `placed`, but raises InputError where a file is missing."""
    files = placed(path)
    if files is None:
        raise InputError(
            f"{path}: has neither {DENSE} nor {DENSE_INDEX}: moepack reads safetensors checkpoints ({WITHOUT})"
        )
    if (path / DENSE).exists() and files.keys() != {DENSE}:  # of which transformers would load the first alone
        raise InputError(f"{path}: has {DENSE}, and {DENSE_INDEX} of other files: take out the one that is not meant")
    if (path / ADAPTER).exists():  # which transformers would load on top
        raise InputError(f"{path}: has {ADAPTER}: merge the adapter into the weights, or take it out")
    for file in sorted(files):
        if not (path / file).exists():
            again = f"download the checkpoint again ({WITHOUT})"
            raise InputError(f"{path / file}: missing, but {DENSE_INDEX} names it: {again}")
    return files


def placed(path: Path) -> dict[str, set[str]] | None:
    """Map each file's name to the tensors that the index places in the file; None without an index or a single file.

    Raises InputError for an index that is not one.
    """
    index = path / DENSE_INDEX
    if not index.exists():
        return {DENSE: set()} if (path / DENSE).exists() else None
    try:
        places = json.loads(index.read_text())["weight_map"]
        files: dict[str, set[str]] = {}
        for tensor, file in places.items():
            files.setdefault(file, set()).add(tensor)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InputError(f"{index}: not an index of safetensors files") from None
    for file in sorted(files):
        if Path(file).name != file:
            raise InputError(f"{index}: names {file!r}, which is not a file of this directory")
    return files


def native_version(checkpoint: Checkpoint, weights: list[str]) -> Version:
    """The version that keeps these weights, all of one encoding, as the checkpoint has them: bf16 if not encoded.

    Raises InputError if their encodings differ, or for groups that no version has.
    """
    found = {(e.version, e.group): w for w in reversed(weights) if (e := checkpoint.encoded.get(w))}
    if not found:
        return Version.of(LOSSLESS)
    if len(found) > 1:
        kinds = {f"{name} with a scale for {group or 'all'} columns": w for (name, group), w in found.items()}
        raise _several(checkpoint, kinds)
    ((name, group),) = found
    name = "fp8row" if name == "fp8" and not group else name
    sizes = encoding_of(name).group_sizes or (0,)
    if group not in sizes:
        are = f"are {name} with a scale for {group or 'all'} columns"
        raise InputError(
            f"{checkpoint.name}: expert weights {are}; moepack keeps groups of {', '.join(map(str, sizes))}"
        )
    symmetric = all(e.zeros_in is None for w in weights if (e := checkpoint.encoded.get(w)))
    return Version.of(name, group, symmetric=symmetric)


def source_dtype(checkpoint: Checkpoint, weights: list[str]) -> str:
    """The stored dtype of these weights, by its name in the manifest.

    Raises InputError if their dtypes differ or cannot be converted to BF16.
    """
    found = {checkpoint.stored_dtype(w): w for w in reversed(weights)}
    if len(found) > 1:
        raise _several(checkpoint, found)
    ((dtype, weight),) = found.items()
    if dtype not in EXPERT_DTYPES:
        raise InputError(f"{checkpoint.name}: {weight} is {dtype}; moepack reads {', '.join(EXPERT_DTYPES)}")
    return dtype


def _several(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> InputError:
    every = ", ".join(f"{kind} as {weight}" for kind, weight in sorted(kinds.items()))
    return InputError(f"{checkpoint.name}: expert weights are {every}: moepack keeps one encoding")
