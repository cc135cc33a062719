"""What moepack's commands give where a system has what macOS has: `without_linux.py FOLDER CHECKPOINT TEXT BUNDLE`.

Names of Python's modules, functions of the C library and files that are Linux's alone are made absent before moepack is
imported: files and functions for moepack's own code alone, because other packages have builds for macOS that ask for
others. Triton is absent. It prints a line of JSON, as lacking.py does.
"""

import json
import mmap
import os
import resource
import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
MODULES = {
    os: (
        "O_DIRECT", "O_PATH", "O_TMPFILE", "copy_file_range", "eventfd", "fdatasync", "memfd_create", "pidfd_open",
        "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "splice",
    ),
    mmap: ("MAP_POPULATE", "MADV_DONTFORK", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_REMOVE"),
    resource: ("prlimit", "RLIMIT_NICE", "RLIMIT_RTPRIO"),
}  # fmt: skip
FUNCTIONS = {"GOMP_parallel", "cudaHostRegister", "mallopt", "malloc_trim", "prctl", "renameat2", "syscall"}
FOLDERS = ("/proc/", "/sys/")
refused: set[str] = set()  # what moepack asked for


def ours(frame: FrameType | None) -> bool:
    """Whether moepack's own code asks: the first caller that is none of Python's own library."""
    library = os.path.dirname(os.__file__)  # noqa: PTH120  # pathlib opens files itself
    while frame is not None:
        file = frame.f_code.co_filename
        own = file == __file__ or file.startswith("<") or (file.startswith(library) and "site-packages" not in file)
        if not own:
            return file.startswith(ROOT) and "site-packages" not in file  # an environment may be in the clone
        frame = frame.f_back
    return False


def refuse(event: str, arguments: tuple[Any, ...]):
    """An audit hook: let moepack open no file of Linux's, and find none of its functions."""
    if event == "open" and str(arguments[0]).startswith(FOLDERS) and ours(sys._getframe(1)):
        refused.add(str(arguments[0]))
        raise FileNotFoundError(2, "not on macOS", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in FUNCTIONS and ours(sys._getframe(1)):
        refused.add(arguments[1])
        raise AttributeError(f"{arguments[1]}: not on macOS")


def hide():
    """Make the names absent."""
    for module, names in MODULES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.addaudithook(refuse)
    read = os.readlink

    def readlink(path, **more):
        if str(path).startswith(FOLDERS) and ours(sys._getframe(1)):
            raise FileNotFoundError(2, "not on macOS", path)
        return read(path, **more)

    os.readlink = readlink
    sys.modules["triton"] = None


def main():
    """Run the commands."""
    import torch

    torch.set_num_threads(1)
    from lacking import core

    where, *given = sys.argv[1:5]
    Path(where).mkdir(parents=True)
    said = core(Path(where), *given)
    print(json.dumps(said | {"refused": sorted(refused)}), flush=True)


if __name__ == "__main__":
    hide()
    main()
