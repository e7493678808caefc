"""The whole installation on one page: what users get, and whether the fleet can give it."""

from __future__ import annotations

from kvoy_monitoring import holding
from kvoy_monitoring.labels import NAMESPACE, SERVICE
from kvoy_monitoring.panel import Dashboard, Panel, Row, Unit, Variable
from kvoy_monitoring.query import Query, Selector, cached_surprises, quantiles

SELECTOR = Selector((f'{NAMESPACE}=~"$namespace"',))
FAILED = Selector((*SELECTOR.matchers, 'status=~"5..|429"'))

DASHBOARD = Dashboard(
    uid="kvoy-fleet",
    title="Kvoy / Fleet",
    description="Requests, latency, throughput, memory and routing of all services.",
    variables=(Variable("namespace", "Namespace", "kvoy_router_requests_in_flight", NAMESPACE),),
    rows=(
        Row(
            "Now",
            (
                Panel(
                    "Requests",
                    "Requests to the generating endpoints that ended, per second.",
                    Unit.PER_SECOND,
                    (Query(SELECTOR.rate("kvoy_router_requests_total")),),
                    is_stat=True,
                    width=4,
                ),
                Panel(
                    "Errors",
                    "Share of requests answered with 429 or a 5xx status.",
                    Unit.RATIO,
                    (
                        Query(
                            f"({FAILED.rate('kvoy_router_requests_total')} or vector(0)) / "
                            f"({SELECTOR.rate('kvoy_router_requests_total')} > 0)"
                        ),
                    ),
                    is_stat=True,
                    width=4,
                ),
                Panel(
                    "First token, p95",
                    "From a streamed request to the first byte of its answer.",
                    Unit.SECONDS,
                    (
                        Query(
                            SELECTOR.where('stream="true"').quantile(
                                0.95, "kvoy_router_time_to_first_token_seconds"
                            )
                        ),
                    ),
                    is_stat=True,
                    width=4,
                ),
                Panel(
                    "Generated tokens",
                    "Tokens per second of all engines.",
                    Unit.TOKENS_PER_SECOND,
                    (Query(SELECTOR.rate("kvoy_engine_generated_tokens_total")),),
                    is_stat=True,
                    width=4,
                ),
                Panel(
                    "Prefix hits",
                    "Share of prompt tokens that engines held already.",
                    Unit.RATIO,
                    (
                        Query(
                            SELECTOR.share(
                                "kvoy_engine_cached_tokens_total", "kvoy_engine_prompt_tokens_total"
                            )
                        ),
                    ),
                    is_stat=True,
                    width=4,
                ),
                Panel(
                    "Engines ready",
                    "Engines that requests may be sent to.",
                    Unit.COUNT,
                    (Query(SELECTOR.total("kvoy_engine_ready")),),
                    is_stat=True,
                    width=4,
                ),
            ),
        ),
        Row(
            "What users get",
            (
                Panel(
                    "Requests by status",
                    "Requests that ended, per second, by the status of their answer.",
                    Unit.PER_SECOND,
                    (Query(SELECTOR.rate("kvoy_router_requests_total", "status"), "{{status}}"),),
                    is_stacked=True,
                ),
                Panel(
                    "Time to first token",
                    "Streamed requests, from arrival at the router to the first byte.",
                    Unit.SECONDS,
                    quantiles(
                        SELECTOR.where('stream="true"'), "kvoy_router_time_to_first_token_seconds"
                    ),
                ),
                Panel(
                    "Time per output token",
                    "Between two tokens of a choice, as engines measure it.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_engine_inter_token_seconds"),
                ),
                Panel(
                    "Request duration",
                    "From a request to the end of its answer.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_router_request_duration_seconds"),
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens taken in and tokens generated, per second.",
                    Unit.TOKENS_PER_SECOND,
                    (
                        Query(SELECTOR.rate("kvoy_engine_prompt_tokens_total"), "prompt"),
                        Query(SELECTOR.rate("kvoy_engine_generated_tokens_total"), "generated"),
                    ),
                ),
                Panel(
                    "Requests in flight",
                    "Requests that have no complete answer yet, by service.",
                    Unit.COUNT,
                    (
                        Query(
                            SELECTOR.total("kvoy_router_requests_in_flight", NAMESPACE, SERVICE),
                            "{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Room",
            (
                Panel(
                    "Sequences",
                    "In the engines' batches, and waiting for a place in them.",
                    Unit.COUNT,
                    (
                        Query(SELECTOR.total("kvoy_engine_running_sequences"), "running"),
                        Query(SELECTOR.total("kvoy_engine_waiting_sequences"), "waiting"),
                    ),
                ),
                Panel(
                    "KV cache in use",
                    "Mean share of KV blocks that sequences use; cached work that nobody uses is "
                    "not counted.",
                    Unit.RATIO,
                    (
                        Query(
                            SELECTOR.mean("kvoy_engine_kv_usage_ratio", NAMESPACE, SERVICE),
                            "{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
                Panel(
                    "Queued prompt tokens",
                    "Prompt tokens accepted but not computed yet, cached ones left out.",
                    Unit.COUNT,
                    (
                        Query(
                            SELECTOR.total("kvoy_engine_queued_prefill_tokens", NAMESPACE, SERVICE),
                            "{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Routing",
            (
                Panel(
                    "Decisions",
                    "Picks of an engine per second: prefix (it holds the longest), load (another "
                    "holds a longer one), cold (nobody holds any).",
                    Unit.PER_SECOND,
                    (Query(SELECTOR.rate("kvoy_router_decisions_total", "reason"), "{{reason}}"),),
                    is_stacked=True,
                ),
                Panel(
                    "Prefix hit ratio",
                    "Share of prompt tokens that the router expected at the chosen engine, and "
                    "that the engine says it held.",
                    Unit.RATIO,
                    (
                        Query(
                            SELECTOR.share(
                                "kvoy_router_predicted_cached_tokens_total",
                                "kvoy_router_prompt_tokens_total",
                            ),
                            "expected",
                        ),
                        Query(
                            SELECTOR.share(
                                "kvoy_router_cached_tokens_total", "kvoy_router_prompt_tokens_total"
                            ),
                            "held",
                        ),
                    ),
                ),
                Panel(
                    "Prefill saved",
                    "Prompt tokens per second that did not have to be computed because of where "
                    "requests went, against each one going to the engine next in turn; and "
                    "those computed in addition.",
                    Unit.TOKENS_PER_SECOND,
                    (
                        Query(SELECTOR.rate("kvoy_router_prefill_tokens_saved_total"), "saved"),
                        Query(SELECTOR.rate("kvoy_router_prefill_tokens_added_total"), "added"),
                    ),
                ),
                Panel(
                    "Wrong about caches",
                    "Share of requests of whose prompt the engine held a fifth more or less than "
                    "the router expected.",
                    Unit.RATIO,
                    (
                        Query(
                            cached_surprises(SELECTOR, NAMESPACE, "model"),
                            "{{namespace}}/{{model}}",
                        ),
                    ),
                ),
                Panel(
                    "First token against its prediction",
                    "Observed time from the decision to the first token by the predicted one, 50 "
                    "ms added to both. At 1 predictions are right.",
                    Unit.COUNT,
                    quantiles(
                        SELECTOR,
                        "kvoy_router_time_to_first_token_prediction_ratio",
                        of=(0.1, 0.5, 0.9),
                    ),
                ),
                Panel(
                    "Engine failures and retries",
                    "Attempts that an engine failed, by what went wrong, and further engines "
                    "tried before the client had seen a byte.",
                    Unit.PER_SECOND,
                    (
                        Query(
                            SELECTOR.rate("kvoy_router_engine_failures_total", "reason"),
                            "{{reason}}",
                        ),
                        Query(SELECTOR.rate("kvoy_router_retries_total"), "retries"),
                    ),
                ),
            ),
        ),
        *holding.rows(SELECTOR),
    ),
)
