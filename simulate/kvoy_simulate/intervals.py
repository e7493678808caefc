"""Order statistics, and confidence intervals of figures that were measured with paired seeds. Pure.

Two policies meet the same requests when they run with the same seed, so their figures are compared
seed by seed. What is averaged is the logarithm of the ratio: ratios of 2 and 1/2 are then equally
far from 1. Its interval is Student's t of the paired differences (two-sided, 95 %), which assumes
that log ratios are about normal over seeds; with few seeds it is wide, as it should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5 % quantile of Student's t for 1, 2, ... 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its 95 % confidence interval; NaN bounds: one seed tells
    none."""

    value: float
    low: float
    high: float


def percentile(values: Iterable[float], q: float) -> float:
    """The `q`-th percentile (0 .. 100), linear between order statistics; NaN for no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t. Beyond the table by Cornish and Fisher's expansion around the
    normal quantile, exact to four digits there."""
    if degrees < 1:
        raise ValueError(f"degrees must be at least 1, not {degrees}")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one figure over seeds."""
    middle = mean(values)
    if len(values) < 2:
        return Interval(middle, math.nan, math.nan)
    variance = math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
    half = t_quantile(len(values) - 1) * math.sqrt(variance / len(values))
    return Interval(middle, middle - half, middle + half)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The geometric mean of the seeds' ratios. NaN when one of them is not a ratio of positive
    numbers, so that a missing measurement meets no goal."""
    pairs = list(zip(numerators, denominators, strict=True))
    if not pairs or not all(0.0 < n < math.inf and 0.0 < d < math.inf for n, d in pairs):
        return Interval(math.nan, math.nan, math.nan)
    logs = mean_interval([math.log(n / d) for n, d in pairs])
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high))
