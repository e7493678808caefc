"""The engine's Prometheus series, all named `kvoy_engine_*`, with the unit in the name.

Token counters move together with the `usage` of answers, so that their sums agree. Gauges of the
core are read from its last report at each scrape.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvoy_engine.config import EngineConfig
from kvoy_engine.messages import Load, StepOutput

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0,
)  # fmt: skip
_STEP_BUCKETS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_TOKEN_BUCKETS: Final = tuple(float(4**power) for power in range(11))


class Outcome(enum.StrEnum):
    """How a request ended, as the label `outcome`."""

    SUCCESS = "success"
    ABORTED = "aborted"
    """The client went away."""
    REFUSED = "refused"
    """Answered with a 4xx status."""
    UNAVAILABLE = "unavailable"
    """Full, loading, draining or broken: answered with 429 or 503 before it began."""
    ERROR = "error"


class EngineMetrics:
    """Counters and histograms that the server feeds, on a registry of their own."""

    def __init__(self, read_gauges: Callable[[], EngineGauges], info: Mapping[str, str]) -> None:
        """`info` are the labels of `kvoy_engine_info`: what stays for the process' life."""
        self.registry = CollectorRegistry(auto_describe=False)
        register_info(self.registry, info)
        self.registry.register(_GaugeCollector(read_gauges))
        self._requests = Counter(
            "kvoy_engine_requests",
            "Requests by outcome.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self._finished = Counter(
            "kvoy_engine_choices",
            "Completed choices by finish reason.",
            ["finish_reason"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, cached or computed.")
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that came from the prefix cache."
        )
        self.generated_tokens = self._counter("generated_tokens", "Completion tokens.")
        self.corrupted = self._counter(
            "corrupted_requests", "Requests that ended because their numbers were not finite."
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_seconds", "Between two tokens of a choice.", _LATENCY_BUCKETS
        )
        self.duration = self._histogram(
            "request_duration_seconds", "From arrival to the end of the answer.", _LATENCY_BUCKETS
        )
        self.queue_time = self._histogram(
            "queue_time_seconds", "From arrival to first being scheduled.", _LATENCY_BUCKETS
        )
        self.prompt_length = self._histogram(
            "prompt_length_tokens", "Tokens of one prompt.", _TOKEN_BUCKETS
        )
        self.step_time = self._histogram("step_seconds", "Duration of one step.", _STEP_BUCKETS)
        self.batched_tokens = self._histogram(
            "step_batched_tokens", "Tokens computed by one step.", _TOKEN_BUCKETS
        )

    def on_request_end(self, endpoint: str, outcome: Outcome) -> None:
        self._requests.labels(endpoint, outcome.value).inc()

    def on_choice_end(self, finish_reason: str) -> None:
        self._finished.labels(finish_reason).inc()

    def on_step(self, output: StepOutput) -> None:
        if output.num_batched_tokens:
            self.step_time.observe(output.step_s)
            self.batched_tokens.observe(output.num_batched_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvoy_engine_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            f"kvoy_engine_{name}", text, buckets=tuple(buckets), registry=self.registry
        )


def register_info(registry: CollectorRegistry, info: Mapping[str, str]) -> None:
    gauge = Gauge(
        "kvoy_engine_info", "Always 1; the labels say what it is.", list(info), registry=registry
    )
    gauge.labels(**info).set(1)


def engine_info(config: EngineConfig) -> dict[str, str]:
    """The labels that say what a process is."""
    return {
        "version": version("kvoy"),
        "runner": config.runner,
        "role": config.role,
        "rank": str(config.node_rank),
        "nnodes": str(config.nnodes),
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.pipeline_parallel_size),
    }


class EngineGauges:
    """A reading of everything that is a state rather than a count of the server's own."""

    __slots__ = ("bounds", "is_ready", "last_step_age_s", "load", "memory", "sizes")

    def __init__(
        self,
        load: Load,
        *,
        is_ready: bool,
        last_step_age_s: float,
        memory: dict[str, int],
        sizes: dict[str, int],
        bounds: dict[str, int],
    ) -> None:
        self.load = load
        self.is_ready = is_ready
        self.last_step_age_s = last_step_age_s
        self.memory = memory
        """Bytes by what holds them; `kv_block` is one block's."""
        self.sizes = sizes
        """Fill of each bounded collection, by its name."""
        self.bounds = bounds


class _GaugeCollector(Collector):
    def __init__(self, read: Callable[[], EngineGauges]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        gauges = self._read()
        load = gauges.load
        in_use = load.total_blocks - load.free_blocks - load.evictable_blocks
        usage = in_use / load.total_blocks if load.total_blocks else 0.0
        for name, text, value in (
            ("running_sequences", "Sequences in the batch.", load.running),
            ("waiting_sequences", "Sequences that wait to be scheduled.", load.waiting),
            (
                "queued_prefill_tokens",
                "Prompt tokens accepted but not computed yet, cached ones left out.",
                load.queued_prefill_tokens,
            ),
            ("running_tokens", "Context tokens of the running sequences.", load.running_tokens),
            ("kv_blocks", "KV blocks in all.", load.total_blocks),
            ("kv_blocks_free", "KV blocks that hold nothing.", load.free_blocks),
            (
                "kv_blocks_evictable",
                "KV blocks with cached work that nobody uses now.",
                load.evictable_blocks,
            ),
            ("kv_usage_ratio", "Share of KV blocks that sequences use, 0 to 1.", usage),
            (
                "prefill_tokens_per_second",
                "Measured prefill rate, smoothed.",
                load.prefill_tokens_per_s,
            ),
            (
                "decode_step_seconds",
                "Measured time of a step that only decodes, smoothed.",
                load.step_time_s,
            ),
            ("ready", "1 when requests may be sent here.", float(gauges.is_ready)),
            (
                "last_step_age_seconds",
                "Since the step loop last made progress while it had work.",
                gauges.last_step_age_s,
            ),
        ):
            yield GaugeMetricFamily(f"kvoy_engine_{name}", text, value=value)
        yield CounterMetricFamily(
            "kvoy_engine_preemptions", "Sequences put back to wait.", value=load.num_preemptions
        )
        yield CounterMetricFamily("kvoy_engine_steps", "Steps computed.", value=load.num_steps)
        for name, text, label_name, values in (
            ("memory_bytes", "Device memory by what holds it.", "kind", gauges.memory),
            ("collection_size", "Entries of a bounded collection.", "collection", gauges.sizes),
            ("collection_limit", "Bound of that collection.", "collection", gauges.bounds),
        ):
            family = GaugeMetricFamily(f"kvoy_engine_{name}", text, labels=[label_name])
            for label, value in values.items():
                family.add_metric([label], value)
            yield family
