"""Say in one line why a request to a Hub failed and what to do, and repeat requests that a busy Hub refused.

hub_name.py says why this is in pack/.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

from .errors import InputError, MoepackError, in_a_line

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

Answer = TypeVar("Answer")

WAITS = (1.0, 2.0, 4.0, 8.0, 8.0)  # seconds between tries, unless the Hub says how long to wait
LONGEST = 300.0  # the most seconds between two tries
BUSY = (408, 429, 500, 502, 503, 504)  # statuses after which the same request may succeed
AGAIN = "run the same command again"
# The modules of huggingface_hub that read answers
_READERS = tuple(f"huggingface_hub.{name}" for name in ("hf_api", "file_download", "_commit_api", "lfs", "utils._"))


def patiently(call: Callable[[], Answer], note: Callable[[str], object] = lambda text: None) -> Answer:
    """Call, and call again while the Hub is busy. `note` receives a line before each wait.

    What huggingface_hub has repeated itself is not repeated.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for wait in WAITS:
        try:
            return call()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in BUSY or _repeated(error):
                raise
            asked = error.response.headers.get("Retry-After", "")
            seconds = min(float(asked), LONGEST) if asked.isdigit() else wait
            note(f"the Hub is busy ({status}): trying again in {seconds:g} s")
        time.sleep(seconds)
    return call()


@contextmanager
def in_one_line(
    name: str, use: Literal["read", "write"] = "read", kind: type[MoepackError] = InputError
) -> Iterator[None]:
    """Turn errors of requests for `name`, of whichever library, into one line of a `kind`; ours stay as they are."""
    try:
        yield
    except MoepackError:
        raise
    except Exception as error:
        raise kind(f"{name}: {reason(error, use)}") from None


def _repeated(error: HfHubHTTPError) -> bool:
    """Whether huggingface_hub has repeated this request: all of an upload, and downloads after some statuses."""
    request = error.response.request
    outside = "/api/" not in request.url.path
    if request.method == "HEAD":
        return False
    if request.method == "GET":
        return outside and error.response.status_code in (408, 429)
    return outside or "/preupload/" in request.url.path


def reason(error: BaseException, use: Literal["read", "write"] = "read") -> str:
    """Return one line: why a request to the Hub failed, and what to do.

    `use` is what the token is for, which the line says where the Hub refuses the token.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, HfHubHTTPError):
            return _answered(cause, use)
    if any(map(_misread, causes)):
        return f"{constants.ENDPOINT} does not answer as a Hub does: check the network, and the address in HF_ENDPOINT"
    for cause in reversed(causes):
        if not _unreachable(cause):
            continue
        text = in_a_line(cause)
        if text.startswith(("Network error", "Server error")):  # of hf_xet
            return f"Xet storage does not answer ({text}): set HF_HUB_DISABLE_XET=1, and {AGAIN}"
        return f"the Hub cannot be reached ({constants.ENDPOINT}: {text}): check the network, and {AGAIN}"
    return in_a_line(error)


def _answered(error: HfHubHTTPError, use: str) -> str:
    """Explain an answer of the Hub that is an error."""
    from urllib.parse import urlsplit

    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    answer = error.response
    status = answer.status_code
    message = " ".join((error.server_message or "").split())
    said = f"{status}: {message[:200]}" if message else str(status)
    if answer.url.host != urlsplit(constants.ENDPOINT).hostname:
        return f"the Hub's storage at {answer.url.host} refuses the request ({said}): {AGAIN}"
    if isinstance(error, GatedRepoError):
        return "gated: ask for access on its page, and log in with hf auth login"
    if status == 401 and "Authorization" in answer.request.headers:
        where = "HF_TOKEN holds" if os.environ.get("HF_TOKEN") else "hf auth login stored"
        return f"{constants.ENDPOINT} does not know the token that {where} ({said}): log in with a valid one"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository on the Hub, or no access to it: log in with hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return "has no such revision"
    if status == 401:
        return f"{constants.ENDPOINT} wants a token ({said}): log in with hf auth login"
    if status == 403:
        return f"the token has no right to {use} here ({said}): log in with one that has"
    if status == 412:
        return f"another push changed the repository meanwhile ({said}): {AGAIN}"
    if status == 429:
        return f"the Hub limits requests ({said}), and did each time: wait, and {AGAIN}"
    if status in BUSY:
        return f"the Hub is out of order ({said}), and was each time: wait, and {AGAIN}"
    line = f"{constants.ENDPOINT} refuses {answer.request.method} {answer.url.path} ({said})"
    explained = "X-Error-Code" in answer.headers or "X-Error-Message" in answer.headers
    return line if explained else f"{line}: check that HF_ENDPOINT names a Hub"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _misread(error: BaseException) -> bool:
    """Whether huggingface_hub did not understand an answer. Its own checks of arguments are no such errors."""
    from huggingface_hub.errors import FileMetadataError, HFValidationError

    if isinstance(error, FileMetadataError):
        return True
    kinds = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
    if not isinstance(error, kinds) or isinstance(error, HFValidationError):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    return any(module.startswith(_READERS) for module in modules)


def _unreachable(error: BaseException) -> bool:
    """Whether the Hub gave no answer. Compares class names: the classes depend on huggingface_hub's HTTP library."""
    names = {"TransportError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "IncompleteSnapshotError"}
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(kinds & names)
