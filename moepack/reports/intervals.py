"""Confidence intervals of a mean over tokens that come in documents. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW = 20  # with fewer documents, windows are the sample: an interval over few documents says little
# Two-sided 95 % quantiles of Student's t by degrees of freedom. In between the smaller counts: a little too wide.
_T = {1: 12.71, 2: 4.31, 3: 3.19, 4: 2.78, 5: 2.58, 7: 2.37, 10: 2.23, 15: 2.14, 20: 2.09, 30: 2.05, 60: 2.0, 120: 1.98}


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean over tokens and its 95 % interval, which is infinite for a single cluster."""

    mean: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float]:
        """The two ends of the interval."""
        return self.low, self.high

    def exp(self) -> MeanInterval:
        """Return the exponential of the mean and of both ends: perplexity from nats."""
        return MeanInterval(
            math.exp(self.mean), math.exp(self.low), math.exp(self.high) if self.high < 700 else math.inf
        )


def clustered(sums: Sequence[float], counts: Sequence[float]) -> MeanInterval:
    """Return the mean value of all tokens and its interval; the sample is clusters, not tokens.

    The ratio estimator of cluster sampling: with m = sum(s) / sum(n), its variance is K / (K - 1) sum (s_k - m n_k)^2 /
    sum(n)^2 over the K clusters (Cochran, Sampling Techniques, section 9A.1).

    Args:
        sums: [clusters], the sum of each cluster's token values.
        counts: [clusters], how many tokens each cluster has, at least 1.
    """
    total = sum(counts)
    k = len(sums)
    mean = sum(sums) / total
    if k < 2:
        return MeanInterval(mean, -math.inf, math.inf)
    spread = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    error = math.sqrt(k / (k - 1) * spread) / total
    half = next(t for degrees, t in sorted(_T.items(), reverse=True) if degrees <= k - 1) * error
    return MeanInterval(mean, mean - half, mean + half)
