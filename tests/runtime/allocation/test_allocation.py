"""Allocators: against brute force on small cases, exact where they promise it, never past the budget."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.tables import DenseTables
from moepack.pipeline.allocate import (
    DenseCosts,
    allocate,
    bundle_costs,
    expected_losses,
)
from moepack.pipeline.recipe import Allocate
from moepack.runtime.allocation.knapsack import BudgetError, greedy, hull, spent, uniform
from moepack.runtime.allocation.prefix_split import prefix_split

Case = tuple[list[list[float]], list[list[float]], float]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to five experts with up to four versions each, in whole pages, and a budget that can be met."""
    versions = draw(st.integers(1, 4))
    row = st.lists(st.integers(1, 20), min_size=versions, max_size=versions)
    sizes = [[4096.0 * s for s in r] for r in draw(st.lists(row, min_size=1, max_size=5))]
    loss = st.lists(st.integers(0, 1000), min_size=versions, max_size=versions)
    losses = [[x / 8 for x in draw(loss)] for _ in sizes]
    least, most = sum(min(r) for r in sizes), sum(max(r) for r in sizes)
    return sizes, losses, draw(st.integers(int(least), int(most) + 4096))


def brute_force(sizes, losses, budget):
    choices = itertools.product(*(range(len(row)) for row in sizes))
    return min(spent(losses, c) for c in choices if spent(sizes, c) <= budget)


@given(cases())
def test_greedy_is_within_one_upgrade_of_the_best(case):
    sizes, losses, budget = case
    chosen = greedy(sizes, losses, budget)
    assert spent(sizes, chosen) <= budget
    upgrades = [
        loss[a] - loss[b]
        for size, loss in zip(sizes, losses, strict=True)
        for a, b in itertools.pairwise(hull(size, loss))
    ]
    best = brute_force(sizes, losses, budget)
    assert best <= spent(losses, chosen) <= best + max(upgrades, default=0.0) + 1e-9


@given(st.integers(1, 40), st.integers(2, 5), st.data())
def test_uniform_is_two_neighbours_and_uses_the_budget_up(experts, versions, data):
    steps = data.draw(st.lists(st.integers(1, 9), min_size=versions, max_size=versions))
    row = [float(s) for s in reversed(list(itertools.accumulate(steps)))]
    sizes = [row] * experts
    budget = data.draw(st.integers(int(row[-1] * experts), int(row[0] * experts) + 3))
    chosen = uniform(sizes, budget)
    assert spent(sizes, chosen) <= budget and chosen == uniform(sizes, budget)
    base = max(chosen)
    assert set(chosen) <= {base, base - 1}
    if set(chosen) != {0}:
        assert spent(sizes, chosen) + row[base - 1] - row[base] > budget  # not one more would fit


@given(st.data())
def test_prefix_split_is_the_best_prefix(data):
    """context-aware-cxl-ndp, section 4.2, against every assignment that falls with importance: of those that spend most
    of the increments, the one of the greatest gain."""
    widths = sorted(data.draw(st.sets(st.integers(1, 6), min_size=1, max_size=4)))
    count = data.draw(st.integers(0, 5))
    importance = data.draw(st.lists(st.integers(0, 5).map(float), min_size=count, max_size=count))
    row = st.lists(st.integers(0, 100).map(float), min_size=len(widths), max_size=len(widths))
    losses = data.draw(st.lists(row, min_size=count, max_size=count))  # not always falling with the width
    average = data.draw(st.integers(0, 12)) / 12 * (widths[-1] - widths[0]) + widths[0]
    order = sorted(range(count), key=lambda e: -importance[e])
    found = {}
    for chosen in itertools.product(range(len(widths)), repeat=count):
        bits = sum(widths[c] for c in chosen)
        if list(chosen) == sorted(chosen, reverse=True) and bits <= count * average + 1e-9:
            gain = sum(losses[e][0] - losses[e][c] for e, c in zip(order, chosen, strict=True))
            found[bits] = max(found.get(bits, -math.inf), gain)
    got = prefix_split(importance, losses, average, widths)
    assert [got[e] for e in order] == sorted(got, reverse=True) and sum(got) == max(found)
    assert sum(losses[e][0] - losses[e][widths.index(b)] for e, b in enumerate(got)) == found[max(found)]


