"""A name that is no directory, asked for on the Hub once, before anything that retries. Downloads nothing.

huggingface_hub tries again for half a minute: right for a download that has begun, wrong for a mistyped name. It is in
this folder because those who open bundles and checkpoints by name have no other in common.
"""

from __future__ import annotations

import os

from .errors import InputError

SECONDS = 5.0  # that the Hub has to answer, unless HF_HUB_ETAG_TIMEOUT says otherwise


def on_hub(
    name: str,
    *files: str,
    instead: str = "no such directory",
    kind: str = "model",
    revision: str | None = None,
    token: str | bool | None = None,
) -> str | None:
    """The first of `files` that a repository has, or None where it has none of them.

    Where the Hub is not to be asked or cannot be reached, what was downloaded before counts.

    Args:
        name: the repository's.
        files: in it.
        instead: what else the name was tried as; nothing where it could only be a repository's.
        kind: "model" or "dataset".
        revision: a branch, tag or commit.
        token: as huggingface_hub takes it.

    Raises:
        InputError: in one line, when there is no such repository, or the Hub cannot be asked.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    also = f"{instead}, and " if instead else ""
    _check_name(name, instead, also)
    here = [f for f in files if isinstance(try_to_load_from_cache(name, f, revision=revision, repo_type=kind), str)]
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        seconds = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else SECONDS
        for file in files:
            try:
                get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind, revision=revision), token, timeout=seconds)
                return file
            except EntryNotFoundError:
                continue
        return None
    except RevisionNotFoundError:
        raise InputError(f"{name}: has no revision {revision!r} on the Hub") from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{name}: {also}no such repository on the Hub, or no access to it: log in with hf auth login"
        ) from None
    except Exception as error:  # no connection: which class says so depends on huggingface_hub's HTTP library
        if here:
            return here[0]
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name}: {also}the Hub cannot be reached ({constants.ENDPOINT}: {why}): check the name, or the network"
        ) from None


def _check_name(name: str, instead: str, also: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if _is_path(name):
        raise InputError(f"{name}: {instead or 'not the name of a repository'}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise InputError(f"{name}: {also}not the name of a repository on the Hub, OWNER/NAME") from None


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1
