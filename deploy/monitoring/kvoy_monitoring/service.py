"""One service: its endpoint's quality, its pools, its engines side by side."""

from __future__ import annotations

from kvoy_monitoring.labels import NAMESPACE, POD, POOL, SERVICE
from kvoy_monitoring.panel import Dashboard, Panel, Row, Unit, Variable
from kvoy_monitoring.query import Query, Selector, quantiles

SELECTOR = Selector((f'{NAMESPACE}=~"$namespace"', f'{SERVICE}=~"$service"'))
OF_OPERATOR = Selector((f'{NAMESPACE}=~"$namespace"', 'service=~"$service"'))
"""The operator's series name the service themselves; its monitor honours their labels."""

DASHBOARD = Dashboard(
    uid="kvoy-service",
    title="Kvoy / Service",
    description="One LLMService: what its users get, its pools and its engines.",
    variables=(
        Variable("namespace", "Namespace", "kvoy_engine_ready", NAMESPACE),
        Variable("service", "Service", 'kvoy_engine_ready{namespace=~"$namespace"}', SERVICE),
    ),
    rows=(
        Row(
            "Quality",
            (
                Panel(
                    "Time to first token",
                    "As engines measure it, queue and prefill included.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_engine_time_to_first_token_seconds"),
                ),
                Panel(
                    "Time per output token",
                    "Between two tokens of a choice.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_engine_inter_token_seconds"),
                ),
                Panel(
                    "Time in the queue",
                    "From arrival at an engine to being scheduled first.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_engine_queue_time_seconds"),
                ),
                Panel(
                    "Requests by outcome",
                    "Requests that ended, per second, as engines count them.",
                    Unit.PER_SECOND,
                    (Query(SELECTOR.rate("kvoy_engine_requests_total", "outcome"), "{{outcome}}"),),
                    is_stacked=True,
                ),
                Panel(
                    "Answers by the reason of their end",
                    "Completed choices per second.",
                    Unit.PER_SECOND,
                    (
                        Query(
                            SELECTOR.rate("kvoy_engine_choices_total", "finish_reason"),
                            "{{finish_reason}}",
                        ),
                    ),
                    is_stacked=True,
                ),
                Panel(
                    "Prompt length",
                    "Tokens of a prompt.",
                    Unit.COUNT,
                    quantiles(SELECTOR, "kvoy_engine_prompt_length_tokens"),
                ),
            ),
        ),
        Row(
            "Pools",
            (
                Panel(
                    "Engines",
                    "Engines that the service wants, and those ready, by pool.",
                    Unit.COUNT,
                    (
                        Query(
                            OF_OPERATOR.total("kvoy_operator_pool_replicas_desired", POOL),
                            "{{pool}} wanted",
                        ),
                        Query(
                            OF_OPERATOR.total("kvoy_operator_pool_replicas_ready", POOL),
                            "{{pool}} ready",
                        ),
                    ),
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens taken in and tokens generated, per second, by pool.",
                    Unit.TOKENS_PER_SECOND,
                    (
                        Query(
                            SELECTOR.rate("kvoy_engine_prompt_tokens_total", POOL),
                            "{{pool}} prompt",
                        ),
                        Query(
                            SELECTOR.rate("kvoy_engine_generated_tokens_total", POOL),
                            "{{pool}} generated",
                        ),
                    ),
                ),
                Panel(
                    "Prefix hit ratio",
                    "Share of prompt tokens that came from the prefix cache, by pool.",
                    Unit.RATIO,
                    (
                        Query(
                            SELECTOR.share(
                                "kvoy_engine_cached_tokens_total",
                                "kvoy_engine_prompt_tokens_total",
                                POOL,
                            ),
                            "{{pool}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Engines side by side",
            (
                Panel(
                    "Running sequences",
                    "Spread over the engines shows how even the load is.",
                    Unit.COUNT,
                    (Query(SELECTOR.total("kvoy_engine_running_sequences", POD), "{{pod}}"),),
                ),
                Panel(
                    "Waiting sequences",
                    "Sequences that wait to be scheduled.",
                    Unit.COUNT,
                    (Query(SELECTOR.total("kvoy_engine_waiting_sequences", POD), "{{pod}}"),),
                ),
                Panel(
                    "KV cache in use",
                    "Share of KV blocks that sequences use.",
                    Unit.RATIO,
                    (Query(SELECTOR.worst("kvoy_engine_kv_usage_ratio", POD), "{{pod}}"),),
                ),
            ),
        ),
    ),
)
