"""Series about flow control: what waits, and how long it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_router.flow import FlowControl
from kvoy_router.flow_queue import FlowQueue

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_CLASSES = ("high", "normal", "low")
"""A client may choose its priority, so labels say only which side of 0 it is on."""


class FlowMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._waits = Histogram(
            "kvoy_router_queue_wait_seconds",
            "How long requests have waited that could not go on at once, and did in the end",
            ["model"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._models: set[str] = set()
        self._flow: FlowControl | None = None

    def on_waited(self, model: str, seconds: float) -> None:
        self._models.add(model)
        self._waits.labels(model).observe(seconds)

    def forget_model(self, model: str) -> None:
        """Its series end with it, and its queue."""
        if self._flow is not None:
            self._flow.forget(model)
        if model in self._models:
            self._models.discard(model)
            self._waits.remove(model)

    def observe(self, flow: FlowControl) -> None:
        """Add the gauges of what waits now."""
        self._flow = flow
        self._registry.register(_Observed(flow))


class _Observed(Collector):
    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow

    def collect(self) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "kvoy_router_queued_requests",
            "Requests that wait for room at an engine",
            labels=["model", "priority"],
        )
        tokens = GaugeMetricFamily(
            "kvoy_router_queued_tokens",
            "Tokens, of prompts and expected answers, that wait for room at an engine",
            labels=["model"],
        )
        under_way = GaugeMetricFamily(
            "kvoy_router_admitted_tokens",
            "Tokens, to compute and of expected answers, of requests that have gone on to engines",
            labels=["model"],
        )
        for model, queues in self._by_model().items():
            for name, count in _by_class(queues).items():
                requests.add_metric([model, name], count)
            tokens.add_metric([model], sum(queue.waiting_tokens for queue in queues))
            under_way.add_metric([model], sum(queue.shares.tokens for queue in queues))
        yield requests
        yield tokens
        yield under_way

    def _by_model(self) -> dict[str, list[FlowQueue]]:
        queues: dict[str, list[FlowQueue]] = {}
        for line, queue in self._flow.queues():
            queues.setdefault(line.model, []).append(queue)
        return queues


def _by_class(queues: Iterable[FlowQueue]) -> dict[str, int]:
    counts = dict.fromkeys(_CLASSES, 0)
    for queue in queues:
        for ticket in queue.waiting():
            counts[_CLASSES[(ticket.priority > 0) - (ticket.priority < 0) + 1]] += 1
    return counts
