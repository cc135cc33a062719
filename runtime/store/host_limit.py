"""How much host memory is free, may be pinned or taken: what the system and the control group have left, less a margin.

RLIMIT_MEMLOCK is reported, not applied: containers usually set it to 64 KiB or 8 MiB, and CUDA's drivers on Linux pin
gigabytes despite it. If a driver obeys it, registering fails, and the chain of pinning.py tries its next way.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from moepack.pack.processors import CGROUPS, PROCESS, groups

MARGIN = 16  # 1/16 of memory, at least 1 GiB, stays free: pinned pages are never swapped
# What stays free in a control group under `auto`: 1/64 of its limit, at least 32 MiB. The group counts what the kernel
# keeps for its processes and files, and cache that is being read.
CAGE_MARGIN = 64
CAGE_LEAST = 32 << 20


def host_limits(root: Path = CGROUPS, process: Path = PROCESS) -> dict[str, Any]:
    """Return the limits in bytes, ready for JSON: `available_bytes`, `cgroup_bytes` and `memlock_bytes` (`None` where
    no limit is set), `margin_bytes`, and `pinnable_bytes`, which is a store's default limit."""
    import psutil

    memory = psutil.virtual_memory()
    cgroup = cgroup_room(root, process)
    margin = max(1 << 30, memory.total // MARGIN)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "available_bytes": memory.available,
        "cgroup_bytes": cgroup,
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "margin_bytes": margin,
        "pinnable_bytes": max(0, _room(memory.available, cgroup) - margin),
    }


def available_memory() -> int:
    """Return the bytes that a process may still take: what the system and its control group both have left."""
    import psutil

    return _room(psutil.virtual_memory().available, cgroup_room(CGROUPS, PROCESS))


def most_memory(root: Path = CGROUPS, process: Path = PROCESS) -> int:
    """Return the most bytes that this process may take: what it has, and what system and group have left.

    A margin stays free. The process's pages of mapped files are left out of what it has: they count as free.
    """
    import psutil

    memory = psutil.virtual_memory()
    held = resident()[0]
    most = held + memory.available - max(1 << 30, memory.total // MARGIN)
    for size, left in _limits(root, process):
        most = min(most, held + left - max(CAGE_LEAST, size // CAGE_MARGIN))
    return most


def resident() -> tuple[int, int]:
    """Return the process's resident bytes: its own, and those of files it has mapped."""
    import psutil

    memory = psutil.Process().memory_info()
    files = getattr(memory, "shared", 0)
    return memory.rss - files, files


def group_peak(root: Path = CGROUPS, process: Path = PROCESS) -> int | None:
    """Return the most bytes that the process's control group has taken, page cache included; `None` if unreadable."""
    for group in sorted(groups(root, process, "memory"), key=lambda found: -len(found.parts)):
        if (peak := _number(group, "memory.peak", "memory.max_usage_in_bytes")) is not None:
            return peak
    return None


def _room(available: int, cgroup: int | None) -> int:
    return available if cgroup is None else min(available, cgroup)


def cgroup_room(root: Path, process: Path) -> int | None:
    """Return the least bytes left in the process's control group and the groups above it; `None` without a limit.

    Page cache that can be dropped counts as free.
    """
    return min((left for _, left in _limits(root, process)), default=None)


def _limits(root: Path, process: Path) -> list[tuple[int, int]]:
    """Return the limit of each control group that has one, and the bytes that it has left."""
    found = []
    for group in groups(root, process, "memory"):
        most = _number(group, "memory.max", "memory.limit_in_bytes")
        taken = _number(group, "memory.current", "memory.usage_in_bytes")
        if most is not None and taken is not None and most < 1 << 60:  # version 1 writes no limit as a huge number
            found.append((most, max(0, most - max(0, taken - _reclaimable(group)))))
    return found


def _number(group: Path, *names: str) -> int | None:
    for name in names:
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
    return None


def _reclaimable(group: Path) -> int:
    try:
        rows = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(value) for name, value in rows if name in ("inactive_file", "active_file"))
