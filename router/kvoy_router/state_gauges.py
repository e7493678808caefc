"""Gauges of what a router holds and knows at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_router.body_memory import BodyMemory
from kvoy_router.endpoint import Endpoint, Knowledge
from kvoy_router.pool import Pool


@dataclass(frozen=True, slots=True)
class ServerGauges:
    """What the HTTP surfaces hold and what discovery knows at the moment of a scrape."""

    connections: int
    memory: BodyMemory
    idle_engine_connections: int
    suspect_requests: int = 0
    segment_bytes: int = 0
    known_prefix_bytes: int = 0
    prompts_not_encoded: int = 0
    has_kubernetes: bool | None = None
    """Whether the Kubernetes API answers; None where it is not used."""
    has_fleet: bool | None = None
    """Whether the fleet file is good as it is now; None where there is none."""
    has_keys: bool | None = None
    """Likewise for the keys file."""
    has_certificate: bool | None = None
    """Likewise for the certificate of the main port."""
    has_config: bool | None = None
    """Likewise for the configuration file."""


class StateGauges(Collector):
    def __init__(
        self,
        pool: Pool,
        server: Callable[[], ServerGauges],
        now_s: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._server = server
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        yield from self._server_gauges()
        yield from self._discovery_gauges()
        yield from self._engine_gauges()

    def _server_gauges(self) -> Iterator[Metric]:
        server, index = self._server(), self._pool.index
        memory = server.memory
        for name, text, value in (
            ("client_connections", "Open client connections", server.connections),
            (
                "buffered_request_bytes",
                "Memory of requests, as counted: bodies and what is made of them",
                memory.used_bytes,
            ),
            ("buffered_request_bytes_limit", "The bound of that memory now", memory.max_bytes),
            (
                "waiting_request_bodies",
                "Large requests that wait for room in that memory",
                memory.num_waiting,
            ),
            (
                "idle_engine_connections",
                "Kept connections to engines",
                server.idle_engine_connections,
            ),
            (
                "suspect_requests",
                "Requests that have killed engines and are refused for a while",
                server.suspect_requests,
            ),
            (
                "prompt_segment_bytes",
                "Memory of the token ids of pieces of prompts",
                server.segment_bytes,
            ),
            (
                "known_prefix_bytes",
                "Memory of the beginnings of chats that were encoded before",
                server.known_prefix_bytes,
            ),
            ("index_entries", "Block hashes in the prefix index", len(index)),
            ("index_bytes", "Memory of the prefix index, estimated", index.approximate_bytes()),
            (
                "assumed_blocks",
                "Block hashes that are assumed of requests on their way",
                len(self._pool.assumed),
            ),
        ):
            yield GaugeMetricFamily(f"kvoy_router_{name}", text, value)
        yield CounterMetricFamily(
            "kvoy_router_prompts_not_encoded",
            "Prompts too long for this router's memory: their engines encode them",
            server.prompts_not_encoded,
        )
        yield CounterMetricFamily(
            "kvoy_router_load_reports",
            "Load reports of engines; --max-reports-per-s bounds their rate",
            self._pool.num_reports,
        )

    def _discovery_gauges(self) -> Iterator[Metric]:
        server = self._server()
        for name, text, read in _DISCOVERY_GAUGES:
            is_good = read(server)
            if is_good is not None:
                yield GaugeMetricFamily(f"kvoy_router_{name}", text, float(is_good))

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


_DISCOVERY_GAUGES: tuple[tuple[str, str, Callable[[ServerGauges], bool | None]], ...] = (
    (
        "config_ok",
        "1 while the configuration file is good; the configuration stays as it was while not",
        lambda server: server.has_config,
    ),
    (
        "kubernetes_up",
        "1 while the Kubernetes API answers; engines stay as they were known while not",
        lambda server: server.has_kubernetes,
    ),
    (
        "fleet_file_ok",
        "1 while the fleet file is good; services stay as they were known while not",
        lambda server: server.has_fleet,
    ),
    (
        "keys_file_ok",
        "1 while the keys file is good; keys stay as they were known while not",
        lambda server: server.has_keys,
    ),
    (
        "certificate_ok",
        "1 while certificate and key are good; the old ones are shown while not",
        lambda server: server.has_certificate,
    ),
)


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
