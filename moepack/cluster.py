"""A Ray cluster: one that is there, or one started on this machine. Decides nothing about what runs on it."""

from __future__ import annotations

import logging
import os
import re
import socket
from typing import Any

from moepack.pack.errors import InputError, MissingExtraError


def connect(address: str | None, **local: Any) -> tuple[Any, bool]:
    """Ray, and whether it was started here, to be shut down again.

    Args:
        address: of the cluster; None for RAY_ADDRESS's, or one that is started on this machine.
        local: options of one that is started here.

    Raises:
        InputError: when nobody answers there.
        MissingExtraError: when Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    started = not ray.is_initialized()
    address = asked(address)
    reach(address)
    if started:
        # Without "local" Ray joins whatever cluster it finds on this machine.
        start = {"address": "local", "include_dashboard": False, **local}
        options = start if address is None else {"address": address}
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = address or "a local cluster"
            raise InputError(f"Ray at {where}: {str(error).strip().splitlines()[0]}") from None
    return ray, started


def asked(address: str | None) -> str | None:
    """The address of the cluster that is meant: RAY_ADDRESS's where none is named, as in a job that a cluster runs."""
    return address or os.environ.get("RAY_ADDRESS")


def reach(address: str | None) -> None:
    """Connect to a cluster's port: Ray itself tries an address where nobody listens for minutes.

    Raises:
        InputError: when nobody answers there.
    """
    at = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address or "")
    if at is None:
        return
    try:
        socket.create_connection((at.group(1), int(at.group(2))), timeout=10).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"Ray at {address}: nobody answers there: {error}") from None
