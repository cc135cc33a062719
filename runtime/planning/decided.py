"""What a budget holds under a policy, and what that loses; and the form of the KV cache with which least is lost.

This module reads manifests and calibration's tables, and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.tables import CalibrationTables
from moepack.runtime.kv.forms import LOSS
from moepack.runtime.policies.contract import Versions
from moepack.runtime.policies.placements import READ_THERE, Where, version_name
from moepack.runtime.policies.registry import Policy

from .capacity import base_bytes
from .fixed import Fixed
from .plan import make_plan, unchanging


class Decided(NamedTuple):
    """What a budget holds. Sizes are bytes."""

    table: Versions
    names: tuple[str, ...]  # placements in the map, the best first
    parts: dict[str, int]  # of M_fixed: `Plan.parts`
    workspace: int
    floor: int  # the least that the experts take
    used: int  # what the experts take as mapped
    moving: bool = False  # whether experts are off the device, or passes choose placements
    pinned: int = 0  # of host memory, for experts that the device reads there


def decide(
    bundle: Bundle, policy: Policy, fixed: Fixed, budget: int, on_gpu: bool, host: int | None, ahead: int = 0
) -> Decided:
    """Return what `budget` bytes hold beside `fixed`; the other arguments are those of `make_plan`.

    Raises:
        InputError: when the policy does not fit the bundle.
        TooSmallError: when the budget does not hold the least that the policy serves.
    """
    if not policy.is_live:
        versions, experts = unchanging(bundle, policy, fixed, budget)
        return Decided(versions, tuple(v.name for v in bundle.versions), {}, 0, experts, experts)
    made = make_plan(bundle, policy.options, fixed.total, budget, on_gpu, host, ahead)
    chosen, wanted = made.policy(policy)
    table = tuple(
        tuple(str(made.ladder[wanted.get((p, e), made.base)]) for e in range(n)) for p, n in enumerate(made.experts)
    )
    base = base_bytes(made.sizes, made.experts)
    growing = made.growing()
    used = base + sum(growing[p][v] - growing[p][made.base] for (p, _), v in wanted.items())
    names = tuple(map(str, made.ladder))
    least = base + made.demand + made.present
    moving = chosen.needs.layers or any(p.where is not Where.DEVICE for p in made.ladder)
    pinned = made.on_host(*READ_THERE) if on_gpu else 0
    return Decided(table, names, made.parts, made.workspace, least, used, moving, pinned)


def relative_loss(tables: CalibrationTables, table: Versions) -> tuple[float, float]:
    """Compute a map's mean relative loss over calibration's routed tokens (pack/FORMAT.md, "Calibration tables").

    Also return its standard error, which takes the experts' errors as independent.
    """
    lost = routed = square = 0.0
    for layer, row in zip(tables.layers, table, strict=True):
        columns = [tables.versions.index(name) if (name := version_name(placed)) else None for placed in row]
        relative = [1.0 if c is None else float(layer.relative[e, c]) for e, c in enumerate(columns)]
        lost += sum(float(n) * loss for n, loss in zip(layer.tokens, relative, strict=True))
        routed += float(layer.tokens.sum())
        errors = [0.0 if c is None else float(layer.relative_error[e, c]) for e, c in enumerate(columns)]
        square += sum((float(n) * error) ** 2 for n, error in zip(layer.tokens, errors, strict=True))
    if not routed:
        return 0.0, 0.0
    return lost / routed, math.sqrt(square) / routed


def best_cache(forms: Iterable[str], experts_lose: Callable[[str], float]) -> str:
    """Return the form of the KV cache with which experts and cache together lose least.

    A form counts with all of its loss, although layers with windows or states stay as they are.

    Args:
        forms: of `kv.forms.FORMS`, the most precise first. If none can be served, the last one is returned.
        experts_lose: returns the experts' mean relative loss beside a cache of that form. It raises InputError where
            the budget does not hold both, or the model cannot have such a cache.
    """
    best = None
    form = ""
    for form in forms:
        try:
            lost = experts_lose(form) + LOSS[form]
        except InputError:
            continue
        if best is None or lost < best[0]:
            best = lost, form
    return form if best is None else best[1]
