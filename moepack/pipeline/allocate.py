"""From measured tables to a version for every expert: the losses and bytes that the allocators of
`moepack.runtime.allocation` work on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Version, lossy
from moepack.runtime.allocation.knapsack import BudgetError, greedy, spent, uniform
from moepack.runtime.allocation.prefix_split import WIDTHS, prefill_importance, prefix_split
from moepack.runtime.policies.contract import Versions

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle
    from moepack.pack.spec import DenseMatrix
    from moepack.pack.tables import DenseTables, LayerTables

    from .recipe import Allocate

Rows = list[list[float]]


@dataclass(frozen=True)
class LayerCosts:
    """What one layer's experts cost at every version, and what calibration sent to them.

    Attributes:
        tokens, gate_sum: [experts], tokens routed to each and the sum of their gate weights.
        sizes: [experts][versions], bytes of extents.
        mse, gated, relative: [experts][versions], as in calibration.safetensors (pack/FORMAT.md, "Calibration tables").
        gated_error: standard errors of `gated`, zeros where the bundle has none.
    """

    tokens: list[float]
    gate_sum: list[float]
    sizes: Rows
    mse: Rows
    gated: Rows
    relative: Rows
    gated_error: Rows

    @staticmethod
    def of(layer: LayerTables, columns: Sequence[int], sizes: Rows) -> LayerCosts:
        """From a layer's tables; `columns` are those of the versions wanted."""
        error = 0 * layer.gated if layer.gated_error is None else layer.gated_error
        losses = (table[:, columns].tolist() for table in (layer.mse, layer.gated, layer.relative, error))
        return LayerCosts(layer.tokens.tolist(), layer.gate_sum.tolist(), sizes, *losses)


@dataclass(frozen=True)
class DenseCosts:
    """What the dense matrices cost at every version of theirs.

    Attributes:
        matrices: how many weights each has.
        versions: names, the most precise first.
        sizes: [matrices][versions], bytes of extents.
        losses: [matrices][versions], in the unit of `expected_losses` by gates.
    """

    matrices: list[int]
    versions: list[str]
    sizes: Rows
    losses: Rows

    @staticmethod
    def of(weights: Sequence[int], versions: Sequence[str], tables: DenseTables, sizes: Rows) -> DenseCosts:
        """From their tables.

        What a matrix loses is expected to reach the hidden state in proportion: its relative error, times what one of 1
        would add there (`signal`), times the tokens. That is what `expected_losses` says of an expert, and exact for a
        matrix whose output is what its block adds (docs/design/allocation.md has how the others were measured).
        """
        columns = [tables.versions.index(name) for name in versions]
        scale = (tables.signal.astype(float) * tables.tokens)[:, None]
        losses: Rows = (tables.relative[:, columns] * scale).tolist()
        return DenseCosts(list(weights), list(versions), sizes, losses)


def bundle_dense_costs(bundle: Bundle) -> DenseCosts:
    """The costs of the versions of dense matrices that are here."""
    tables, names = bundle.calibration().dense, [v.name for v in bundle.dense_versions]
    if tables is None:
        raise InputError(f"{bundle.path}: its dense matrices have no versions")
    sizes = [[float(bundle.dense_file(name, layer).extent_size(e)) for name in names]
             for layer in bundle.dense_layers for e in range(layer.extents)]  # fmt: skip
    return DenseCosts.of([m.matrix.weights for m in bundle.manifest.dense], names, tables, sizes)


def bundle_costs(bundle: Bundle, versions: Sequence[Version] = ()) -> list[LayerCosts]:
    """The costs of these versions, or else of all that are here, layer by layer."""
    tables, out = bundle.calibration(), list[LayerCosts]()
    wanted = versions or bundle.versions
    columns = tables.columns([v.name for v in wanted])
    for position, layer in enumerate(tables.layers):
        sizes = [
            [float(len(bundle.extent(v.name, position, e, check_digest=False))) for v in wanted]
            for e in range(len(layer.tokens))
        ]
        out.append(LayerCosts.of(layer, columns, sizes))
    return out


def expected_losses(costs: LayerCosts, weight: str) -> Rows:
    """What each expert of a layer is expected to lose at each version, [experts][versions].

    Args:
        costs: the layer's tables.
        weight: "gates": squared error that it adds to the layer's output over the calibration tokens, each token's by
            its gate weight squared; "tokens": squared error of its own output over those tokens; "none": mean squared
            error, every expert counting alike. To each expert's tokens one is added: what calibration never reached may
            be reached in use, and is not free.
    """
    if weight == "none":
        return costs.mse
    table = costs.gated if weight == "gates" else costs.mse
    return [[(n + 1) * x for x in row] for n, row in zip(costs.tokens, table, strict=True)]


