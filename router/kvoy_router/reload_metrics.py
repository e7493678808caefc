"""Series about the configuration file: how often a change of it was taken or refused."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

_OUTCOMES = ("applied", "refused")


class ReloadMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counts: Counter | None = None
        self._good_s: Gauge | None = None

    def begin(self, now_unix_s: float) -> None:
        """The router follows a file, which was good at its start."""
        self._counts = Counter(
            "kvoy_router_config_reloads",
            "Changes of the configuration file; outcome: applied, or refused (nothing has changed)",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in _OUTCOMES:
            self._counts.labels(outcome)
        self._good_s = Gauge(
            "kvoy_router_config_last_reload_success_timestamp_seconds",
            "When the configuration that holds now was read, in Unix time",
            registry=self._registry,
        )
        self._good_s.set(now_unix_s)

    def on_reload(self, is_good: bool, now_unix_s: float) -> None:
        assert self._counts is not None
        assert self._good_s is not None
        self._counts.labels(_OUTCOMES[not is_good]).inc()
        if is_good:
            self._good_s.set(now_unix_s)
