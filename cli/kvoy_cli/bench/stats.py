"""Order statistics of small samples. Pure; every benchmark's figures come from here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Iterable[float], q: float) -> float:
    """The `q`-th percentile (0..100), interpolated linearly between order statistics.

    NaN for no values. An infinite value (a request that never answered) keeps its rank.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    if position == below or ordered[below] == ordered[above]:
        return ordered[below]  # no arithmetic with an infinite value
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Iterable[float]) -> float:
    return percentile(values, 50)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def ratio(numerator: float, denominator: float) -> float:
    """NaN where the denominator is 0: a missing measurement meets no goal."""
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest of its repeats."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(median(values), min(values), max(values), len(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios of measurements that were made side by side; the lengths must agree."""
    return [ratio(a, b) for a, b in zip(numerators, denominators, strict=True)]
