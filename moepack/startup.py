"""What a command that serves leaves out of its process before anything is imported.

transformers imports these wherever it finds them, for other ways to quantise and for losses; no bundle needs them, and
importing them takes a second of such a command's start (`python -m benchmarks.start`).
"""

from __future__ import annotations

import sys
from typing import Any

SERVING = frozenset({"serve", "generate", "chat"})
UNUSED = ("hqq", "scipy", "sklearn", "torchao")


def leave_out(command: str, modules: dict[str, Any] | None = None) -> None:
    """Have Python say of UNUSED libraries that they are not there, for a process that runs such a command.

    Args:
        command: its name.
        modules: sys.modules, but for tests.
    """
    for name in UNUSED if command in SERVING else ():
        (sys.modules if modules is None else modules).setdefault(name, None)  # type: ignore[arg-type]
