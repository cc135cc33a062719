"""A limit on the memory of one process with all that it makes the system keep: a control group, page cache included.

Decides nothing about what runs in it. Without the right to make a group the process' own memory is limited, and its
page cache is not; `bounds` says which.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
# Names of files, version 1 and 2: limit, peak, where kills are counted, what keeps swap away and its value.
_V1 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control", "memory.memsw.limit_in_bytes")
_V2 = ("memory.max", "memory.peak", "memory.events", "memory.swap.max")


@dataclass
class Cage:
    """A limit of so many bytes. A context manager: the group is there inside it, and its processes end with it."""

    limit: int
    group: Path | None = None
    names: tuple[str, str, str, str] = field(default=_V2)

    @property
    def bounds(self) -> str:
        """What is bounded."""
        if self.group is None:
            return "RLIMIT_DATA: page cache is not bounded"
        return f"control group version {1 if self.names == _V1 else 2}: page cache is bounded"

    def __enter__(self) -> Cage:
        for parent, self.names in ((own_group() or MOUNT / "memory", _V1), (MOUNT, _V2)):
            if not (parent / "cgroup.procs").is_file():  # no group: a directory there would be an ordinary one
                continue
            try:
                group = Path(tempfile.mkdtemp(prefix="moepack-limited-", dir=parent))
            except OSError:
                continue
            try:
                (group / self.names[0]).write_text(str(self.limit))
            except OSError:
                group.rmdir()
                continue
            self.group = group
            with suppress(OSError):  # a kernel that counts no swap has none of its own
                (group / self.names[3]).write_text(str(self.limit if self.names == _V1 else 0))
            break
        return self

    def __exit__(self, *_: object) -> None:
        if self.group is None:
            return
        for _attempt in range(100):
            with suppress(OSError):
                self.group.rmdir()
                return
            time.sleep(0.1)  # a process that ended leaves the group a little later

    def enter(self) -> None:
        """Put the calling process in; for a child, before its program starts."""
        if self.group is None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))
        else:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        """The most bytes that the group has taken; None without a group, or where the kernel does not say."""
        if self.group is None:
            return None
        with suppress(OSError, ValueError):
            return int((self.group / self.names[1]).read_text())
        return None

    def killed(self) -> bool:
        """Whether the kernel ended one of its processes for memory."""
        if self.group is None:
            return False
        words = [line.split() for line in (self.group / self.names[2]).read_text().splitlines()]
        return any(line[0] == "oom_kill" and int(line[1]) > 0 for line in words)


def own_group() -> Path | None:
    """This process' own group of version 1; None where memory is not of that version."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return MOUNT / "memory" / path.lstrip("/")
    return None


def forget(files: Iterable[Path]) -> str:
    """Empty the system's page cache, or where that is not allowed drop these files from it; says which."""
    os.sync()  # what is not written yet stays
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "page cache emptied"
    except OSError:
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        return "the model's files dropped from the page cache"


@contextmanager
def read_ahead(path: Path, kilobytes: int | None) -> Iterator[int | None]:
    """Have the disk that holds `path` read so far ahead of a page fault, where that is allowed; None leaves it.

    Yields what holds inside, None where the system does not say. Linux' own value is 128; with the 8,192 of some
    virtual machines a program that maps a model reads several times what it needs.
    """
    setting = _queue(path) / "read_ahead_kb"
    before = None
    with suppress(OSError):
        before = int(setting.read_text())
        if kilobytes is not None:
            setting.write_text(str(kilobytes))
    try:
        yield int(setting.read_text()) if before is not None else None
    finally:
        if before is not None and kilobytes is not None:
            with suppress(OSError):
                setting.write_text(str(before))


def _queue(path: Path) -> Path:
    """The settings of the disk that a file is on; a partition has its disk's."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return (device if (device / "queue").is_dir() else device.parent) / "queue"


def counts() -> dict[str, float]:
    """What this process has had read from disk, its seconds of processors, and its memory that belongs to no file."""
    return {"read": bytes_read(os.getpid()), "cpu": time.process_time(), "anonymous": anonymous(os.getpid())}


def bytes_read(pid: int) -> int:
    """Bytes that a process has had read from disk, its page faults included."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def anonymous(pid: int) -> int:
    """Bytes of a process that are in memory and belong to no file."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
    return 0
