"""Reads past the page cache: whole pages in one request, what is cached already from memory, the rest as ever."""

import contextlib
import errno
import fcntl
import os
import shutil

import numpy as np
import pytest

from moepack.pack.reader import open_bundle
from moepack.pack.spec import PAGE
from moepack.runtime.devices.cpu import CpuDevice, CpuMemory
from moepack.runtime.store.files import BackingStore
from moepack.runtime.store.page_file import PageFile, direct_rate, is_cached

SIZE = 64 * PAGE


class Seen:
    """The reads of a file: (descriptor is opened for O_DIRECT, offset, bytes)."""

    def __init__(self, patch, refused=False):
        self.reads = []
        real = os.preadv

        def reading(fd, parts, at):
            direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            self.reads.append((direct, at, len(parts[0])))
            if direct and refused:
                raise OSError(errno.EINVAL, "refused")
            return real(fd, parts, at)

        patch.setattr(os, "preadv", reading)


@pytest.fixture
def file(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    path = tmp_path / "extents"
    path.write_bytes(data.tobytes())
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    yield fd, data
    os.close(fd)


def read(pages, begin, size, shift=0):
    room = CpuMemory(SIZE + PAGE).tensor.numpy()[shift : shift + size]
    done = 0
    while done < size:
        done += pages.read(room.data[done:], begin + done)
    return room


def test_what_is_read_past_the_page_cache(file, monkeypatch):
    fd, data = file
    with contextlib.closing(PageFile(fd)) as pages, monkeypatch.context() as patch:
        if not pages.direct or is_cached(fd, 0, SIZE):
            pytest.skip("no O_DIRECT here, or the page cache keeps the file")
        seen = Seen(patch)
        assert np.array_equal(read(pages, 0, 60 * PAGE), data[: 60 * PAGE])
        assert seen.reads == [(True, 0, 60 * PAGE)] and not is_cached(fd, 0, 60 * PAGE), "one request, nothing kept"
        for begin, size, shift in ((60 * PAGE, 100, 0), (60 * PAGE + 8, PAGE, 0), (61 * PAGE, PAGE, 64)):
            seen.reads.clear()
            assert np.array_equal(read(pages, begin, size, shift), data[begin : begin + size])
            assert [direct for direct, *_ in seen.reads] == [False], "parts of pages"
        os.pread(fd, 2 * PAGE, 0)
        assert is_cached(fd, PAGE, PAGE) and not is_cached(fd, 2 * PAGE, PAGE), "no read-ahead"
        seen.reads.clear()
        assert np.array_equal(read(pages, PAGE, PAGE), data[PAGE : 2 * PAGE])
        assert seen.reads == [(False, PAGE, PAGE)], "from memory"


def test_where_direct_reads_are_refused_the_page_cache_keeps_nothing(file, monkeypatch):
    fd, data = file
    with contextlib.closing(PageFile(fd)) as pages, monkeypatch.context() as patch:
        patch.setattr("moepack.runtime.store.page_file.is_cached", lambda *_: False)
        seen = Seen(patch, refused=True)
        assert np.array_equal(read(pages, 0, SIZE), data) and not pages.direct
        assert np.array_equal(read(pages, 0, SIZE), data)
        assert [direct for direct, *_ in seen.reads].count(True) <= 1
        assert direct_rate(fd, 2, PAGE) is None
        monkeypatch.undo()
        assert not is_cached(fd, 0, SIZE) and (direct_rate(fd, 2, PAGE) or 1) > 0
        patch.setattr(os, "O_DIRECT", os.O_DIRECTORY)  # by which this file cannot be opened
        with contextlib.closing(PageFile(fd)) as unopened:
            assert not unopened.direct and np.array_equal(read(unopened, 0, SIZE), data)


def test_a_header_brings_no_extent_into_the_page_cache(bundle, tmp_path):
    """Of a copy: other tests' processes read the bundle at the same time."""
    copied = shutil.copytree(bundle, tmp_path / "bundle")
    opened = open_bundle(copied)
    with (copied / opened.layers[1].file("w4")).open("r+b") as file:
        os.fsync(file.fileno())  # pages that are not yet on the disk would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = opened.layer_file("w4", 1).offset(0)
        if not is_cached(file.fileno(), 0, PAGE):
            pytest.skip("the system does not say what is cached")
        assert not is_cached(file.fileno(), begin, PAGE)


def test_an_extent_comes_into_its_block_in_one_request(bundle, monkeypatch):
    """All experts of a layer at once, by four threads: the bundle's bytes, each digested the first time alone."""
    store = BackingStore(open_bundle(bundle), checks_again=False, direct=True)
    plain = BackingStore(open_bundle(bundle))
    layer, version = store.bundle.layers[1], store.bundle.manifest.version("w4")
    sizes = [store.stored("w4", 1, e).size for e in range(16)]
    device = CpuDevice(0, readers=4)
    memory = device.memory(sum(sizes))
    memory.take(0, sum(sizes))
    blocks = memory.tensor.split(sizes)
    with monkeypatch.context() as patch:
        patch.setattr("moepack.runtime.store.page_file.is_cached", lambda *_: False)
        seen = Seen(patch)
        for _ in range(2):
            memory.tensor.zero_()
            events = [device.fetch(lambda e=e: store.stored("w4", 1, e), blocks[e], layer, version) for e in range(16)]
            for event in events:
                event.wait()
                assert event.error is None
            assert all(np.array_equal(blocks[e].numpy(), plain.stored("w4", 1, e).load().numpy()) for e in range(16))
        direct = sorted((at, size) for is_direct, at, size in seen.reads if is_direct)
    where = sorted((store.stored("w4", 1, e).offset, sizes[e]) for e in range(16))
    assert direct in (sorted(where * 2), [])
    assert device.moved == 2 * sum(sizes)
    device.close()
    store.close()
    plain.close()
