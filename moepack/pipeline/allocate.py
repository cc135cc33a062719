"""Allocation: choose each expert's version by measured losses and bytes (moepack.runtime.allocation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.manifest import Allocation
from moepack.pack.spec import ExpertLayer, Version, lossy
from moepack.runtime.allocation.knapsack import BudgetError, greedy
from moepack.runtime.policies.contract import Versions

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle
    from moepack.pack.spec import DenseMatrix
    from moepack.pack.tables import DenseTables, LayerTables

    from .recipe import Allocate

Rows = list[list[float]]


@dataclass(frozen=True)
class LayerCosts:
    """Bytes and losses of one layer's experts at every version, and the calibration tokens that reached them."""

    tokens: list[float]  # [experts], tokens routed to each
    sizes: Rows  # [experts][versions], bytes of extents
    # [experts][versions], as in calibration.safetensors (pack/FORMAT.md, "Calibration tables")
    gated: Rows
    weighed: Rows  # `gated`, as far as it reaches the logits (`LayerTables.weighed`)

    @staticmethod
    def of(layer: LayerTables, columns: Sequence[int], sizes: Rows) -> LayerCosts:
        """Read a layer's tables, at the versions in these columns."""
        return LayerCosts(
            layer.tokens.tolist(), sizes, layer.gated[:, columns].tolist(), layer.weighed[:, columns].tolist()
        )


@dataclass(frozen=True)
class DenseCosts:
    """Bytes and losses of the dense matrices at each of their versions."""

    matrices: list[int]  # number of weights of each
    versions: list[str]  # names, the most precise first
    sizes: Rows  # [matrices][versions], bytes of extents
    losses: Rows  # [matrices][versions], in the unit of `expected_losses` with weight "gates"

    @staticmethod
    def of(weights: Sequence[int], versions: Sequence[str], tables: DenseTables, sizes: Rows) -> DenseCosts:
        """Compute the costs from a bundle's tables.

        The expected loss of a matrix is its relative error, times what an error of 1 would add to the hidden state
        (`signal`), times the tokens. `expected_losses` has the same unit. The rule is exact for a matrix whose output
        is added to the hidden state unchanged; docs/design/allocation.md says how the others were measured.
        """
        columns = [tables.versions.index(name) for name in versions]
        scale = (tables.signal.astype(float) * tables.tokens)[:, None]
        losses: Rows = (tables.relative[:, columns] * scale).tolist()
        return DenseCosts(list(weights), list(versions), sizes, losses)


def bundle_costs(bundle: Bundle, versions: Sequence[Version] = ()) -> list[LayerCosts]:
    """The costs of these versions, or of all versions of the bundle, layer by layer."""
    tables = bundle.calibration()
    out = list[LayerCosts]()
    wanted = versions or bundle.versions
    columns = tables.columns([v.name for v in wanted])
    for position, layer in enumerate(tables.layers):
        files = [bundle.layer_file(v.name, position) for v in wanted]
        sizes = [[float(file.extent_size(e)) for file in files] for e in range(len(layer.tokens))]
        out.append(LayerCosts.of(layer, columns, sizes))
    return out


def expected_losses(costs: LayerCosts, weight: str) -> Rows:
    """The expected loss of each expert of a layer at each version, [experts][versions].

    Args:
        weight: "gates": the squared error that the expert adds to the layer's output over the calibration tokens, each
            token weighted by its squared gate weight. "logits": as "gates", times how far each layer's error reaches
            the logits; equal to "gates" where that was not measured. Each expert counts one token more than it had: in
            use, tokens may reach an expert that calibration did not reach, and its error then counts.
    """
    table = {"gates": costs.gated, "logits": costs.weighed}[weight]
    return [[(n + 1) * x for x in row] for n, row in zip(costs.tokens, table, strict=True)]


def allocate(
    how: Allocate,
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    costs: Sequence[LayerCosts],
    dense: DenseCosts | None = None,
) -> Allocation:
    """Choose a version for every expert, and with `dense` for every dense matrix, under one budget.

    The budget, in bits, is `average_bits` times the number of all their weights.

    Raises:
        InputError: when the average cannot be met; names the least possible average.
    """
    weights = sum(layer.experts * layer.expert_weights for layer in layers) + sum(dense.matrices if dense else ())
    budget = how.average_bits / 8 * weights
    sizes = [row for layer in costs for row in layer.sizes]
    losses = [row for layer in costs for row in expected_losses(layer, how.weight)]
    experts = len(sizes)
    if dense is not None:
        sizes = [*sizes, *dense.sizes]
        losses = [*losses, *dense.losses]
    try:
        chosen = greedy(sizes, losses, budget)
    except BudgetError as error:
        raise _unmet(how, 8 * error.least / weights) from None
    both = None if dense is None else tuple(dense.versions[v] for v in chosen[experts:])
    return Allocation(str(how), named(chosen[:experts], versions, costs), both)


def named(chosen: Sequence[int], versions: Sequence[Version], costs: Sequence[LayerCosts]) -> Versions:
    """Turn version indexes of all experts, layer after layer, into a map of names."""
    names = iter(versions[v].name for v in chosen)
    return tuple(tuple(next(names) for _ in layer.tokens) for layer in costs)


def check_allocation(
    how: Allocate | None,
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    dense: Sequence[DenseMatrix] = (),
    dense_versions: Sequence[Version] = (),
) -> None:
    """Raise InputError for an average that even the smallest versions exceed. Call it before any work."""
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