def allocate(
    how: Allocate, layers: Sequence[ExpertLayer], versions: Sequence[Version], costs: list[LayerCosts]
) -> Versions:
    """A version for every expert, as a recipe's `allocation` asks.

    Raises:
        InputError: when the average cannot be met, naming the least that could.
    """
    weights = sum(layer.experts * layer.expert_weights for layer in layers)
    budget = how.average_bits / 8 * weights
    sizes = [row for layer in costs for row in layer.sizes]
    losses = [row for layer in costs for row in expected_losses(layer, how.weight)]
    try:
        if how.method == "prefix_split":
            return prefix_within(versions, costs, budget)
        chosen = uniform(sizes, budget) if how.method == "uniform" else greedy(sizes, losses, budget)
    except BudgetError as error:
        raise _unmet(how, 8 * error.least / weights) from None
    return named(chosen, versions, costs)


def allocate_both(
    how: Allocate,
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    costs: Sequence[LayerCosts],
    dense: DenseCosts,
) -> tuple[Versions, tuple[str, ...]]:
    """A version for every expert and for every dense matrix under one budget: `average_bits` of the weights of both.

    Raises:
        InputError: when the average cannot be met, naming the least that could.
    """
    weights = sum(layer.experts * layer.expert_weights for layer in layers) + sum(dense.matrices)
    sizes = [row for layer in costs for row in layer.sizes]
    losses = [row for layer in costs for row in expected_losses(layer, how.weight)]
    try:
        chosen = greedy([*sizes, *dense.sizes], [*losses, *dense.losses], how.average_bits / 8 * weights)
    except BudgetError as error:
        raise _unmet(how, 8 * error.least / weights) from None
    return named(chosen[: len(sizes)], versions, costs), tuple(dense.versions[v] for v in chosen[len(sizes) :])


def named(chosen: Sequence[int], versions: Sequence[Version], costs: Sequence[LayerCosts]) -> Versions:
    """Versions' indexes of all experts, one layer after another, as a map of names."""
    names = iter(versions[v].name for v in chosen)
    return tuple(tuple(next(names) for _ in layer.tokens) for layer in costs)


def total_bytes(table: Versions, versions: Sequence[Version], costs: Sequence[LayerCosts]) -> int:
    """Bytes of all extents of a map."""
    column = {v.name: i for i, v in enumerate(versions)}
    return sum(int(spent(c.sizes, [column[name] for name in row])) for row, c in zip(table, costs, strict=True))


def split_layers(
    versions: Sequence[Version], costs: Sequence[LayerCosts], importance: Sequence[Sequence[float]], bits: float
) -> Versions:
    """`prefix_split` in every layer at an average of `bits` code bits; the losses are mean squared errors, unweighted.

    Args:
        versions: must hold w4, w3, w2 and w1.
        costs: the layers' tables.
        importance: [layers][experts].
        bits: the average in every layer.
    """
    column = {v.name: i for i, v in enumerate(versions)}
    out = []
    for layer, scores in zip(costs, importance, strict=True):
        losses = [[row[column[f"w{b}"]] for b in WIDTHS] for row in layer.mse]
        out.append(tuple(f"w{b}" for b in prefix_split(scores, losses, bits)))
    return tuple(out)


def calibrated_importance(costs: Sequence[LayerCosts]) -> list[list[float]]:
    """The paper's importance of every expert, [layers][experts], from all calibration tokens."""
    return [prefill_importance(layer.tokens, layer.gate_sum) for layer in costs]


def prefix_within(versions: Sequence[Version], costs: Sequence[LayerCosts], budget: float) -> Versions:
    """`prefix_split` at the greatest average, the same in all layers, whose extents fit the budget.

    Raises:
        BudgetError: when even one bit for all does not fit.
    """
    importance = calibrated_importance(costs)
    steps = max(len(layer.tokens) for layer in costs)
    best = split_layers(versions, costs, importance, 1)
    least = total_bytes(best, versions, costs)
    if least > budget:
        raise BudgetError(least, budget)
    low, high = 0, 3 * steps + 1  # `low` increments an expert of the widest layer fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        table = split_layers(versions, costs, importance, 1 + middle / steps)
        if total_bytes(table, versions, costs) <= budget:
            low, best = middle, table
        else:
            high = middle
    return best


def check_allocation(
    how: Allocate | None,
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    dense: Sequence[DenseMatrix] = (),
    dense_versions: Sequence[Version] = (),
) -> None:
    """Refuse, before any work, an average that even the smallest versions pass."""
    small = lossy(versions)
    if how is None or not small:
        return
    least = sum(x.experts * min(v.resident_size(x.matrices) for v in small) for x in layers)
    weights = sum(x.experts * x.expert_weights for x in layers)
    if how.dense:
        least += sum(min(v.resident_size((m.matrix,)) for v in lossy(dense_versions)) for m in dense)
        weights += sum(m.matrix.weights for m in dense)
    bits = 8 * least / weights
    if how.average_bits < bits:
        raise _unmet(how, bits)


def _unmet(how: Allocate, least: float) -> InputError:
    what = f"average_bits {how.average_bits:g} cannot be met: the smallest versions take {least:.3f} bits a weight"
    return InputError(f"allocation: {what}, with their tables and padding")
