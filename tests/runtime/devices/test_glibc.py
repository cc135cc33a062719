"""The C library's heap: what is freed is used again where that is asked for, and given back afterwards."""

import os
import subprocess
import sys

import pytest

from moepack.runtime.devices import glibc

PAGES = """
import contextlib, resource, sys
import numpy as np
import psutil
from moepack.runtime.devices.glibc import bound, reusing

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def touched():
    before = faults()
    np.ones(96 << 20, np.uint8)
    return faults() - before

if "bound" in sys.argv:
    bound()
rest = psutil.Process().memory_info().rss
with reusing():
    first, again = touched(), max(touched() for _ in range(5))
after = psutil.Process().memory_info().rss
print(first, again, after - rest, touched(), max(touched() for _ in range(5)))
"""


@pytest.mark.skipif(glibc._libc() is None, reason="not glibc")
@pytest.mark.parametrize("how", ["", "bound"])
def test_freed_memory_is_used_again_and_then_given_back(how):
    """In page faults: 96 MiB are 24,576 pages, or 48 where the system has large ones."""
    environment = {k: v for k, v in os.environ.items() if k not in glibc._USERS}
    run = subprocess.run([sys.executable, "-c", PAGES, how], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    first, again, kept, *later = map(int, run.stdout.split())
    assert first >= 48 and again < 10
    assert kept < 16 << 20, "it is given back"
    assert min(later) >= 48, "and a large buffer is mapped again"


class Heap:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def mallopt(self, what, value):
        self.told.append((what, value))
        return 1

    def malloc_trim(self, pad):
        return 1


@pytest.fixture
def heap(monkeypatch):
    """In place of the library's, where the user has set nothing."""
    heap = Heap()
    monkeypatch.setattr(glibc, "_libc", lambda: heap)
    monkeypatch.setattr(glibc, "_limits", list(glibc._limits))
    for name in glibc._USERS:
        monkeypatch.delenv(name, raising=False)
    return heap


def test_what_was_asked_for_before_holds_again(heap, monkeypatch):
    """A process that serves keeps its limits after it built something; what the user set is never changed."""
    glibc.bound()
    limits = [(glibc.M_MMAP_THRESHOLD, glibc.MAPPED), (glibc.M_TRIM_THRESHOLD, glibc.KEPT)]
    assert heap.told == limits
    with pytest.raises(KeyError), glibc.reusing():
        heap.told.clear()
        raise KeyError
    assert heap.told == [(glibc.M_MMAP_MAX, glibc.MAPPINGS), *limits]
    heap.told.clear()
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    with glibc.reusing():
        glibc.bound()
    assert not heap.told


def test_memory_is_reused_until_the_last_is_through(heap):
    """Of two, one within the other; and who limits the heap meanwhile does so afterwards."""
    reuse = [(glibc.M_MMAP_MAX, 0), (glibc.M_TRIM_THRESHOLD, -1)]
    with glibc.reusing():
        with glibc.reusing():
            glibc.bound()
        assert heap.told == reuse * 2
    limits = [(glibc.M_MMAP_THRESHOLD, glibc.MAPPED), (glibc.M_TRIM_THRESHOLD, glibc.KEPT)]
    assert heap.told[4:] == [(glibc.M_MMAP_MAX, glibc.MAPPINGS), *limits]