@pytest.mark.parametrize("method", [greedy, lambda sizes, losses, budget: uniform(sizes, budget)])
def test_a_budget_that_cannot_be_met_says_what_would_do(method):
    sizes, losses = [[8.0, 4.0], [9.0, 5.0]], [[0.0, 1.0], [0.0, 1.0]]
    with pytest.raises(BudgetError, match="the smallest versions take 9 bytes, the budget is 8") as error:
        method(sizes, losses, 8.9 - 0.6)
    assert error.value.least == 9
    assert method(sizes, losses, 9) == [1, 1]


# --- over a bundle's tables


@pytest.fixture(scope="module")
def measured(bundle):
    opened = open_bundle(bundle)
    return opened, bundle_costs(opened)


def test_sizes_are_whole_extents(measured):
    opened, costs = measured
    for position, layer in enumerate(opened.layers):
        for v, version in enumerate(opened.versions):
            on_disk = opened.layer_file(version.name, position)
            assert [row[v] for row in costs[position].sizes] == [
                len(on_disk.extent(e, check_digest=False)) for e in range(layer.experts)
            ]
            if not version.plain:
                assert {row[v] for row in costs[position].sizes} == {version.resident_size(layer.matrices)}


def test_expected_losses(measured):
    layer = measured[1][0]
    assert expected_losses(layer, "gates")[3][2] == (layer.tokens[3] + 1) * layer.gated[3][2]
    assert expected_losses(layer, "logits") == expected_losses(layer, "gates"), "without `weight: logits`"


def total_bytes(table, opened, costs):
    """Bytes of all experts' extents at the versions that a map names."""
    column = {v.name: i for i, v in enumerate(opened.versions)}
    return sum(spent(c.sizes, [column[name] for name in row]) for row, c in zip(table, costs, strict=True))


@pytest.mark.parametrize("bits", [2.7, 3.0, 3.7, 12.0])
def test_the_map_keeps_to_the_bytes(measured, bits):
    opened, costs = measured
    table = allocate(Allocate(bits), opened.layers, opened.versions, costs).versions
    used, budget = total_bytes(table, opened, costs), bits / 8 * opened.expert_weights
    widest = max(max(row) - min(row) for layer in costs for row in layer.sizes)
    assert used <= budget
    assert used > budget - widest or {v for row in table for v in row} == {"bf16"}


def test_experts_and_dense_matrices_under_one_budget(measured):
    """Against the same problem written out by hand; never past the budget; the dearer the error, the more precise."""
    opened, costs = measured
    tables = DenseTables(
        ("bf16", "w8", "w4"),
        *(np.array(x, np.float32) for x in ([[0, 1e-5, 1e-3]] * 4, [[0, 1, 2]] * 4)),
        np.zeros((4, 3), np.uint8), np.array([1e-6, 1.0, 1.0, 50.0], np.float32), np.full(4, 2048),
    )  # fmt: skip
    rows = [[8192.0 * n, 5120.0 * n, 4096.0 * n] for n in (1, 1, 9, 1)]
    dense = DenseCosts.of([4096 * n for n in (1, 1, 9, 1)], ["bf16", "w8", "w4"], tables, rows)
    assert dense.losses[1] == pytest.approx([0, 1e-5 * 2048, 1e-3 * 2048])
    weights = opened.expert_weights + sum(dense.matrices)
    sizes, losses = ([r for c in costs for r in c.sizes], [r for c in costs for r in expected_losses(c, "gates")])
    for bits in (2.5, 4.0, 9.0):
        budget = bits / 8 * weights
        how = Allocate(bits, dense=True)
        made = allocate(how, opened.layers, opened.versions, costs, dense)
        taken = [dense.versions.index(name) for name in made.dense or ()]
        assert total_bytes(made.versions, opened, costs) + spent(rows, taken) <= budget
        want = greedy([*sizes, *rows], [*losses, *dense.losses], budget)
        assert taken == want[len(sizes) :]
        assert rows[0][taken[0]] <= rows[1][taken[1]] <= rows[3][taken[3]], "by what their errors cost"
    with pytest.raises(InputError, match=r"cannot be met: the smallest versions take 1\.\d+ bits"):
        allocate(Allocate(1.0, dense=True), opened.layers, opened.versions, costs, dense)
