"""Connect to a Ray cluster, or start one on this machine."""

from __future__ import annotations

import logging
import os
import re
import socket
from types import ModuleType

from moepack.pack.errors import InputError, MissingExtraError


def connect(address: str | None, **local: object) -> tuple[ModuleType, bool]:
    """Connect; return the ray module, and whether this call initialised it (then the caller shuts it down).

    Args:
        address: the cluster's address. None takes RAY_ADDRESS, or if unset, starts a cluster on this machine.
        local: options of `ray.init` for a cluster that is started on this machine.

    Raises:
        InputError: if nothing answers at the address.
        MissingExtraError: if Ray is not installed.
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
    """Return the given address, or else the variable RAY_ADDRESS, which jobs on a cluster have."""
    return address or os.environ.get("RAY_ADDRESS")


def reach(address: str | None) -> None:
    """Raise InputError if a HOST:PORT address accepts no connection. Ray itself would try for minutes."""
    at = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address or "")
    if at is None:
        return
    try:
        socket.create_connection((at.group(1), int(at.group(2))), timeout=10).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(f"Ray at {address}: nobody answers there: {error}") from None
