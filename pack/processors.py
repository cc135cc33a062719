"""How many processors this process may use: what the scheduler grants it, and what its control groups' quotas leave.

`taskset` and cpusets (`docker run --cpuset-cpus`) bound the processors on which a process may run; a quota (`docker run
--cpus=2`) bounds the seconds of processor that it may take in each period. Everything that starts threads asks here.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self/cgroup")


def processors() -> int:
    """Return the number of threads that can compute at a time: at least 1. A part of a processor counts as one."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(granted, quota(CGROUPS, PROCESS) or granted))


@functools.cache  # of a process that runs; a quota seldom changes
def quota(root: Path, process: Path) -> int | None:
    """Return the processors of the least quota of the process's control groups, rounded up; `None` without one."""
    found = [share for group in groups(root, process, "cpu") if (share := _share(group)) is not None]
    return math.ceil(min(found)) if found else None


def groups(root: Path, process: Path, controller: str) -> list[Path]:
    """Return the folders of the process's control group and of those above it, of version 2 and of a controller's."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        lines = []
    found = {root, root / controller}  # a container's own group is mounted there
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / controller
        if not controllers or controller in controllers.split(","):
            group = base / path.lstrip("/")
            found.update(p for p in (group, *group.parents) if p.is_relative_to(base))
    return sorted(found)


def _share(group: Path) -> float | None:
    """Return the processors that a group may take; `None` if it sets no quota."""
    for words in _settings(group):
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])
    return None


def _settings(group: Path) -> Iterator[list[str]]:
    """Yield the quota and the period of a group in microseconds, as version 2 and as version 1 write them."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            yield " ".join((group / name).read_text() for name in names).split()
        except OSError:
            continue
