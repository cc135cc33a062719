"""The CUDA device over a GPU that is not there (fake_cuda.py), and over one where there is one."""

import contextlib
import hashlib
import itertools
import os
import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from fake_cuda import READS_ONLY, REGISTERS, FakeCudart, FakeGpu
from support import PATIENCE, at_once, damage

from benchmarks.random_matrices import gaussian
from moepack.pack.codec.affine import encode
from moepack.pack.errors import BundleError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.devices.cuda import CudaDevice
from moepack.runtime.devices.migration import Cancelled
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.store import filling
from moepack.runtime.store.cudart import Cudart
from moepack.runtime.store.files import BackingStore, Stored
from moepack.runtime.store.pinned import Held, HostStore

WAYS = {
    "mapped": {REGISTERS: 1, READS_ONLY: 1},
    "registered": {REGISTERS: 1, READS_ONLY: 0},
    "allocated": {REGISTERS: 0, READS_ONLY: 0},
}


def check(store, version, position, expert, target):
    """The block is what the bundle holds, bit by bit."""
    described, matrices = store.bundle.manifest.version(version), store.bundle.layers[position].matrices
    extent, got = store.bundle.extent(version, position, expert), target.cpu().numpy()
    if not described.plain:
        assert np.array_equal(got[: len(extent)], extent)
        return
    wanted = described.decode(matrices, extent)
    for m, form, want in zip(matrices, make_forms(matrices, described), wanted, strict=True):
        assert np.array_equal(got[form.low : form.low + 2 * m.weights].view(np.uint16), want.weight.reshape(-1))


