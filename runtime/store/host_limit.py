"""How much host memory is free, and may be pinned: what the system and the control group have left, less a margin.

RLIMIT_MEMLOCK is reported, not applied: containers usually set it to 64 KiB or 8 MiB, and CUDA's drivers on Linux pin
gigabytes despite it. If a driver obeys it, registering fails, and the chain of pinning.py tries its next way.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

CGROUPS, PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MARGIN = 16  # 1/16 of memory, at least 1 GiB, stays free: pinned pages are never swapped


def host_limits(root: Path = CGROUPS, process: Path = PROCESS) -> dict[str, Any]:
    """Return the limits in bytes, ready for JSON: `available_bytes`, `cgroup_bytes` and `memlock_bytes` (`None` where
    no limit is set), `margin_bytes`, and `pinnable_bytes`, which is a store's default limit."""
    import psutil

    memory, cgroup = psutil.virtual_memory(), cgroup_room(root, process)
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


def _room(available: int, cgroup: int | None) -> int:
    return available if cgroup is None else min(available, cgroup)


def cgroup_room(root: Path, process: Path) -> int | None:
    """Return the least bytes left in the process's control group and the groups above it; `None` without a limit.

    Page cache that can be dropped counts as free.
    """
    rooms = []
    for group in _groups(root, process):
        most = _number(group, "memory.max", "memory.limit_in_bytes")
        taken = _number(group, "memory.current", "memory.usage_in_bytes")
        if most is not None and taken is not None and most < 1 << 60:  # version 1 writes no limit as a huge number
            rooms.append(max(0, most - max(0, taken - _reclaimable(group))))
    return min(rooms, default=None)


def _groups(root: Path, process: Path) -> list[Path]:
    try:
        lines = process.read_text().splitlines()
    except OSError:
        lines = []
    found = {root, root / "memory"}  # a container's own group is mounted there
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "memory"
        if not controllers or "memory" in controllers.split(","):
            group = base / path.lstrip("/")
            found.update(p for p in (group, *group.parents) if p.is_relative_to(base))
    return sorted(found)


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
