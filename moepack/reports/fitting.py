"""Which versions of a bundle are worth having for a memory budget: those at which its plan serves experts; all that a
policy may serve, where it places them as they are needed, or elsewhere than on the device.

The arithmetic is `moepack plan`'s. It needs the manifest, the tables and the configuration, none of the weights: so it
also says what to fetch. Decides nothing about where versions come from or go.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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
    """What a budget serves.

    Attributes:
        versions: names, the most precise first.
        experts: how many the plan has at each.
        table: [layers][experts], the version that the plan has each at; None where no map of versions says it.
    """

    versions: tuple[str, ...]
    experts: tuple[int, ...]
    table: Versions | None

    @property
    def text(self) -> str:
        """In words."""
        if self.table is None:
            return f"experts at {', '.join(self.versions)}, as they are needed"
        return ", ".join(f"{n:,} experts at {v}" for v, n in zip(self.versions, self.experts, strict=True))


class Described(Bundle):
    """A bundle whose layer files are elsewhere: extents are taken to be as large as the manifest lets them be."""

    def layer_file(self, version: str, position: int) -> LayerFile:
        """Something that knows the sizes of extents, and holds none."""
        return cast(LayerFile, _Sizes(self, version, position))


class _Sizes:
    """Stands for a layer file. A lossless extent has no size that its shape tells: that of its weights bounds it, which
    makes the staging buffer larger than it will be, by a third of an expert."""

    def __init__(self, bundle: Bundle, version: str, position: int) -> None:

        self.layer = bundle.layers[position]
        self._size = bundle.manifest.version(version).resident_size(self.layer.matrices)

    def extent_size(self, expert: int) -> int:
        return self._size


def fitting(bundle: Bundle, options: LoadOptions) -> Fitting:
    """The versions that `moepack plan` serves in a budget, of those that the bundle has.

    Raises:
        InputError: for a budget that does not hold the least there is, which it names; for a policy whose plan measures
            how fast weights are brought, where they are elsewhere.
    """
    options = options.filled(**PLANNED)
    policy = options.parsed_policy()
    if isinstance(bundle, Described) and policy.is_live and any(map(paged_version, ladders_of(bundle, policy.options))):
        needed = ",".join(versions_of(options.policy, bundle, True))
        raise InputError(f"policy {policy} is planned by rates that are measured on weights: fetch {needed} by name")
    planned = plan(bundle, options)
    if planned.message is not None:
        raise InputError(planned.message)
    counts = Counter(name for row in planned.table for name in row)
    if planned.moving:
        names = versions_of(options.policy, bundle, True)
        return Fitting(names, tuple(counts[n] for n in names), None)
    names = tuple(v.name for v in bundle.versions if counts[v.name])
    return Fitting(names, tuple(counts[n] for n in names), planned.table)
