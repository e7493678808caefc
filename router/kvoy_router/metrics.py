"""The router's Prometheus series, all named `kvoy_router_*`.

Counters and histograms are written as requests end; gauges are read at each scrape (`state_gauges`
and what `observe` of the others adds), so that a gone engine's series vanish with it. Labels hold
names of known models and engines, never a client's free text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_router.audit import Audit
from kvoy_router.audit_metrics import AuditMetrics
from kvoy_router.decision import Decision
from kvoy_router.failover_metrics import FailoverMetrics
from kvoy_router.flow_metrics import FlowMetrics
from kvoy_router.pool import Pool
from kvoy_router.record import RequestRecord
from kvoy_router.reload_metrics import ReloadMetrics
from kvoy_router.state_gauges import ServerGauges, StateGauges
from kvoy_router.tenant_metrics import TenantMetrics

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


M = TypeVar("M", Counter, Histogram)


class _Children(dict[str | tuple[str, ...], M]):
    """A metric's series by its label or labels: looking them up in the metric itself costs more
    than counting."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric: M = metric

    def __missing__(self, labels: str | tuple[str, ...]) -> M:
        values = (labels,) if isinstance(labels, str) else labels
        child: M = self._metric.labels(*values)
        self[labels] = child
        return child

    def forget(self, position: int, label: str) -> None:
        """Drop the series whose label at `position` has this value."""
        for key in list(self):
            labels = (key,) if isinstance(key, str) else key
            if labels[position] == label:
                del self[key]
                self._metric.remove(*labels)


class Metrics:
    """Owns the registry of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._failures: dict[tuple[str, str, str], int] = {}
        self._audit = Audit()
        self.registry.register(AuditMetrics(self._audit))
        labels = ["model"]
        self.failover = FailoverMetrics(self.registry)
        self.flow = FlowMetrics(self.registry)
        self.tenants = TenantMetrics(self.registry)
        self.reloads = ReloadMetrics(self.registry)
        self.in_flight = 0
        """Requests that have no complete answer yet."""
        Gauge(
            "kvoy_router_requests_in_flight",
            "Requests that have no complete answer yet",
            registry=self.registry,
        ).set_function(lambda: self.in_flight)
        self._requests = _Children(
            Counter(
                "kvoy_router_requests",
                "Requests to the generating endpoints",
                ["model", "status", "outcome"],
                registry=self.registry,
            )
        )
        self._refused = _Children(
            Counter(
                "kvoy_router_refused",
                "Requests that were not understood as HTTP, or broke a limit of it",
                ["status"],
                registry=self.registry,
            )
        )
        self._ttft = _Children(
            Histogram(
                "kvoy_router_time_to_first_token_seconds",
                "From a request to the first byte of its answer; a plain answer comes whole",
                ["model", "stream"],
                buckets=_TTFT_BUCKETS,
                registry=self.registry,
            )
        )
        self._duration = _Children(
            Histogram(
                "kvoy_router_request_duration_seconds",
                "From a request to the end of its answer",
                labels,
                buckets=_DURATION_BUCKETS,
                registry=self.registry,
            )
        )
        self._retries = _Children(
            Counter(
                "kvoy_router_retries",
                "Further engines tried before the client had seen a byte",
                labels,
                registry=self.registry,
            )
        )
        self._decisions = _Children(
            Counter(
                "kvoy_router_decisions",
                "Picks of an engine; reason: prefix (it holds the longest), load (another holds a "
                "longer one), cold (nobody holds any)",
                ["model", "service", "policy", "reason"],
                registry=self.registry,
            )
        )
        self._prompt_tokens = _Children(
            Counter(
                "kvoy_router_prompt_tokens",
                "Prompt tokens of answered requests",
                labels,
                registry=self.registry,
            )
        )
        self._predicted = _Children(
            Counter(
                "kvoy_router_predicted_cached_tokens",
                "Prompt tokens of answered requests that the chosen engine was expected to hold",
                labels,
                registry=self.registry,
            )
        )
        self._actual = _Children(
            Counter(
                "kvoy_router_cached_tokens",
                "Prompt tokens that engines say they held",
                labels,
                registry=self.registry,
            )
        )

    def on_request(self, record: RequestRecord, now_s: float) -> None:
        model = record.model
        self._requests[model, str(record.status), record.outcome].inc()
        self._duration[model].observe(now_s - record.started_s)
        self._retries[model].inc(record.num_retries)  # also none: a rate needs the series
        ttft_s = record.ttft_s()
        if ttft_s is None:
            return
        self._compare(record)
        self._ttft[model, "true" if record.is_stream else "false"].observe(ttft_s)
        self._prompt_tokens[model].inc(record.prompt_tokens)
        self._predicted[model].inc(record.predicted_cached_tokens)
        if record.cached_tokens is not None:
            self._actual[model].inc(record.cached_tokens)

    def _compare(self, record: RequestRecord) -> None:
        """What was predicted with what came; what several engines did together is no one's."""
        decision = record.decision
        if decision is None or record.first_byte_s is None or record.num_resumes:
            return
        ttft_s = record.first_byte_s - decision.now_s if record.is_stream else None
        self._audit.on_answer(decision, record.cached_tokens, ttft_s)

    def on_refused(self, status: int) -> None:
        self._refused[str(status)].inc()

    def on_decision(self, decision: Decision) -> None:
        if not decision.best_cached_tokens:
            reason = "cold"
        elif decision.cached_tokens == decision.best_cached_tokens:
            reason = "prefix"
        else:
            reason = "load"
        service = decision.endpoint.origin.service
        self._decisions[decision.model, service, decision.policy, reason].inc()

    def on_engine_failure(self, model: str, engine: str, reason: str) -> None:
        key = (model, engine, reason)
        self._failures[key] = self._failures.get(key, 0) + 1

    def forget_engine(self, engine: str) -> None:
        for key in [key for key in self._failures if key[1] == engine]:
            del self._failures[key]

    def forget_service(self, service: str) -> None:
        self._decisions.forget(1, service)

    def forget_model(self, model: str) -> None:
        self._audit.forget_model(model)
        self.failover.forget_model(model)
        self.flow.forget_model(model)
        self.tenants.forget_model(model)
        for counters in (
            self._requests,
            self._retries,
            self._decisions,
            self._prompt_tokens,
            self._predicted,
            self._actual,
        ):
            counters.forget(0, model)
        for histograms in (self._ttft, self._duration):
            histograms.forget(0, model)

    def failures(self) -> Iterable[tuple[tuple[str, str, str], int]]:
        return self._failures.items()

    def observe(
        self, pool: Pool, server: Callable[[], ServerGauges], now_s: Callable[[], float]
    ) -> None:
        """Add the gauges of what this router holds and knows."""
        self.registry.register(StateGauges(pool, server, now_s))
        self.registry.register(_Failures(pool, self))

    def expose(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self.registry)


class _Failures(Collector):
    """A gone engine's series are told once more, since its last requests may fail after it."""

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "kvoy_router_engine_failures",
            "Attempts that an engine failed, by what went wrong",
            labels=["model", "engine", "reason"],
        )
        known = {endpoint.name for endpoint in self._pool.endpoints}
        for labels, count in list(self._metrics.failures()):
            failures.add_metric(list(labels), count)
            if labels[1] not in known:
                self._metrics.forget_engine(labels[1])
        yield failures
