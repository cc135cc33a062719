"""Pool the losses of a layer's experts: those with few tokens lean on the layer. Pure.

An expert's version is measured twice: on its own tokens, with an error that falls with their number, and on common
tokens of the layer, which compare experts but are not its own. The relation own = m * others, with a scatter tau
between experts, is fitted to all experts of the layer (a random-effects mean; DerSimonian and Laird, 1986). The
estimate is the precision-weighted mean of `own` and `m * others`. An expert without tokens of its own gets
`m * others` alone, with an error of tau.

A variance from few groups is uncertain and correlates with the loss: it is shrunk toward the layer's, as if PSEUDO
more groups had the layer's variance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .losses import Measured

PARTS = ("mse", "relative", "gated")
# Names of the tables that `pooled` reads, each [experts, versions].
MEASURED = tuple(
    f"{on}.{name}"
    for on in ("own", "others")
    for name in (*PARTS, *(f"{part}.variance" for part in PARTS), "groups", "doubt")
)
PSEUDO = 8
LEAST_SCATTER = 0.05**2  # the least tau squared: few experts cannot tell less from 0
UNKNOWN_SCATTER = 0.5**2  # tau squared with fewer than FEW experts
FEW = 3


def measured_row(versions: Sequence[tuple[Measured, Measured]]) -> dict[str, list[float]]:
    """One expert's row of every table in MEASURED, from its pair (own, others) at each version."""
    out: dict[str, list[float]] = {name: [] for name in MEASURED}
    for pair in versions:
        for on, found in zip(("own", "others"), pair, strict=True):
            for part in PARTS:
                out[f"{on}.{part}"].append(getattr(found.loss, part))
                out[f"{on}.{part}.variance"].append(getattr(found.variance, part))
            out[f"{on}.groups"].append(found.groups)
            out[f"{on}.doubt"].append(found.doubt)
    return out


def pooled(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pool the tables MEASURED to losses and standard errors, float32 [experts, versions]: "mse", "mse_error" ..."""
    out: dict[str, Tensor] = {}
    for part in PARTS:
        keys = [f"own.{key}" for key in (part, f"{part}.variance", "groups", "doubt")]
        keys += [f"others.{key}" for key in (part, f"{part}.variance", "groups")]
        columns = [pool(*(raw[k][:, v].double() for k in keys)) for v in range(raw["own.mse"].shape[1])]
        out[part] = torch.stack([c[0] for c in columns], 1).float()
        out[f"{part}_error"] = torch.stack([c[1] for c in columns], 1).float()
    return out


def pool(
    own: Tensor,
    own_variance: Tensor,
    own_groups: Tensor,
    doubt: Tensor,
    others: Tensor,
    others_variance: Tensor,
    others_groups: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pool one version's losses: returns estimates and standard errors. All tensors are float64 [experts]."""
    has = (own_groups > 0) & (own > 0)
    around = (others_groups > 0) & (others > 0)
    spread = _spread(own, own_variance, own_groups, has)
    mine = torch.where(has, spread / own_groups.clamp(min=1) + doubt, torch.inf)  # variance over squared loss
    theirs = torch.where(around, _spread(others, others_variance, others_groups, around) / others_groups, torch.inf)
    theirs = theirs.nan_to_num(nan=torch.inf)
    both = has & around
    if bool(both.any()):
        # The logarithm of a noisy number is biased by minus half its relative variance.
        logs = (own[both].log() + mine[both] / 2) - (others[both].log() + theirs[both] / 2)
        mean, scatter, mean_variance = _random_effects(logs, mine[both] + theirs[both])
    else:
        mean = 0.0
        scatter = UNKNOWN_SCATTER
        mean_variance = UNKNOWN_SCATTER
    typical = float(own[has].mean()) if bool(has.any()) else 0.0  # for an expert without measurements
    leaning = torch.where(around, others * torch.tensor(mean).exp(), torch.full_like(own, typical))
    leaning_variance = torch.where(around, scatter + theirs + mean_variance, 1.0)
    trust = torch.where(has, leaning_variance / (leaning_variance + mine), 0.0)
    trust = torch.where(has & (leaning <= 0), 1.0, trust).nan_to_num(0.0)
    value = trust * torch.where(has, own, 0.0) + (1 - trust) * leaning
    variance = torch.where(trust >= 1, mine, (1 - trust) * leaning_variance)
    variance = torch.where(has, variance, leaning_variance)
    return value, value * variance.clamp(min=0).nan_to_num(1.0, 1.0).sqrt()


def _spread(loss: Tensor, variance: Tensor, groups: Tensor, used: Tensor) -> Tensor:
    """Variance of one group's loss relative to the loss squared, shrunk to the mean of all experts.

    It is at most the number of groups, as that of numbers above zero about their mean. The jackknife of a ratio has no
    bound: an expert whose output is nearly zero in all groups but one would make the variances of its layer infinite.
    """
    each = torch.where(used, variance * groups / loss.square().clamp(min=1e-300), 0.0).clamp(max=groups)
    degrees = torch.where(used, (groups - 1).clamp(min=0), 0.0)
    total = float(degrees.sum())
    mean = float((degrees * each).sum()) / total if total else 1.0
    return (degrees * each + PSEUDO * mean) / (degrees + PSEUDO)


def _random_effects(values: Tensor, variances: Tensor) -> tuple[float, float, float]:
    """The mean of values with errors of known variance, their further scatter, and the mean's variance."""
    count = len(values)
    weight = 1 / variances.clamp(min=1e-12)
    centre = float((weight * values).sum() / weight.sum())
    scatter = UNKNOWN_SCATTER
    if count >= FEW:
        heterogeneity = float((weight * (values - centre).square()).sum())
        scale = float(weight.sum() - weight.square().sum() / weight.sum())
        scatter = max(LEAST_SCATTER, (heterogeneity - (count - 1)) / scale if scale > 0 else 0.0)
    weight = 1 / (variances + scatter)
    return float((weight * values).sum() / weight.sum()), scatter, float(1 / weight.sum())
