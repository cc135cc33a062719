"""The versions of a bundle that are useful in a memory budget: those at which its plan serves experts.

A policy that places experts as they are needed, or off the device, may serve all its versions. The arithmetic is that
of `moepack plan`. It needs the manifest, the tables and the configuration, but no weights, so it also serves downloads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from moepack.pack.errors import InputError
from moepack.pack.layer_file import LayerFile
from moepack.pack.reader import Bundle
from moepack.runtime.planning.choice import ladders_of, versions_of
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.paging import paged_version

from .plan import PLANNED, plan

if TYPE_CHECKING:
    from moepack.runtime.policies.contract import Versions


@dataclass(frozen=True, slots=True)
class Fitting:
    """What a budget serves."""

    versions: tuple[str, ...]  # the most precise first
    experts: tuple[int, ...]  # how many the plan has at each
    table: Versions | None  # [layers][experts], the planned version of each; None if no map determines it

    @property
    def text(self) -> str:
        """Describe it in words."""
        if self.table is None:
            return f"experts at {', '.join(self.versions)}, as they are needed"
        return ", ".join(f"{n:,} experts at {v}" for v, n in zip(self.versions, self.experts, strict=True))


class Described(Bundle):
    """A bundle without layer files: each extent counts with the largest size that the manifest allows."""

    def layer_file(self, version: str, position: int) -> LayerFile:
        """Return an object that knows the sizes of extents only.

        The shape of a lossless extent does not give its size. The size of its weights bounds it, which makes the
        staging buffer larger by a third of an expert.
        """
        layer = self.layers[position]
        size = self.manifest.version(version).resident_size(layer.matrices)
        return cast(LayerFile, SimpleNamespace(layer=layer, extent_size=lambda expert: size))


def fitting(bundle: Bundle, options: LoadOptions) -> Fitting:
    """The versions of the bundle that `moepack plan` serves in a budget.

    Raises:
        InputError: for a budget that is too small, with the least; for a policy whose plan measures how fast weights
            are brought, if they are not here.
    """
    options = options.filled(**PLANNED)
    policy = options.parsed_policy()
    if isinstance(bundle, Described) and policy.is_live and any(map(paged_version, ladders_of(bundle, policy.options))):
        needed = ",".join(versions_of(options.policy, bundle, True))
        raise InputError(f"policy {policy}: its plan measures rates on weights: fetch {needed} by name")
    planned = plan(bundle, options)
    if planned.message is not None:
        raise InputError(planned.message)
    counts = Counter(name for row in planned.table for name in row)
    if planned.moving:
        names = versions_of(options.policy, bundle, True)
        return Fitting(names, tuple(counts[n] for n in names), None)
    names = tuple(v.name for v in bundle.versions if counts[v.name])
    return Fitting(names, tuple(counts[n] for n in names), planned.table)
