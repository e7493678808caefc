"""Series about requests that went past a failing engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoy_router.breaker import Breakers, BreakerState
from kvoy_router.pool import Pool
from kvoy_router.resume_memory import ResumeMemory
from kvoy_router.retry_budget import RetryBudget


class FailoverMetrics:
    """Counts what the proxy tells; `observe` adds what the breakers and budgets hold."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._resumes = Counter(
            "kvoy_router_resumes",
            "Streams whose engine failed; outcome: resumed (another engine went on), else why the "
            "stream ended with an error event",
            ["model", "outcome"],
            registry=registry,
        )
        self._labels: set[tuple[str, str]] = set()
        self._hedges = Counter(
            "kvoy_router_hedges",
            "Streams that were asked of a second engine because the first was late; first: that "
            "one began the answer all the same, second: the other did",
            ["model", "answered"],
            registry=registry,
        )
        self._hedge_labels: set[tuple[str, str]] = set()

    def on_resume(self, model: str, outcome: str) -> None:
        self._labels.add((model, outcome))
        self._resumes.labels(model, outcome).inc()

    def on_hedge(self, model: str, answered: str) -> None:
        self._hedge_labels.add((model, answered))
        self._hedges.labels(model, answered).inc()

    def forget_model(self, model: str) -> None:
        for labels in [labels for labels in self._hedge_labels if labels[0] == model]:
            self._hedge_labels.discard(labels)
            self._hedges.remove(*labels)
        for labels in [labels for labels in self._labels if labels[0] == model]:
            self._labels.discard(labels)
            self._resumes.remove(*labels)

    def observe(
        self,
        pool: Pool,
        breakers: Breakers,
        budgets: tuple[RetryBudget, RetryBudget],
        memory: ResumeMemory,
        now_s: Callable[[], float],
    ) -> None:
        """`budgets`: for retries, and for resumes."""
        self._registry.register(_Observed(pool, breakers, budgets, memory, now_s))


class _Observed(Collector):
    def __init__(
        self,
        pool: Pool,
        breakers: Breakers,
        budgets: tuple[RetryBudget, RetryBudget],
        memory: ResumeMemory,
        now_s: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._breakers = breakers
        self._budgets = budgets
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        now_s = self._now_s()
        states = GaugeMetricFamily(
            "kvoy_router_engine_breaker",
            "1 for the state of the engine's circuit breaker",
            labels=["engine", "service", "state"],
        )
        for endpoint in self._pool.endpoints:
            state = self._breakers.state(endpoint, now_s)
            for each in BreakerState:
                labels = [endpoint.name, endpoint.origin.service, each.value]
                states.add_metric(labels, float(state is each))
        yield states
        left = GaugeMetricFamily(
            "kvoy_router_budget_attempts",
            "Further attempts that the budget for them allows now",
            labels=["kind"],
        )
        refused = CounterMetricFamily(
            "kvoy_router_budget_refusals",
            "Further attempts that the budget for them did not allow",
            labels=["kind"],
        )
        for kind, budget in zip(("retry", "resume"), self._budgets, strict=True):
            left.add_metric([kind], budget.tokens)
            refused.add_metric([kind], budget.num_refused)
        yield left
        yield refused
        memory = self._memory
        yield GaugeMetricFamily(
            "kvoy_router_resume_bytes",
            "Memory for the token ids of open streams, so that other engines can go on with them",
            memory.used_bytes,
        )
        yield GaugeMetricFamily(
            "kvoy_router_resume_bytes_limit", "The bound of that memory", memory.max_bytes
        )
        yield CounterMetricFamily(
            "kvoy_router_resume_memory_refusals",
            "Streams that cannot be resumed because that memory was full",
            memory.num_refused,
        )
