"""Every metric of the operator, and the only place that knows prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_operator.record import Key

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MAX_SERVICES = 2_000
"""Services with series of their own; one beyond it is counted in none."""
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Metrics:
    """One registry, so that a process, and a test, can have several operators."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "kvoy_operator_reconcile_seconds",
            "Time of one reconcile, by the kind of its resource.",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.reconciles = Counter(
            "kvoy_operator_reconcile_total",
            "Reconciles, by kind and result: ok, retry (something refused), defect.",
            ["kind", "result"],
            registry=self.registry,
        )
        self.api_errors = Counter(
            "kvoy_operator_api_errors_total",
            "Calls that the API server refused or did not answer (code 0).",
            ["verb", "code"],
            registry=self.registry,
        )
        self.api_writes = Counter(
            "kvoy_operator_api_writes_total",
            "Calls that change an object, whether or not they did.",
            ["verb", "resource"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "kvoy_operator_leader",
            "1 on the operator that acts, 0 on those that wait.",
            registry=self.registry,
        )
        self._desired = Gauge(
            "kvoy_operator_pool_replicas_desired",
            "Replicas, or groups of nodes, that a pool should have.",
            ["namespace", "service", "pool"],
            registry=self.registry,
        )
        self._ready = Gauge(
            "kvoy_operator_pool_replicas_ready",
            "Replicas, or groups of nodes, of a pool that can serve.",
            ["namespace", "service", "pool"],
            registry=self.registry,
        )
        self._pools: dict[Key, frozenset[str]] = {}

    def observe_call(self, method: str, path: str, code: int) -> None:
        """Count one call to the API server; `api.Observer`."""
        verb = _VERBS.get(method, method.lower())
        # What is not there yet, or no more, is no error.
        if code == 0 or (code >= 400 and code != 404):
            self.api_errors.labels(verb, str(code)).inc()
        if method != "GET":
            self.api_writes.labels(verb, _resource(path, method)).inc()

    def set_pools(self, key: Key, pools: Mapping[str, tuple[int, int]]) -> None:
        """(desired, ready) of each pool of a service; pools that are not named vanish."""
        if key not in self._pools and len(self._pools) >= _MAX_SERVICES:
            return
        for pool, (desired, ready) in pools.items():
            self._desired.labels(key.namespace, key.name, pool).set(desired)
            self._ready.labels(key.namespace, key.name, pool).set(ready)
        for pool in self._pools.get(key, frozenset()) - set(pools):
            self._desired.remove(key.namespace, key.name, pool)
            self._ready.remove(key.namespace, key.name, pool)
        self._pools[key] = frozenset(pools)
        if not pools:
            del self._pools[key]

    def watch_queue(
        self,
        depth: Callable[[], int],
        oldest_age_s: Callable[[], float],
        watch_ages_s: Callable[[], Mapping[str, float]],
    ) -> None:
        """Read queue and watches at every scrape."""
        self.registry.register(_Live(depth, oldest_age_s, watch_ages_s))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class _Live(Collector):
    """Values that exist elsewhere and are only read."""

    def __init__(
        self,
        depth: Callable[[], int],
        oldest_age_s: Callable[[], float],
        watch_ages_s: Callable[[], Mapping[str, float]],
    ) -> None:
        self._depth = depth
        self._oldest_age_s = oldest_age_s
        self._watch_ages_s = watch_ages_s

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "kvoy_operator_queue_depth",
            "Resources that are due and wait for a worker.",
            value=self._depth(),
        )
        yield GaugeMetricFamily(
            "kvoy_operator_queue_oldest_age_seconds",
            "How long the resource that waits longest has waited.",
            value=self._oldest_age_s(),
        )
        ages = GaugeMetricFamily(
            "kvoy_operator_last_event_age_seconds",
            "Since the last event or answer of a watch, by kind of object.",
            labels=["kind"],
        )
        for kind, age_s in self._watch_ages_s().items():
            ages.add_metric([kind], age_s)
        yield ages

    def describe(self) -> Iterable[Metric]:
        return ()


def _resource(path: str, method: str) -> str:
    """`deployments`, or `llmservices/status`, of an URL path."""
    parts = path.strip("/").split("/")
    if "namespaces" in parts:
        parts = parts[parts.index("namespaces") + 2 :]
    if len(parts) == 3:
        return f"{parts[0]}/{parts[2]}"
    return parts[0]
