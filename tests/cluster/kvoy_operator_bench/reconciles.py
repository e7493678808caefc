"""Reconcile times from the operator's own histogram, between two scrapes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_BUCKET = "kvoy_operator_reconcile_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Reconciles:
    """How many reconciles took at most so long, since the operator's start; all kinds together."""

    buckets: tuple[tuple[float, float], ...]
    """Upper bound in seconds, and the count up to it; ascending, the last bound is infinite."""

    @classmethod
    def scraped(cls, text: str) -> Reconciles:
        """From the operator's `/metrics`."""
        counts: Counter[float] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _BUCKET:
                    counts[float(sample.labels["le"])] += sample.value  # type: ignore[assignment]
        return cls(tuple(sorted(counts.items())))

    def __sub__(self, earlier: Reconciles) -> Reconciles:
        before = dict(earlier.buckets)
        return Reconciles(tuple((le, n - before.get(le, 0)) for le, n in self.buckets))

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    def quantile_s(self, q: float) -> float:
        """As Prometheus' `histogram_quantile`: linear inside a bucket. NaN without reconciles."""
        if not self.count:
            return math.nan
        rank, low_s, below = q * self.count, 0.0, 0.0
        for high_s, count in self.buckets:
            if count >= rank:
                if math.isinf(high_s):
                    return low_s
                return low_s + (high_s - low_s) * (rank - below) / (count - below)
            low_s, below = high_s, count
        return low_s
