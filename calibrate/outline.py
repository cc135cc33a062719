"""A checkpoint whose weights are not here: shapes from headers on the Hub, or from config.json alone.

A dry run needs shapes, dtypes and the released format, and no weight. On the Hub, the headers of a checkpoint's files
are read by HTTP range: they show what is missing or not readable as the build would. In a directory without them, the
model's own parameters stand for the checkpoint's tensors, in BF16. Reads configurations and headers, never weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moepack.pack.errors import InputError, in_a_line
from moepack.pack.manifest import DENSE, DENSE_INDEX
from moepack.pack.safetensors_file import DTYPES, Header, TensorEntry
from moepack.pack.spec import Version

from .checkpoint import Checkpoint, check_kind, described, download, make_config, placed, read_config
from .released.announced import announced_version
from .released.find import read_scheme


@dataclass(frozen=True)
class Outline:
    """A checkpoint's configuration and tensor shapes, without its weights."""

    checkpoint: Checkpoint  # its files need not be there
    native: Version | None  # the version that keeps its experts as released; None where its tensors tell
    bytes: int  # of its tensors as released; 0 where neither headers nor an index tell
    source: str  # the file or files that tell the shapes


def open_outline(name: str | Path, revision: str | None = None) -> Outline | None:
    """Return the outline of a model directory or Hub model, or None if its weights are here (use `open_checkpoint`).

    Raises InputError for a configuration, an index or a header that a build would refuse, and where the Hub cannot be
    reached.
    """
    path = Path(name)
    check_kind(name)
    if path.is_dir():
        return None if revision is not None or _complete(path) else _from_config(path, str(name))
    if _complete(path := download(str(name), revision, ("config.json", DENSE_INDEX))):
        return None
    headers = _remote_headers(str(name), revision)
    if headers is None:
        return _from_config(path, str(name))
    document = read_config(path)
    scheme = read_scheme(path, document)
    checkpoint = described(path, str(name), make_config(path, document), scheme, headers, here=False)
    return Outline(checkpoint, None, checkpoint.bytes, "the headers of its files")


def _complete(path: Path) -> bool:
    files = placed(path)
    return files is not None and all((path / file).exists() for file in files)


def _remote_headers(name: str, revision: str | None) -> dict[str, Header] | None:
    """The headers of a Hub model's files by file name, unchecked; None for a model without safetensors, or offline."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub import errors as hub

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        files = HfApi().get_safetensors_metadata(name, revision=revision).files_metadata
    except hub.NotASafetensorsRepoError:
        return None
    except Exception as error:  # which class says that there is no connection depends on the library's HTTP client
        raise InputError(f"{name}: headers of its weights cannot be read: {in_a_line(error)}") from None
    return {
        file: Header(
            0, {n: TensorEntry(t.dtype, tuple(t.shape), *t.data_offsets) for n, t in found.tensors.items()}, {}
        )
        for file, found in files.items()
    }


def _from_config(path: Path, name: str) -> Outline:
    from moepack.families.model_class import meta_model

    document = read_config(path)
    native = announced_version(path, document)
    config = make_config(path, document)
    model = meta_model(config, name)
    tied = set(model.all_tied_weights_keys)
    names = {torch_name: n for n, (_, torch_name, _) in DTYPES.items()}
    tensors = {}
    end = 0
    for key, tensor in model.state_dict().items():
        if key not in tied:
            begin = end
            end = end + tensor.nbytes
            tensors[key] = TensorEntry(names[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), begin, end)
    checkpoint = described(path, name, config, None, {DENSE: Header(0, tensors, {})}, here=False)
    size = _total_size(path)
    source = f"config.json and {DENSE_INDEX}" if size else "config.json alone"
    files = sorted(placed(path) or ())
    missing = [file for file in files if not (path / file).exists()]
    if 0 < len(missing) < len(files):  # a download has not ended
        source += f"; of {len(files)} files of weights {len(missing)} are missing, as {missing[0]}"
    return Outline(checkpoint, native, size, source)


def _total_size(path: Path) -> int:
    """The bytes of all tensors by a directory's index; 0 if there is none, or it does not say."""
    if not (path / DENSE_INDEX).exists():
        return 0
    metadata: Mapping[str, object] = json.loads((path / DENSE_INDEX).read_text()).get("metadata") or {}
    size = metadata.get("total_size", 0)
    return int(size) if isinstance(size, int | float) and size > 0 else 0
