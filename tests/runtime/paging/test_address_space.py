"""Addresses that stay, memory that comes and goes: contents, bytes taken, and what stands where nothing is bound."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import python, smaps

from moepack.pack.spec import PAGE, Matrix, Version
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.paging.address_space import HUGE, CpuAddressSpace, Page, lay_out

BF16 = Version.of("bf16")
SMALL = (Matrix("gate_up", 96, 64, True), Matrix("down", 64, 48))
LARGE = (Matrix("gate_up", 1536, 2048), Matrix("down", 2048, 768))


def memory(space: CpuAddressSpace, page: Page) -> torch.Tensor:
    """A page's bytes; only where memory is bound."""
    at = space.address(page) - space.extent(page[1], page[2]).data_ptr()
    whole = space.extent(page[1], page[2])
    return whole[at : at + min(space.size(page), len(whole) - at)]


def resident(space: CpuAddressSpace, experts: int) -> tuple[int, int]:
    """Resident bytes of the range, and how many mappings it is made of."""
    return smaps(space._at, space._at + space._places[-1].first + space._places[-1].stride * experts)


def test_a_page_has_the_address_that_the_equation_says() -> None:
    """addr = v + (i - 1) L s + (j - 1) s, with an expert's two pages side by side."""
    places, size = lay_out([(LARGE, 128)] * 3, BF16)
    stride = 5 * HUGE  # 9 MiB, so that every expert begins on a bound of 2 MiB
    assert [p.first for p in places] == [0, 128 * stride, 256 * stride] and size == 3 * 128 * stride
    assert places[0].at == (0, 6 << 20) and places[0].sizes == (6 << 20, 3 << 20)
    space = CpuAddressSpace([(LARGE, 128)] * 3, BF16)
    zero = space.address((0, 0, 0))
    assert space.address((1, 2, 5)) - zero == (2 * 128 + 5) * stride + (6 << 20)


def test_matrices_do_not_share_system_pages() -> None:
    """Biases and odd sizes: each page can be bound alone."""
    forms = make_forms(SMALL, BF16)
    assert forms[1].low % PAGE == 0 and forms[0].bias == 2 * 96 * 64
    (place,), _ = lay_out([(SMALL, 2)], BF16)
    assert place.at == (0, forms[1].low) and sum(place.sizes) == place.stride
    assert BF16.resident_size(SMALL) == forms[1].low + 2 * 64 * 48


@pytest.mark.parametrize("matrices", [SMALL, LARGE], ids=["small", "large"])
def test_blocks_go_from_page_to_page_with_what_is_in_them(matrices: tuple[Matrix, ...]) -> None:
    experts, layers, blocks = 40, 3, 6
    space, rng = CpuAddressSpace([(matrices, experts)] * layers, BF16), random.Random(0)
    at: list[Page] = [(d, 0, e) for d in (0, 1) for e in range(blocks)]
    addresses = [space.address(page) for page in at]
    for i, page in enumerate(at):
        space.bind(None, page)
        memory(space, page).fill_(i)
    for _ in range(200):
        i = rng.randrange(len(at))
        page = (at[i][0], rng.randrange(layers), rng.randrange(experts))
        if page not in at:
            space.bind(at[i], page)
            at[i] = page
            assert space.fresh == 2 * blocks or not space._can_move
    if space._can_move:
        assert all(bool((memory(space, page) == i).all()) for i, page in enumerate(at))
    bound = sum(space.size(page) for page in at)
    taken, mappings = resident(space, experts)
    assert taken <= bound and mappings <= 2 * len(at) + 1, "neighbours without memory are one mapping"
    assert [space.address((d, 0, e)) for d in (0, 1) for e in range(blocks)] == addresses, "they stay"
    for page in at:
        space.drop(page)
    assert resident(space, experts)[0] == 0


def test_both_pages_of_an_expert_move_at_once() -> None:
    space = CpuAddressSpace([(LARGE, 3), (SMALL, 3)], BF16)
    for d in (0, 1):
        space.bind(None, (d, 0, 1))
        memory(space, (d, 0, 1)).fill_(5 + d)
    if space.bind_both((0, 1), (0, 2)):
        assert [int(memory(space, (d, 0, 2)).float().mean()) for d in (0, 1)] == [5, 6] and space.moved == 2
        assert resident(space, 3)[0] == 9 << 20
    assert not space.bind_both((0, 2), (1, 0)), "other sizes"


def test_without_moves_memory_is_taken_anew() -> None:
    """Another system, or one that is out of mappings: slower, and the bytes are bounded all the same."""
    space = CpuAddressSpace([(LARGE, 4)], BF16)
    space._can_move = False
    space.bind(None, (0, 0, 0))
    memory(space, (0, 0, 0)).fill_(7)
    space.bind((0, 0, 0), (0, 0, 3))
    memory(space, (0, 0, 3)).fill_(8)
    assert (space.moved, space.fresh) == (0, 2) and resident(space, 4)[0] == space.size((0, 0, 3))


def test_layers_of_different_sizes() -> None:
    space = CpuAddressSpace([(LARGE, 2), (SMALL, 2)], BF16)
    space.bind(None, (0, 0, 1))
    memory(space, (0, 0, 1)).fill_(3)
    space.bind((0, 0, 1), (0, 1, 0))
    assert bool((memory(space, (0, 1, 0)) == 3).all())
    space.bind((0, 1, 0), (0, 0, 0))
    memory(space, (0, 0, 0)).fill_(4)
    assert resident(space, 2)[0] <= space.size((0, 0, 0))


def test_whoever_touches_a_page_without_memory_is_stopped() -> None:
    """One that never had any, and one whose block has gone: a child each, as nothing survives that."""
    code = (
        "import os\n"
        "from moepack.pack.spec import Matrix, Version\n"
        "from moepack.runtime.paging.address_space import CpuAddressSpace\n"
        "m = (Matrix('gate_up', 64, 64), Matrix('down', 64, 32))\n"
        "space = CpuAddressSpace([(m, 4)], Version.of('bf16'))\n"
        "space.bind(None, (0, 0, 2))\n"
        "space.extent(0, 2)[0] = 1\n"
        "space.bind((0, 0, 2), (0, 0, 1))\n"
        "print(int(space.extent(0, 1)[0]), flush=True)\n"
        "for expert in (2, 3):\n"
        "    if not (child := os.fork()):\n"
        "        os._exit(int(space.extent(0, expert)[0]))\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    assert python("-c", code).split() == ["1", "-11", "-11"]


def test_the_system_may_refuse(monkeypatch: Any) -> None:
    space = CpuAddressSpace([(SMALL, 2)], BF16)
    monkeypatch.setattr(space._libc, "mprotect", lambda *args: -1)
    with pytest.raises(MemoryError, match="max_map_count"):
        space.bind(None, (0, 0, 0))
