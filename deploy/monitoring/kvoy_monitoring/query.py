"""PromQL as values: panels and rules are built from few shapes, so that each is right once.

Quantiles are taken over summed rates of buckets, ratios over summed counters; nothing averages an
average. `$__rate_interval` is Grafana's; rules put a fixed window in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    """Grafana's notation: `{{pod}}`."""


@dataclass(frozen=True, slots=True)
class Selector:
    """The label matchers that a dashboard's variables stand for."""

    matchers: tuple[str, ...] = ()
    window: str = RATE_WINDOW

    def where(self, *matchers: str) -> Selector:
        return Selector((*self.matchers, *matchers), self.window)

    def of(self, metric: str) -> str:
        """`metric{matchers}`"""
        return f"{metric}{{{', '.join(self.matchers)}}}" if self.matchers else metric

    def total(self, metric: str, *by: str) -> str:
        """The gauge summed over everything but `by`."""
        return f"sum{_by(by)}({self.of(metric)})"

    def mean(self, metric: str, *by: str) -> str:
        return f"avg{_by(by)}({self.of(metric)})"

    def worst(self, metric: str, *by: str) -> str:
        return f"max{_by(by)}({self.of(metric)})"

    def rate(self, counter: str, *by: str) -> str:
        """The counter's increase per second, summed over everything but `by`."""
        return f"sum{_by(by)}(rate({self.of(counter)}[{self.window}]))"

    def quantile(self, quantile: float, histogram: str, *by: str) -> str:
        """Of a classic histogram, over all of its series but `by`."""
        return (
            f"histogram_quantile({quantile:g}, "
            f"sum{_by((*by, 'le'))}(rate({self.of(histogram + '_bucket')}[{self.window}])))"
        )

    def share(self, part: str, whole: str, *by: str) -> str:
        """One counter's rate of another's; no data while the whole stands still."""
        return f"{self.rate(part, *by)} / ({self.rate(whole, *by)} > 0)"


def quantiles(
    selector: Selector, histogram: str, *by: str, of: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """One query per quantile, with the legend `p95 {{by}}`."""
    labels = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple(
        Query(selector.quantile(quantile, histogram, *by), f"p{quantile * 100:g}{labels}")
        for quantile in of
    )


def cached_surprises(selector: Selector, *by: str) -> str:
    """Share of requests whose cached tokens were predicted wrong by more than a fifth of the
    prompt; no data while there are no requests."""
    name = "kvoy_router_cached_tokens_error_ratio_bucket"

    def up_to(bound: str) -> str:
        return selector.where(f'le="{bound}"').rate(name, *by)

    return f"1 - ({up_to('0.2')} - {up_to('-0.2')}) / ({up_to('+Inf')} > 0)"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""
