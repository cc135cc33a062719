"""The executors that `--engine` names: `local`, in this process, or `ray`, on a cluster.

Both make the same bytes, because every task runs on a fixed number of threads (tasks/result.py). `Local` documents the
methods that both have.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError, MissingExtraError
from moepack.shared.cluster import asked, reach

from .local import Local

if TYPE_CHECKING:
    from .on_ray import OnRay

NAMES = ("local", "ray")


def check_engine(name: str, address: str | None) -> None:
    """Raise an error unless the executor can be opened. Call it before any work.

    Raises:
        InputError: for an unknown executor, an address without Ray, or a cluster that does not answer.
        MissingExtraError: when Ray is not installed.
    """
    if name not in NAMES:
        raise InputError(f"engine {name!r} is unknown: there are {', '.join(NAMES)}")
    if name == "local" and address is not None:
        raise InputError("--address names a Ray cluster: give --engine ray as well")
    if name == "ray":
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("ray", "ray")
        reach(asked(address))


def open_executor(name: str, address: str | None) -> Local | OnRay:
    """Open an executor that `check_engine` accepted; `address` is a Ray cluster's."""
    if name == "local":
        return Local()
    from .on_ray import OnRay

    return OnRay(address)
