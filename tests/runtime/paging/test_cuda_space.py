"""Blocks under addresses that stay, by a driver that holds to the driver's rules; and the memory that pools are of."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from fake_cuda import FakeCudart, FakeGpu
from fake_driver import FULL, INVALID, FakeBindings
from hypothesis import given, settings

from moepack.pack.errors import InputError
from moepack.pack.spec import PAGE, ExpertLayer, Matrix, Version, align
from moepack.runtime.devices.driver import Driver, DriverError
from moepack.runtime.devices.mapped import MappedMemory
from moepack.runtime.devices.torch_cuda import tensor_over
from moepack.runtime.paging.cuda_space import CudaAddressSpace
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.paging import GRANULE, window_size
from moepack.runtime.residency.pools import Pool

BF16 = Version.of("bf16")
SMALL = (Matrix("gate_up", 96, 64, True), Matrix("down", 64, 48))
LARGE = (Matrix("gate_up", 1536, 2048), Matrix("down", 2048, 768))
CPU = torch.device("cpu")


@pytest.fixture
def bindings() -> Iterator[FakeBindings]:
    made = FakeBindings()
    yield made
    assert made.wrong == [] and made.leaks() == []


def space_over(bindings: FakeBindings, layers: Any, granule: int = 8192) -> CudaAddressSpace:
    return CudaAddressSpace(layers, BF16, Driver(0, bindings), lambda at, n: tensor_over(at, n, CPU), granule)


@pytest.mark.parametrize(
    ("hidden", "inner", "block", "apart"),
    [(2048, 768, 10, 10), (2048, 1024, 12, 12), (2880, 2880, 48, 48), (2048, 1408, 18, 18), (4096, 1408, 34, 34),
     (512, 256, 2, 4)],
)  # fmt: skip
def test_what_blocks_waste(hidden: int, inner: int, block: int, apart: int) -> None:
    """In MiB: a block of a whole expert against one for each matrix, in pieces of 2 MiB. The first is Qwen3-30B-A3B."""
    one = align(6 * hidden * inner, GRANULE)
    two = align(4 * hidden * inner, GRANULE) + align(2 * hidden * inner, GRANULE)
    assert (one >> 20, two >> 20) == (block, apart)


def test_the_window_of_a_gpu() -> None:
    layers = [ExpertLayer(i, "x", 128, LARGE) for i in range(3)]
    size = window_size(layers, BF16, GRANULE)
    assert size.sizes == (10 << 20,) and size.blocks == 256 and size.bytes == 2560 << 20


def test_blocks_go_from_page_to_page_with_what_is_in_them(bindings: FakeBindings) -> None:
    space, rng = space_over(bindings, [(SMALL, 7)] * 3), random.Random(0)
    at = [(0, 0, e) for e in range(4)]
    addresses = {(p, e): space.address((0, p, e)) for p in range(3) for e in range(7)}
    block = align(space.size(at[0]), 8192)
    assert sorted(a - min(addresses.values()) for a in addresses.values()) == [i * block for i in range(21)]
    for i, page in enumerate(at):
        space.bind(None, page)
        assert space.extent(*page[1:]).data_ptr() == space.address(page)
        space.extent(*page[1:]).fill_(i)
    for _ in range(100):
        i = rng.randrange(4)
        page = (0, rng.randrange(3), rng.randrange(7))
        if page not in at:
            space.bind(at[i], page)
            at[i] = page
    assert all(bool((space.extent(*page[1:]) == i).all()) for i, page in enumerate(at))
    assert bindings.most == bindings.held == 4 * block and space.fresh == 4
    assert addresses == {(p, e): space.address((0, p, e)) for p in range(3) for e in range(7)}
    space.drop(at[0])
    space.drop(at[0])
    assert bindings.held == bindings.most * 3 // 4
    space.close()
    space.close()


def test_one_rebinding_is_three_calls(bindings: FakeBindings) -> None:
    space = space_over(bindings, [(SMALL, 2)])
    space.bind(None, (0, 0, 0))
    bindings.calls.clear()
    space.bind((0, 0, 0), (0, 0, 1))
    assert bindings.calls == ["unmap", "map", "allow"]
    space.close()


@pytest.mark.parametrize("call", ["create", "map", "allow"])
@pytest.mark.parametrize("moves", [False, True])
def test_what_the_driver_refuses_leaves_nothing_behind(bindings: FakeBindings, call: str, moves: bool) -> None:
    space = space_over(bindings, [(SMALL, 3)])
    if moves:
        space.bind(None, (0, 0, 0))
    bindings.fails = lambda name: FULL if name == call else None
    if moves and call == "create":
        space.bind((0, 0, 0), (0, 0, 1))
    else:
        with pytest.raises(MemoryError, match=r"error 2 \(CUDA_ERROR_OUT_OF_MEMORY\)"):
            space.bind((0, 0, 0) if moves else None, (0, 0, 1))
        assert not bindings.mapped and not bindings.handles
    bindings.fails = lambda name: None
    space.bind(None, (0, 0, 2))
    space.close()


def test_an_interruption_anywhere_in_a_move_is_undone_by_dropping_both(bindings: FakeBindings) -> None:
    for call in ("unmap", "map", "allow"):
        space = space_over(bindings, [(SMALL, 2)])
        space.bind(None, (0, 0, 0))

        def stops(name: str, at: str = call) -> None:
            if name == at:
                raise KeyboardInterrupt

        bindings.fails = stops
        with pytest.raises(KeyboardInterrupt):
            space.bind((0, 0, 0), (0, 0, 1))
        bindings.fails = lambda name: None
        space.drop((0, 0, 0))
        space.drop((0, 0, 1))
        assert not bindings.mapped and not bindings.handles
        space.bind(None, (0, 0, 1))
        space.close()


def test_what_cannot_be_is_refused_in_one_line(bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="hands memory out by 4096 bytes, and experts are paged by 6144"):
        space_over(bindings, [(SMALL, 2)], 6144)
    bindings.fails = lambda name: INVALID
    with pytest.raises(InputError, match="addresses cannot be reserved for experts: cuMemAddressReserve: error 1"):
        space_over(bindings, [(SMALL, 2)])
    with pytest.raises(InputError, match="addresses cannot be reserved"):
        MappedMemory(1, Driver(0, bindings), lambda at, n: tensor_over(at, n, CPU), 8192)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(InputError, match="pip install cuda-bindings"):
        Driver(0)


def test_pools_share_pieces_and_the_budget_has_what_the_driver_has(bindings: FakeBindings) -> None:
    """Blocks of three pages in pieces of four: neighbours share, and a piece goes with the last of them."""
    piece, block = 4 * PAGE, 3 * PAGE
    memory = MappedMemory(8 * block, Driver(0, bindings), lambda at, n: tensor_over(at, n, CPU), piece)
    tracker = BudgetTracker(5 * piece)
    pool = Pool("p", block, 8, tracker, memory)
    taken = [pool.allocate() for _ in range(6)]
    assert all(taken) and tracker.held("p") == bindings.held == 5 * piece
    for i, one in enumerate(taken):
        assert one is not None
        one.tensor.fill_(i)
    assert all(bool((one.tensor == i).all()) for i, one in enumerate(taken) if one is not None)
    assert pool.allocate() is None and tracker.held("p") == 5 * piece, "the seventh would need a sixth piece"
    first, second, *rest = taken
    assert first is not None and second is not None
    pool.free(second)
    assert pool.trim(1) == 0 and bindings.held == 5 * piece, "both neighbours stand on its pieces"
    pool.free(first)
    assert pool.trim(1) == piece == 5 * piece - tracker.held("p") and bindings.held == 4 * piece
    again = pool.allocate()
    assert again is not None and tracker.held("p") == bindings.held == 5 * piece
    for one in (again, *rest):
        assert one is not None
        pool.free(one)
    assert pool.trim(1 << 30) == 5 * piece and not bindings.held and not tracker.held("p")
    memory.close()
    memory.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40), st.integers(1, 12))
def test_pieces_are_there_while_blocks_on_them_are(steps: list[tuple[bool, int]], capacity: int) -> None:
    """Against a set of blocks, on a device that runs out; a refusal takes nothing."""
    bindings = FakeBindings(capacity=capacity * 8192)
    memory = MappedMemory(10 * 3 * PAGE, Driver(0, bindings), lambda at, n: tensor_over(at, n, CPU), 8192)
    there: set[int] = set()
    for takes, i in steps:
        before = bindings.held
        if takes and i not in there:
            cost = memory.cost(i * 3 * PAGE, 3 * PAGE)
            if before + cost > capacity * 8192:
                with pytest.raises(DriverError):
                    memory.take(i * 3 * PAGE, 3 * PAGE)
                assert bindings.held == before
                continue
            memory.take(i * 3 * PAGE, 3 * PAGE)
            there.add(i)
            assert bindings.held == before + cost
        elif not takes and i in there:
            there.discard(i)
            assert memory.give_back(i * 3 * PAGE, 3 * PAGE) == before - bindings.held
        pieces = {k for b in there for k in range(b * 3 * PAGE // 8192, -(-(b + 1) * 3 * PAGE // 8192))}
        assert bindings.held == 8192 * len(pieces)
    memory.close()
    assert bindings.wrong == [] and bindings.leaks() == []


def test_planted_the_stand_in_sees_broken_rules() -> None:
    gpu = FakeGpu(FakeCudart())
    bindings = FakeBindings(busy=gpu.busy)
    calls = Driver(0, bindings)
    at, block = calls.reserve(4 * 4096), calls.create(8192)
    calls.map(at, 8192, block)
    assert not bindings.may_touch([(at, 8)])
    calls.allow(at, 8192)
    assert bindings.may_touch([(at, 8192)]) and not bindings.may_touch([(at + 8000, 500)])
    for wrong in (
        lambda: calls.map(at + 4096, 8192, block), lambda: calls.map(at + 8192, 4096, block),
        lambda: calls.unmap(at, 4096), lambda: calls.unreserve(at, 4 * 4096), lambda: calls.create(5000),
        lambda: calls.release(99), lambda: calls.allow(at + 4096, 4096),
    ):  # fmt: skip
        with pytest.raises(DriverError):
            wrong()
    assert len(bindings.wrong) == 6
    gpu.launch([(at, 100)])
    calls.unmap(at, 8192)
    assert bindings.wrong[6:] == ["unmap: the device still reads or writes there"]
    assert len(bindings.leaks()) == 2
    calls.release(block)
    calls.unreserve(at, 4 * 4096)


def test_calls_bring_their_context_along() -> None:
    """A fresh thread has none."""
    bindings, seen = FakeBindings(), list[int]()
    code, _ = bindings.cuMemRelease(1)
    assert code.name == "CUDA_ERROR_INVALID_CONTEXT" and len(bindings.wrong) == 1
    calls = Driver(0, bindings)
    thread = threading.Thread(target=lambda: seen.append(calls.granularity()))
    thread.start()
    thread.join()
    assert seen == [4096] and len(bindings.wrong) == 1
