"""Turn errors of the Hub library into one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moepack.pack.errors import MoepackError


class HubError(MoepackError):
    """The Hub refused a request, or could not be reached."""


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn every error of requests to a repository into a HubError, except moepack's own errors."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except MoepackError:
        raise
    except GatedRepoError:
        raise HubError(f"{repo}: gated: ask for access on its page, and log in with hf auth login") from None
    except RepositoryNotFoundError:
        raise HubError(f"{repo}: no such repository, or no access to it: log in with hf auth login") from None
    except RevisionNotFoundError:
        raise HubError(f"{repo}: has no such revision") from None
    except Exception as error:  # of the library, the operating system or the HTTP library
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if _unreachable(error):
            text = f"the Hub cannot be reached ({constants.ENDPOINT}: {text}): check the network, and run the same "
            text += "command again to continue"
        raise HubError(f"{repo}: {text}") from None


def _unreachable(error: BaseException) -> bool:
    """Whether the Hub gave no answer. Compares class names: the classes depend on huggingface_hub's HTTP library."""
    names = {"TransportError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "IncompleteSnapshotError"}
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(kinds & names)
