"""The Hub library's errors, in one line each. Decides nothing about what is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moepack.pack.errors import MoepackError


class HubError(MoepackError):
    """The Hub refused, or could not be reached."""


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Around requests that concern a repository: whatever goes wrong becomes a HubError.

    Errors of our own pass as they are, and so does an interruption.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except MoepackError:
        raise
    except GatedRepoError:
        raise HubError(f"{repo}: access is granted on request: ask for it on its page, and log in with hf auth login") \
            from None  # fmt: skip
    except RepositoryNotFoundError:
        raise HubError(f"{repo}: no such repository, or no access to it: log in with hf auth login") from None
    except RevisionNotFoundError:
        raise HubError(f"{repo}: has no such revision") from None
    except Exception as error:  # the library's own, the operating system's, and those of its HTTP library
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if _unreachable(error):
            raise HubError(
                f"{repo}: the Hub cannot be reached ({constants.ENDPOINT}: {text}): check the network, and run the "
                "same command again: it goes on where it stopped"
            ) from None
        raise HubError(f"{repo}: {text}") from None


def _unreachable(error: BaseException) -> bool:
    """Whether no answer came. Which class says so depends on huggingface_hub's HTTP library, hence by name."""
    names = {"TransportError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "IncompleteSnapshotError"}
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(kinds & names)
