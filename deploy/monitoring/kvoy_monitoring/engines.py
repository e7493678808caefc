"""Inside the engines: steps, batches, memory, and whether every bound is far enough."""

from __future__ import annotations

from kvoy_monitoring.labels import NAMESPACE, POD, SERVICE
from kvoy_monitoring.panel import Dashboard, Panel, Row, Unit, Variable
from kvoy_monitoring.query import Query, Selector, quantiles

SELECTOR = Selector((f'{NAMESPACE}=~"$namespace"', f'{SERVICE}=~"$service"', f'{POD}=~"$pod"'))
OF_ROUTERS = Selector((f'{NAMESPACE}=~"$namespace"',))


def _by_pod(title: str, description: str, unit: Unit, metric: str) -> Panel:
    return Panel(title, description, unit, (Query(SELECTOR.worst(metric, POD), "{{pod}}"),))


DASHBOARD = Dashboard(
    uid="kvoy-engines",
    title="Kvoy / Engines",
    description="Step times, batches, KV memory and bounds of single engines.",
    variables=(
        Variable("namespace", "Namespace", "kvoy_engine_ready", NAMESPACE),
        Variable("service", "Service", 'kvoy_engine_ready{namespace=~"$namespace"}', SERVICE),
        Variable(
            "pod",
            "Pod",
            'kvoy_engine_ready{namespace=~"$namespace", llmservice=~"$service"}',
            POD,
        ),
    ),
    rows=(
        Row(
            "Steps",
            (
                Panel(
                    "Step time",
                    "Duration of a step of the chosen engines.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_engine_step_seconds"),
                ),
                Panel(
                    "Tokens of a step",
                    "Tokens that one step computes: prompt chunks and one per decoding sequence.",
                    Unit.COUNT,
                    quantiles(SELECTOR, "kvoy_engine_step_batched_tokens"),
                ),
                _by_pod(
                    "Prefill rate",
                    "Measured prompt tokens per second, smoothed.",
                    Unit.TOKENS_PER_SECOND,
                    "kvoy_engine_prefill_tokens_per_second",
                ),
                _by_pod(
                    "Decode step",
                    "Measured time of a step that only decodes, smoothed.",
                    Unit.SECONDS,
                    "kvoy_engine_decode_step_seconds",
                ),
                Panel(
                    "Steps per second",
                    "0 while an engine has nothing to do.",
                    Unit.COUNT,
                    (Query(SELECTOR.rate("kvoy_engine_steps_total", POD), "{{pod}}"),),
                ),
                _by_pod(
                    "Time since the last step",
                    "While there is work; an engine that stands still here is stuck.",
                    Unit.SECONDS,
                    "kvoy_engine_last_step_age_seconds",
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "KV blocks",
                    "Blocks that hold nothing, and blocks with cached work that nobody uses now.",
                    Unit.COUNT,
                    (
                        Query(SELECTOR.total("kvoy_engine_kv_blocks_free", POD), "{{pod}} free"),
                        Query(
                            SELECTOR.total("kvoy_engine_kv_blocks_evictable", POD),
                            "{{pod}} evictable",
                        ),
                    ),
                ),
                _by_pod(
                    "KV cache in use",
                    "Share of KV blocks that sequences use.",
                    Unit.RATIO,
                    "kvoy_engine_kv_usage_ratio",
                ),
                Panel(
                    "Preemptions",
                    "Sequences put back to wait because memory ran out, per second.",
                    Unit.PER_SECOND,
                    (Query(SELECTOR.rate("kvoy_engine_preemptions_total", POD), "{{pod}}"),),
                ),
                Panel(
                    "Device memory",
                    "By what holds it.",
                    Unit.BYTES,
                    (
                        Query(
                            SELECTOR.total("kvoy_engine_memory_bytes", POD, "kind"),
                            "{{pod}} {{kind}}",
                        ),
                    ),
                ),
                Panel(
                    "Fill of bounded collections",
                    "Entries of each bounded collection against its bound.",
                    Unit.RATIO,
                    (
                        Query(
                            f"{SELECTOR.worst('kvoy_engine_collection_size', 'collection')} / "
                            f"{SELECTOR.worst('kvoy_engine_collection_limit', 'collection')}",
                            "{{collection}}",
                        ),
                    ),
                ),
                Panel(
                    "Prefix hit ratio",
                    "Share of prompt tokens that came from the prefix cache.",
                    Unit.RATIO,
                    (
                        Query(
                            SELECTOR.share(
                                "kvoy_engine_cached_tokens_total",
                                "kvoy_engine_prompt_tokens_total",
                                POD,
                            ),
                            "{{pod}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "As routers see them",
            (
                Panel(
                    "Knowledge",
                    "Engines by how far routers know them: exact, syncing, new, lost.",
                    Unit.COUNT,
                    (
                        Query(
                            OF_ROUTERS.total("kvoy_router_engine_state", POD, "state"),
                            "{{pod}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Age of the last report",
                    "Engines report at least each second; the oldest one that a router holds.",
                    Unit.SECONDS,
                    (
                        Query(
                            OF_ROUTERS.worst("kvoy_router_engine_telemetry_age_seconds", POD),
                            "{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    "Prefix index",
                    "Memory of a router's index of what engines hold.",
                    Unit.BYTES,
                    (Query(OF_ROUTERS.worst("kvoy_router_index_bytes", POD), "{{pod}}"),),
                ),
            ),
        ),
    ),
)
