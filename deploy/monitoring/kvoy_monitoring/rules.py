"""Recording rules and alerts: what should be looked at, how soon, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvoy_monitoring.holding import REFUSED
from kvoy_monitoring.labels import NAMESPACE, POD, POOL, SERVICE
from kvoy_monitoring.query import Selector, cached_surprises

WINDOW = "5m"
ALL = Selector(window=WINDOW)
FAILED = Selector(('status=~"5.."',), WINDOW)
NOT_RESUMED = Selector(('outcome!="resumed"',), WINDOW)
TURNED_AWAY = Selector((REFUSED,), WINDOW)
SLOW = Selector(window="30m")
TTFT_RATIO = SLOW.quantile(
    0.5, "kvoy_router_time_to_first_token_prediction_ratio", NAMESPACE, "model"
)
FILES = {
    "configuration": "kvoy_router_config_ok",
    "fleet": "kvoy_router_fleet_file_ok",
    "keys": "kvoy_router_keys_file_ok",
    "certificate": "kvoy_router_certificate_ok",
}
"""That a router follows, and the gauges that say whether they are good."""
BAD_FILES = " or ".join(
    f'label_replace({gauge} == 0, "file", "{file}", "", "")' for file, gauge in FILES.items()
)


@dataclass(frozen=True, slots=True)
class Recording:
    record: str
    expr: str

    def to_dict(self) -> dict[str, Any]:
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    after: str
    """How long it must hold: Prometheus' `for`."""
    severity: str
    """`critical`: requests fail now; `warning`: they will, or something is broken."""
    summary: str
    action: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.after,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.action},
        }


RECORDINGS = (
    Recording(
        "kvoy:time_to_first_token_seconds:p95",
        Selector(('stream="true"',), WINDOW).quantile(
            0.95, "kvoy_router_time_to_first_token_seconds", NAMESPACE, "model"
        ),
    ),
    Recording(
        "kvoy:inter_token_seconds:p95",
        ALL.quantile(0.95, "kvoy_engine_inter_token_seconds", NAMESPACE, SERVICE, POOL),
    ),
    Recording(
        "kvoy:error_ratio",
        # A model without a failure has no such series: its ratio is 0, not missing.
        f"({FAILED.rate('kvoy_router_requests_total', NAMESPACE, 'model')} "
        f"or 0 * {ALL.rate('kvoy_router_requests_total', NAMESPACE, 'model')}) "
        f"/ ({ALL.rate('kvoy_router_requests_total', NAMESPACE, 'model')} > 0)",
    ),
    Recording(
        "kvoy:generated_tokens_per_second",
        ALL.rate("kvoy_engine_generated_tokens_total", NAMESPACE, SERVICE, POOL),
    ),
    Recording(
        "kvoy:prefix_hit_ratio",
        ALL.share(
            "kvoy_engine_cached_tokens_total",
            "kvoy_engine_prompt_tokens_total",
            NAMESPACE,
            SERVICE,
            POOL,
        ),
    ),
)

