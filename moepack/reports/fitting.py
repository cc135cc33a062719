"""The versions of a bundle that are useful in a memory budget: those at which the plan serves experts.

A policy that places experts as they are needed, or off the device, may serve every version that it names. The
arithmetic is that of `moepack plan`. It reads the manifest, the tables and the configuration, but no weights, so a
download can use it before weights are here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from moepack.pack.errors import InputError
from moepack.pack.layer_file import LayerFile
from moepack.pack.reader import Bundle
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.planning.choice import versions_of
from moepack.runtime.planning.options import LoadOptions

from .plan import plan

if TYPE_CHECKING:
    from moepack.runtime.policies.contract import Versions


@dataclass(frozen=True, slots=True)
class Fitting:
    """The versions that a budget serves, with the plan's number of experts at each."""

    versions: tuple[str, ...]  # the most precise first
    experts: tuple[int, ...]  # how many experts the plan has at each version
    table: Versions | None  # [layers][experts], the planned version of each expert; None if passes choose the versions
    dense: tuple[str, ...]  # the planned version of each dense matrix; empty where these have no versions

    @property
    def text(self) -> str:
        """Describe the versions in words."""
        if self.table is None:
            return f"experts at {', '.join(self.versions)}, as they are needed"
        return ", ".join(f"{n:,} experts at {v}" for v, n in zip(self.versions, self.experts, strict=True))


class Described(Bundle):
    """A bundle without most layer files: an extent of those counts with the largest size that the manifest allows."""

    def layer_file(self, version: str, position: int) -> LayerFile:
        """Open a file that is here; of another return an object that knows the sizes of extents only.

        A lossless extent's size does not follow from its shape. The size of the decoded weights is an upper bound,
        which makes the staging buffer larger by a third of an expert.
        """
        layer = self.layers[position]
        if (self.path / layer.file(version)).is_file():
            return super().layer_file(version, position)
        size = self.manifest.version(version).resident_size(layer.matrices)
        return cast(LayerFile, SimpleNamespace(layer=layer, extent_size=lambda expert: size))


def fitting(bundle: Bundle, options: LoadOptions) -> Fitting:
    """Find the versions of the bundle that `moepack plan` serves in a budget.

    Raises:
        InputError: if the budget is too small (the message names the least), or if the policy's plan measures how fast
            weights are read and the weights are not here.
    """
    policy = options.parsed_policy()
    if isinstance(bundle, Described) and policy.is_live and policy.options.by_rates:
        needed = ",".join(versions_of(options.policy, bundle, True))
        raise InputError(f"policy {policy}: its plan measures rates on weights: fetch {needed} by name")
    planned = plan(bundle, options)
    if planned.message is not None:
        raise InputError(planned.message)
    counts = Counter(name for row in planned.table for name in row)
    dense = tuple(v.name for v in choose_dense(options.dense, bundle, options.policy))
    if planned.moving:
        names = versions_of(options.policy, bundle, True)
        return Fitting(names, tuple(counts[n] for n in names), None, dense)
    names = tuple(v.name for v in bundle.versions if counts[v.name])
    return Fitting(names, tuple(counts[n] for n in names), planned.table, dense)
