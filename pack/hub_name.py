"""Ask the Hub once whether a repository exists, without a download.

huggingface_hub retries for half a minute, which is too long for a mistyped name. The module is in pack/ because
all its users may import from it.
"""

from __future__ import annotations

import functools
import os

from .errors import InputError
from .hub_errors import patiently, reason

SECONDS = 5.0  # to wait for the Hub's answer, unless HF_HUB_ETAG_TIMEOUT is set


def on_hub(
    name: str,
    *files: str,
    instead: str = "no such directory",
    kind: str = "model",
    revision: str | None = None,
    token: str | bool | None = None,
) -> str | None:
    """Find the first of `files` that a repository has; None if it has none.

    Offline, or where the Hub cannot be reached, the local cache answers. `instead` begins the error message: what else
    the name could have been, such as a directory; may be empty. `kind` is "model" or "dataset", and `revision` a
    branch, tag or commit. Raises a one-line InputError when the repository does not exist or the Hub cannot be asked.
    """
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    also = f"{instead}, and " if instead else ""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # a path
        raise InputError(f"{name}: {instead or 'not the name of a repository'}")
    try:
        validate_repo_id(name)
    except hub.HFValidationError:
        raise InputError(f"{name}: {also}not the name of a repository on the Hub, OWNER/NAME") from None
    here = [f for f in files if isinstance(try_to_load_from_cache(name, f, revision=revision, repo_type=kind), str)]
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        seconds = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else SECONDS
        for file in files:
            url = hf_hub_url(name, file, repo_type=kind, revision=revision)
            look = functools.partial(_look, url, token, seconds)
            try:
                look() if here else patiently(look)
                return file
            except hub.EntryNotFoundError:
                continue
        return None
    except hub.RevisionNotFoundError:
        raise InputError(f"{name}: has no revision {revision!r} on the Hub") from None
    except Exception as error:  # which class says that there is no connection depends on the library's HTTP library
        if here and not isinstance(error, hub.RepositoryNotFoundError):
            return here[0]
        raise InputError(f"{name}: {also}{reason(error)}") from None


def _look(url: str, token: str | bool | None, seconds: float) -> None:
    """Ask for a file. Raises as huggingface_hub, and FileMetadataError for an answer that no Hub gives."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import FileMetadataError

    if get_hf_file_metadata(url, token, timeout=seconds).commit_hash is None:
        raise FileMetadataError(url)
