"""The router's Prometheus series, all named `kvoy_router_*`.

Counters and histograms are written as requests end; gauges are read from the pool at each scrape,
so that a gone engine's series vanish with it. Labels hold names of known models and engines,
never a client's free text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_router.audit import Audit
from kvoy_router.audit_metrics import AuditMetrics
from kvoy_router.decision import Decision
from kvoy_router.endpoint import Endpoint, Knowledge
from kvoy_router.failover_metrics import FailoverMetrics
from kvoy_router.flow_metrics import FlowMetrics
from kvoy_router.pool import Pool
from kvoy_router.record import RequestRecord
from kvoy_router.tenant_metrics import TenantMetrics

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class ServerGauges:
    """What the HTTP surfaces hold and what discovery knows at the moment of a scrape."""

    connections: int
    buffered_bytes: int
    idle_engine_connections: int
    has_kubernetes: bool | None = None
    """Whether the Kubernetes API answers; None where it is not used."""
    has_fleet: bool | None = None
    """Whether the fleet file is good as it is now; None where there is none."""
    has_keys: bool | None = None
    """Likewise for the keys file."""
    has_certificate: bool | None = None
    """Likewise for the certificate of the main port."""


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
        self.registry.register(_Observed(pool, server, now_s, self))

    def expose(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self.registry)


class _Observed(Collector):
    def __init__(
        self,
        pool: Pool,
        server: Callable[[], ServerGauges],
        now_s: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._server = server
        self._now_s = now_s
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._server_gauges()
        yield from self._discovery_gauges()
        yield from self._engine_gauges()
        failures = CounterMetricFamily(
            "kvoy_router_engine_failures",
            "Attempts that an engine failed, by what went wrong",
            labels=["model", "engine", "reason"],
        )
        known = {endpoint.name for endpoint in self._pool.endpoints}
        for labels, count in list(self._metrics.failures()):
            failures.add_metric(list(labels), count)
            if labels[1] not in known:
                # Its last requests failed after it had gone: told once.
                self._metrics.forget_engine(labels[1])
        yield failures

    def _server_gauges(self) -> Iterator[Metric]:
        server, index = self._server(), self._pool.index
        yield GaugeMetricFamily(
            "kvoy_router_client_connections", "Open client connections", server.connections
        )
        yield GaugeMetricFamily(
            "kvoy_router_buffered_request_bytes",
            "Request bodies held in memory",
            server.buffered_bytes,
        )
        yield GaugeMetricFamily(
            "kvoy_router_idle_engine_connections",
            "Kept connections to engines",
            server.idle_engine_connections,
        )
        yield GaugeMetricFamily(
            "kvoy_router_index_entries", "Block hashes in the prefix index", len(index)
        )
        yield GaugeMetricFamily(
            "kvoy_router_index_bytes",
            "Memory of the prefix index, estimated",
            index.approximate_bytes(),
        )
        yield GaugeMetricFamily(
            "kvoy_router_assumed_blocks",
            "Block hashes that are assumed of requests on their way",
            len(self._pool.assumed),
        )

    def _discovery_gauges(self) -> Iterator[Metric]:
        server = self._server()
        if server.has_kubernetes is not None:
            yield GaugeMetricFamily(
                "kvoy_router_kubernetes_up",
                "1 while the Kubernetes API answers; engines stay as they were known while not",
                float(server.has_kubernetes),
            )
        if server.has_fleet is not None:
            yield GaugeMetricFamily(
                "kvoy_router_fleet_file_ok",
                "1 while the fleet file is good; services stay as they were known while not",
                float(server.has_fleet),
            )

        if server.has_keys is not None:
            yield GaugeMetricFamily(
                "kvoy_router_keys_file_ok",
                "1 while the keys file is good; keys stay as they were known while not",
                float(server.has_keys),
            )
        if server.has_certificate is not None:
            yield GaugeMetricFamily(
                "kvoy_router_certificate_ok",
                "1 while certificate and key are good; the old ones are shown while not",
                float(server.has_certificate),
            )

    def _engine_gauges(self) -> Iterator[Metric]:
        endpoints = self._pool.endpoints
        state = GaugeMetricFamily(
            "kvoy_router_engine_state",
            "1 for the state in which this router's knowledge of the engine is",
            labels=["engine", "service", "state"],
        )
        for endpoint in endpoints:
            for knowledge in Knowledge:
                is_now = endpoint.knowledge is knowledge
                labels = [endpoint.name, endpoint.origin.service, knowledge.value]
                state.add_metric(labels, float(is_now))
        yield state
        now_s = self._now_s()
        for name, text, read in _ENGINE_GAUGES:
            family = GaugeMetricFamily(
                f"kvoy_router_engine_{name}", text, labels=["engine", "service"]
            )
            for endpoint in endpoints:
                value = read(endpoint, now_s)
                if value is not None:  # unknown is left out, never shown as zero
                    family.add_metric([endpoint.name, endpoint.origin.service], value)
            yield family


def _load(name: str) -> Callable[[Endpoint, float], float | None]:
    return lambda endpoint, now_s: float(getattr(endpoint.load, name)) if endpoint.load else None


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[Endpoint, float], float | None]], ...] = (
    (
        "in_flight",
        "This router's requests on the engine",
        lambda endpoint, now_s: float(endpoint.ledger.in_flight),
    ),
    (
        "telemetry_age_seconds",
        "Age of the last load report",
        lambda endpoint, now_s: endpoint.report_age_s(now_s),
    ),
    ("running", "Sequences in the engine's batch", _load("running")),
    ("waiting", "Sequences that the engine has queued", _load("waiting")),
    ("free_blocks", "KV blocks that hold nothing", _load("free_blocks")),
    ("evictable_blocks", "KV blocks that hold unused cached work", _load("evictable_blocks")),
    ("total_blocks", "KV blocks of the engine", _load("total_blocks")),
)
