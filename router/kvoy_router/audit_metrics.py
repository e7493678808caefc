"""The self-audit as Prometheus series, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_router.audit import Audit, Tally


class AuditMetrics(Collector):
    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def collect(self) -> Iterator[Metric]:
        cached = HistogramMetricFamily(
            "kvoy_router_cached_tokens_error_ratio",
            "Cached tokens as engines count them less those predicted, as a share of the prompt; "
            "up to a hash stride counts as none",
            labels=["model"],
        )
        ttft = HistogramMetricFamily(
            "kvoy_router_time_to_first_token_prediction_ratio",
            "Observed time from the decision to the first token by the predicted one, 50 ms added "
            "to both; streams only",
            labels=["model"],
        )
        saved = CounterMetricFamily(
            "kvoy_router_prefill_tokens_saved",
            "Prompt tokens that the engine next in turn would have had to compute beyond those "
            "that the chosen one computes",
            labels=["model"],
        )
        added = CounterMetricFamily(
            "kvoy_router_prefill_tokens_added",
            "Prompt tokens that the chosen engine computes beyond those that the engine next in "
            "turn would have had to",
            labels=["model"],
        )
        for model, audit in list(self._audit.models()):
            _add(cached, model, audit.cached_error)
            _add(ttft, model, audit.ttft_ratio)
            saved.add_metric([model], audit.saved_tokens)
            added.add_metric([model], audit.added_tokens)
        yield from (cached, ttft, saved, added)


def _add(family: HistogramMetricFamily, model: str, tally: Tally) -> None:
    buckets = [
        ("+Inf" if bound == float("inf") else str(bound), float(count))
        for bound, count in tally.cumulative()
    ]
    family.add_metric([model], buckets, tally.total)