class Bench:
    """A store, a GPU and a device over a bundle."""

    def __init__(self, path, way="staged", fill=True, patience=3, slots=2, **more):
        self.store = BackingStore(open_bundle(path))
        self.cuda = FakeCudart(WAYS.get(way))
        self.gpu = FakeGpu(self.cuda, patience)
        self.host = None
        if way != "staged":
            self.host = HostStore(self.store, ["bf16", "w4"], Cudart(0, self.cuda), 1 << 30, **more)
        sizes = [self.store.stored(v, p, e).size for v in ("bf16", "w4") for p in range(4) for e in range(16)]
        self.device = CudaDevice(max(sizes), torch.device("cpu"), slots=slots, host=self.host, gpu=self.gpu)
        if fill and self.host is not None:
            self.device.serve()
            assert self.host.filled.wait(PATIENCE)

    def fetch(self, version, position, expert):
        described = self.store.bundle.manifest.version(version)
        layer = self.store.bundle.layers[position]
        target = self.gpu.memory(-(-described.resident_size(layer.matrices) // 4096) * 4096)
        source = self.store.stored(version, position, expert)
        return self.device.fetch(lambda: source, target, layer, described), target

    def check(self, version, position, expert, target):
        check(self.store, version, position, expert, target)

    def fetches(self, *place):
        """Whatever happened before, this extent comes."""
        event, target = self.fetch(*place)
        event.wait()
        assert event.error is None, event.error
        self.check(*place, target)

    def close(self):
        self.device.close()
        self.store.close()
        assert not self.gpu.wrong, self.gpu.wrong[:3]
        assert not self.cuda.registered and not self.cuda.allocated and not self.cuda.sticky


@pytest.fixture
def benches():
    made = []

    def make(*arguments, **more):
        made.append(Bench(*arguments, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.mark.parametrize(("way", "slots"), [*((way, 2) for way in WAYS), ("staged", 2), ("registered", 1)])
def test_blocks_are_the_bundles_bytes(bundle, way, slots, benches):
    """As many copies as there are buffers are going, on late hardware: a buffer used too early would show."""
    bench = benches(bundle, way, slots=slots)
    places = [(v, p, e) for v in ("bf16", "w4") for p in range(4) for e in range(16)]
    random.Random(0).shuffle(places)
    fetched = [(place, *bench.fetch(*place)) for place in places]
    for place, event, target in fetched:
        event.wait()
        assert event.error is None
        bench.check(*place, target)
    assert bench.device.moved == sum(bench.store.stored(*place).size for place in places)
    assert bench.device.host()["mode"] == way


class Pinned:
    """A host's store that holds one extent, or a file's pages, which nobody may read."""

    def __init__(self, extent, mapped):
        self.mapped, self.users = mapped, 0
        self.bytes = torch.zeros(len(extent), dtype=torch.uint8) if mapped else torch.from_numpy(extent)

    def hold(self, place):
        self.users += 1
        return Held(self.bytes, self.mapped, self.release)

    def release(self):
        self.users -= 1

    fetching, close = staticmethod(contextlib.nullcontext), staticmethod(lambda: None)


@pytest.mark.parametrize("way", ["staged", "mapped", "allocated"])
@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_codes_that_no_kernel_decodes_are_decoded_before_the_copy(name, way, tmp_path):
    layer = ExpertLayer(0, "m", 1, (Matrix("gate_up", 200, 130, True), Matrix("down", 70, 100)))
    version = Version.of(name, 32)
    values = [gaussian(m, version, i) for i, m in enumerate(layer.matrices)]
    good, want = version.encode(layer.matrices, values)[0], encode(layer.matrices, version, values)
    bad = good.copy()
    bad[64] ^= 1
    device = CudaDevice(len(want), torch.device("cpu"), staging=len(good), gpu=(gpu := FakeGpu(FakeCudart())))
    try:
        for extent in (good, bad, good):
            (tmp_path / "extent").write_bytes(extent.tobytes())
            device.pinned = None if way == "staged" else Pinned(extent, way == "mapped")
            with (tmp_path / "extent").open("rb") as file:
                digest = hashlib.sha256(extent.tobytes()).hexdigest()
                found = file.fileno(), 0, len(extent), digest, "expert 7"
                event = device.fetch(partial(Stored, *found), target := gpu.memory(len(want)), layer, version)
                event.wait()
            assert device.pinned is None or device.pinned.users == 0
            if extent is bad:
                assert str(event.error).startswith("expert 7: coded matrix holds ")
            else:
                assert event.error is None and np.array_equal(target.numpy(), want)
        assert gpu.log == ["copy", "copy"] and not gpu.wrong
    finally:
        device.close()


def test_damage_ends_a_fetch_after_its_copies(damaged, benches):
    damage(damaged, "bf16", 1, [7], 2000)
    for way in ("staged", "registered", "mapped"):
        bench = benches(damaged, way)
        event, _ = bench.fetch("bf16", 1, 7)
        event.wait()
        assert isinstance(event.error, BundleError) and event.error.problems[0].kind == "digest"
        assert "layer 1, expert 7, version bf16" in str(event.error)
        assert bench.gpu.idle, "its block may be given to another now"
        bench.fetches("bf16", 1, 8)


def test_what_does_not_decode_is_an_error(bundle, benches):
    bench = benches(bundle, "registered")
    real = bench.gpu.decode
    bench.gpu.decode = lambda jobs: real(jobs).fill_(1)
    event, _ = bench.fetch("bf16", 0, 0)
    event.wait()
    assert isinstance(event.error, BundleError) and event.error.problems[0].kind == "codec"


@pytest.mark.parametrize("version", ["bf16", "w4"])
def test_a_mapped_file_that_is_cut_short_is_an_error(damaged, version, benches):
    """The host does not touch the mapping: that would be a signal. What was pinned is what the device copies."""
    bench = benches(damaged, "mapped")
    kept = [np.asarray(bench.store.bundle.extent(version, 0, 15)).copy()]
    bench.gpu.copy = lambda to, source: kept.append(to)
    bench.gpu.decode = lambda jobs: torch.zeros(1)
    os.truncate(damaged / "experts" / version / "layer-000.safetensors", 8192)
    event, _ = bench.fetch(version, 0, 15)
    event.wait()
    if version == "w4":
        assert event.error is None
    else:
        assert isinstance(event.error, BundleError) and event.error.problems[0].kind == "size"


def test_cancelled_and_broken(bundle, benches):
    bench = benches(bundle, "registered")
    bench.device.limit(1.0)
    events = [bench.fetch("w4", 0, e)[0] for e in range(4)]
    for event in reversed(events):
        event.cancel()
    for event in events:
        event.wait()
        assert isinstance(event.error, Cancelled)
    bench.device.limit(None)
    bench.gpu.broken = True
    lost, _ = bench.fetch("w4", 0, 9)
    lost.wait()
    assert isinstance(lost.error, RuntimeError) and "lost" in str(lost.error)
    bench.gpu.broken = False
    bench.fetches("w4", 0, 9)


@pytest.mark.parametrize("way", WAYS)
def test_fetches_while_filling(bundle, way, benches, monkeypatch):
    """Fetches from several threads while regions come up one by one, with delays at every read."""
    rng, real = random.Random(0), filling.read_extents

    def slow(extents, rooms, threads, before, *more):
        def delayed(size):
            time.sleep(rng.random() * 0.005)
            before(size)

        return real(extents, rooms, threads, delayed, *more)

    monkeypatch.setattr("moepack.runtime.store.filling.read_extents", slow)
    bench = benches(bundle, way, fill=False, piece=100_000)
    problems = []
    counted = {"pinned": 0, "staged": 0}
    hold = bench.host.hold

    def counting(place):
        held = hold(place)
        counted["staged" if held is None else "pinned"] += 1
        return held

    monkeypatch.setattr(bench.host, "hold", counting)
    bench.device.serve()

    def fetch(seed):
        mine = random.Random(seed)
        while not problems and (not bench.host.filled.wait(0) or counted["pinned"] < 20):
            place = (mine.choice(("bf16", "w4")), mine.randrange(4), mine.randrange(16))
            try:
                bench.fetches(*place)
            except BaseException as error:
                problems.append(f"{place}: {error!r}")

    at_once(fetch, 3)
    assert not problems and counted["pinned"] >= 20 and counted["staged"] > 5


# --- a GPU


def gpu_or_skip():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.device_count() - 1)  # the trap is the device that is not the first


@pytest.mark.gpu
def test_every_way_on_a_gpu(bundle):
    """Blocks are the bundle's bytes through pinned memory of every kind that this machine has, and without."""
    device = gpu_or_skip()

    class Without(Cudart):
        """A device that cannot do some of what it can."""

        lacking: tuple[int, ...] = ()

        def attribute(self, number):
            return 0 if number in self.lacking else super().attribute(number)

    for lacking, limit in (((), 1 << 30), ((READS_ONLY,), 1 << 30), ((READS_ONLY, REGISTERS), 1 << 30), ((), 0)):
        store = BackingStore(open_bundle(bundle))
        calls = Without(device.index or 0)
        calls.lacking = lacking
        host = HostStore(store, ["bf16", "w4"], calls, limit)
        sizes = [store.stored(v, p, e).size for v in ("bf16", "w4") for p in range(4) for e in range(16)]
        cuda = CudaDevice(max(sizes), device, host=host)
        cuda.serve()
        assert host.filled.wait(PATIENCE)
        print(cuda.host())
        assert (cuda.host()["pinned_bytes"] > 0) == (limit > 0)
        for version, position, expert in itertools.product(("bf16", "w4"), range(4), range(16)):
            described, layer = store.bundle.manifest.version(version), store.bundle.layers[position]
            target = torch.zeros(described.resident_size(layer.matrices), dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            event = cuda.fetch(partial(store.stored, version, position, expert), target, layer, described)
            event.wait()
            assert event.error is None
            check(store, version, position, expert, target)
        mark = cuda.mark()
        mark.wait()
        assert mark.done()
        cuda.close()
        store.close()
        torch.ones(1, device=device).sum().item()  # no error was left set


@pytest.mark.gpu
def test_a_failed_registration_leaves_no_error_on_a_gpu():
    from moepack.runtime.store.cudart import CudaError

    device = gpu_or_skip()
    with pytest.raises(CudaError):
        Cudart(device.index or 0).register(4096, 4096, 1)
    torch.ones(1, device=device).sum().item()