ALERTS = (
    Alert(
        "KvoyErrorRatioHigh",
        "kvoy:error_ratio > 0.05",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests for {{ $labels.model }} fail",
        "Look at the fleet dashboard's engine failures by reason, and at the service's conditions: "
        "kubectl describe llm -n {{ $labels.namespace }}.",
    ),
    Alert(
        "KvoyRouterHasNoEngine",
        f"max by ({NAMESPACE}, {POD}) (kvoy_router_requests_in_flight * 0) "
        f'unless max by ({NAMESPACE}, {POD}) (kvoy_router_engine_state{{state="exact"}}) > 0',
        "2m",
        "critical",
        "Router {{ $labels.pod }} knows no engine that it could use",
        "No engine is up, or their telemetry cannot be reached: look at the engines' pods and the "
        "network policies of namespace {{ $labels.namespace }}.",
    ),
    Alert(
        "KvoyRouterFileRefused",
        f"count by ({NAMESPACE}, {POD}, file) ({BAD_FILES})",
        "2m",
        "warning",
        "Router {{ $labels.pod }} refuses a change of its {{ $labels.file }} file",
        "What it read before goes on to hold. Its log names the key and what is wrong with it: "
        "kubectl logs -n {{ $labels.namespace }} {{ $labels.pod }}.",
    ),
    Alert(
        "KvoyStreamsNotResumed",
        f"{NOT_RESUMED.rate('kvoy_router_resumes_total', NAMESPACE, 'model')} > "
        f"0.1 * {ALL.rate('kvoy_router_resumes_total', NAMESPACE, 'model')}",
        "5m",
        "critical",
        "Streams of {{ $labels.model }} end with errors when their engine fails",
        "The outcome label of kvoy_router_resumes_total says why; each is explained in "
        "docs/troubleshooting.md.",
    ),
    Alert(
        "KvoyEngineAvoided",
        f'max by ({NAMESPACE}, engine) (kvoy_router_engine_breaker{{state="closed"}}) == 0',
        "5m",
        "warning",
        "No router trusts engine {{ $labels.engine }}: it fails one request after another",
        "Its log and kvoy_router_engine_failures_total say how. It gets single requests until one "
        "is answered.",
    ),
    Alert(
        "KvoyAttemptBudgetSpent",
        f"sum by ({NAMESPACE}, {POD}, kind) "
        f"(increase(kvoy_router_budget_refusals_total[{WINDOW}])) > 0",
        "1m",
        "critical",
        "Router {{ $labels.pod }} has no budget left for a {{ $labels.kind }}",
        "More engines fail than retries and resumes may make up for: look at the fleet "
        "dashboard's engine failures by reason.",
    ),
    Alert(
        "KvoyResumeMemoryFull",
        f"max by ({NAMESPACE}, {POD}) (kvoy_router_resume_bytes / "
        "kvoy_router_resume_bytes_limit) > 0.9",
        "5m",
        "warning",
        "Router {{ $labels.pod }} uses {{ $value | humanizePercentage }} of its memory for "
        "resuming streams",
        "Beyond it further streams cannot go on behind a failing engine: raise "
        "--max-resume-memory-mib or add routers.",
    ),
    Alert(
        "KvoyRequestsTurnedAway",
        f"{TURNED_AWAY.rate('kvoy_router_requests_total', NAMESPACE, 'model')} > "
        f"0.05 * {ALL.rate('kvoy_router_requests_total', NAMESPACE, 'model')}",
        "5m",
        "warning",
        "More than 5 % of the requests for {{ $labels.model }} are refused for lack of room",
        "Scale its service, or lower what its tenants may send; kvoy_router_queued_requests shows "
        "what waits.",
    ),
    Alert(
        "KvoyTelemetryLost",
        f'max by ({NAMESPACE}, {POD}, engine) (kvoy_router_engine_state{{state="lost"}}) > 0',
        "2m",
        "warning",
        "Router {{ $labels.pod }} has lost the telemetry of {{ $labels.engine }}",
        "The engine gets requests only while others are unknown too. Look at its pod and its logs.",
    ),
    Alert(
        "KvoyCachePredictionsDrift",
        f"{cached_surprises(SLOW, NAMESPACE, 'model')} > 0.2",
        "15m",
        "warning",
        "Of {{ $value | humanizePercentage }} of the requests for {{ $labels.model }} the engine "
        "held much more or less than its router expected",
        "Routing by prefix works on wrong knowledge: look for lost telemetry, for engines of "
        "another revision, and for a router's index at its bound (kvoy_router_index_entries).",
    ),
    Alert(
        "KvoyFirstTokenPredictionsDrift",
        f"({TTFT_RATIO}) > 3 or ({TTFT_RATIO}) < 0.33",
        "15m",
        "warning",
        "First tokens of {{ $labels.model }} take {{ $value | humanize }} times as long as its "
        "router expects",
        "Routing by load works on wrong knowledge: compare the engines' measured prefill rate and "
        "step time at /debug/engines with the engines dashboard.",
    ),
    Alert(
        "KvoyQueueGrows",
        f"sum by ({NAMESPACE}, {SERVICE}) (kvoy_engine_waiting_sequences) > 2 * "
        f"sum by ({NAMESPACE}, {SERVICE}) (kvoy_engine_running_sequences) + 8",
        "5m",
        "warning",
        "More requests wait at {{ $labels.llmservice }} than twice what runs",
        "Scale it: kubectl scale llm/{{ $labels.llmservice }} -n {{ $labels.namespace }} "
        "--replicas=N.",
    ),
    Alert(
        "KvoyKvCacheFull",
        f"max by ({NAMESPACE}, {SERVICE}, {POD}) (kvoy_engine_kv_usage_ratio) > 0.95",
        "10m",
        "warning",
        "The KV cache of {{ $labels.pod }} is {{ $value | humanizePercentage }} in use",
        "Sequences are about to be preempted. Add replicas or memory, or lower engine.maxModelLen.",
    ),
    Alert(
        "KvoyEngineStuck",
        f"max by ({NAMESPACE}, {SERVICE}, {POD}) (kvoy_engine_last_step_age_seconds) > 60",
        "1m",
        "critical",
        "{{ $labels.pod }} has work and has made no step for {{ $value | humanizeDuration }}",
        "Its liveness probe should have restarted it; look at its logs and its device.",
    ),
    Alert(
        "KvoyEngineNotReady",
        f"max by ({NAMESPACE}, {SERVICE}, {POD}) (kvoy_engine_ready) == 0",
        "30m",
        "warning",
        "{{ $labels.pod }} is up and has not been ready for half an hour",
        "It may still load a large model; otherwise look at its logs.",
    ),
    Alert(
        "KvoyNumbersCorrupted",
        f"sum by ({NAMESPACE}, {SERVICE}, {POD}) "
        "(increase(kvoy_engine_corrupted_requests_total[15m])) > 0",
        "0s",
        "critical",
        "{{ $labels.pod }} computed numbers that are not finite",
        "A broken device or broken weights: drain the engine and look at its node.",
    ),
    Alert(
        "KvoyPrefixPredictionDrifts",
        # Routing by prefix is only as good as what routers believe that engines hold.
        f"({Selector(window='30m').rate('kvoy_router_predicted_cached_tokens_total', NAMESPACE)} - "
        f"{Selector(window='30m').rate('kvoy_router_cached_tokens_total', NAMESPACE)}) / "
        f"({Selector(window='30m').rate('kvoy_router_predicted_cached_tokens_total', NAMESPACE)} "
        "> 100) > 0.3",
        "15m",
        "warning",
        "Engines hold {{ $value | humanizePercentage }} less than routers expect",
        "Caches are too small for the traffic, or telemetry is late: compare the engines' "
        "evictable blocks and the routers' report ages.",
    ),
    Alert(
        "KvoyOperatorHasNoLeader",
        "sum(kvoy_operator_leader) == 0",
        "2m",
        "warning",
        "No operator leads: changes of services wait",
        "What runs goes on serving. Look at the operator's pods and at the Lease in its namespace.",
    ),
    Alert(
        "KvoyReconcilesFail",
        'sum by (kind) (rate(kvoy_operator_reconcile_total{result!="ok"}[15m])) > '
        "0.5 * sum by (kind) (rate(kvoy_operator_reconcile_total[15m]))",
        "15m",
        "warning",
        "More than half of the reconciles of {{ $labels.kind }} fail",
        "The operator's log names the resource and the error; its rights may be incomplete.",
    ),
    Alert(
        "KvoyOperatorQueueIsLate",
        "max(kvoy_operator_queue_oldest_age_seconds) > 120",
        "10m",
        "warning",
        "A resource has waited {{ $value | humanizeDuration }} to be reconciled",
        "The operator does not keep up: look at its CPU limit and at the API server's answers.",
    ),
    Alert(
        "KvoyWatchIsStale",
        "max by (kind) (kvoy_operator_last_event_age_seconds) > 900",
        "5m",
        "warning",
        "The operator has heard nothing about {{ $labels.kind }} for "
        "{{ $value | humanizeDuration }}",
        "Its liveness probe should have restarted it; look at the way to the API server.",
    ),
    Alert(
        "KvoyPoolIncomplete",
        f"max by ({NAMESPACE}, service, {POOL}) (kvoy_operator_pool_replicas_ready) < "
        f"max by ({NAMESPACE}, service, {POOL}) (kvoy_operator_pool_replicas_desired)",
        "15m",
        "warning",
        "{{ $labels.pool }} pool of {{ $labels.namespace }}/{{ $labels.service }} lacks replicas",
        "kubectl describe llm {{ $labels.service }} -n {{ $labels.namespace }} says why.",
    ),
)
