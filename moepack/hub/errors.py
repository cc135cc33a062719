"""Turn errors of the Hub library into one line each, and its own waits into notes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from moepack.pack.errors import MoepackError
from moepack.pack.hub_errors import in_one_line
from moepack.shared.progress import Reporter


class HubError(MoepackError):
    """The Hub refused a request, or could not be reached."""


@contextmanager
def hub_errors(repo: str, reporter: Reporter, use: Literal["read", "write"] = "read") -> Iterator[None]:
    """Turn every error of requests to a repository into a HubError, except moepack's own errors."""

    def noted(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if any(word in text for word in ("Retrying", "before retry", "Trying to resume")):
            reporter.note(f"{repo}: the Hub did not answer: {text}")
        return record.levelno >= logging.ERROR

    loggers = [logging.getLogger(f"huggingface_hub.{name}") for name in ("utils._http", "file_download")]
    for logger in loggers:
        logger.addFilter(noted)
    try:
        with in_one_line(repo, use, HubError):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(noted)
