"""Choose the policy and the versions that serve a bundle, for plans, loading and downloads.

This module reads the manifest and the policy's map, but no weights, and imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.runtime.policies.contract import Ladder, LiveOptions
from moepack.runtime.policies.registry import Policy, parse_policy

log = logging.getLogger("moepack.runtime")


def choose_policy(text: str | None, bundle: Bundle, devices: Sequence[str], in_budget: bool) -> Policy:
    """Return the policy with this name. The default serves the most precise version; in a budget it is `hotness`, or
    `uniform` if versions cannot change on these devices (as torch names them) or in this bundle, which is logged.

    Raises:
        InputError: for an unknown policy, or one that needs a budget.
    """
    policy = parse_policy(text, in_budget)
    if text or not policy.is_live:
        return policy
    if len(bundle.versions) < 2:
        why = f"{bundle.versions[0].name} is its only version here"
    elif len(set(devices)) > 1 or devices[0].partition(":")[0] not in ("cpu", "cuda"):
        why = "versions change on one CPU or one CUDA device"
    else:
        return policy
    log.warning("%s: %s: policy uniform in place of %s", bundle.path, why, policy)
    return parse_policy("uniform")


def ladders_of(bundle: Bundle, options: LiveOptions) -> list[Ladder]:
    """Return the ladders (placements, best first) from which a policy may choose on a bundle.

    Raises:
        InputError: when the bundle lacks a version, or the experts, that the options name.
    """
    try:
        options.check_experts(max(layer.experts for layer in bundle.layers))
        return options.ladders(bundle.versions)
    except InputError as error:
        raise InputError(f"{bundle.path}: {error}") from None


def versions_of(text: str | None, bundle: Bundle, in_budget: bool) -> tuple[str, ...]:
    """Return the versions that a policy may serve, the most precise first. A download fetches these.

    The bundle lists the versions that could be fetched; their files are not read.

    Raises:
        InputError: for a policy that does not exist, needs a budget, or does not fit the bundle.
    """
    policy = parse_policy(text, in_budget)
    if policy.is_live and len(bundle.versions) > 1:
        ladders = ladders_of(bundle, policy.options)
        names = {p.version.name for ladder in ladders for p in ladder if p.version is not None}
    elif policy.entry.versions is not None and not policy.entry.needs_budget:
        names = {name for row in policy.entry.versions(bundle, policy.options, None) for name in row}
    else:
        names = {v.name for v in bundle.versions}  # the choice depends on the budget
    return tuple(v.name for v in bundle.versions if v.name in names)
