"""Whether the operator does its work: reconciles, its queue, its watches, and who leads."""

from __future__ import annotations

from kvoy_monitoring.labels import NAMESPACE, POD, POOL
from kvoy_monitoring.panel import Dashboard, Panel, Row, Unit, Variable
from kvoy_monitoring.query import Query, Selector, quantiles

SELECTOR = Selector((f'{POD}=~"$pod"',))

DASHBOARD = Dashboard(
    uid="kvoy-operator",
    title="Kvoy / Operator",
    description="Reconciles, queue, watches, API calls and what the pools still lack.",
    variables=(Variable("pod", "Operator", "kvoy_operator_leader", POD),),
    rows=(
        Row(
            "Work",
            (
                Panel(
                    "Leader",
                    "1 on the operator that acts, 0 on those that wait.",
                    Unit.COUNT,
                    (Query(SELECTOR.worst("kvoy_operator_leader", POD), "{{pod}}"),),
                    width=6,
                ),
                Panel(
                    "Reconciles",
                    "Per second, by kind and result: ok, retry (something refused), defect.",
                    Unit.PER_SECOND,
                    (
                        Query(
                            SELECTOR.rate("kvoy_operator_reconcile_total", "kind", "result"),
                            "{{kind}} {{result}}",
                        ),
                    ),
                    is_stacked=True,
                    width=6,
                ),
                Panel(
                    "Reconcile time",
                    "From taking a resource out of the queue to having written its status.",
                    Unit.SECONDS,
                    quantiles(SELECTOR, "kvoy_operator_reconcile_seconds"),
                    width=6,
                ),
                Panel(
                    "Queue",
                    "Resources that are due and wait for a worker.",
                    Unit.COUNT,
                    (Query(SELECTOR.worst("kvoy_operator_queue_depth", POD), "{{pod}}"),),
                    width=6,
                ),
            ),
        ),
        Row(
            "Hearing and speaking",
            (
                Panel(
                    "Oldest in the queue",
                    "How long the resource that waits longest has waited.",
                    Unit.SECONDS,
                    (
                        Query(
                            SELECTOR.worst("kvoy_operator_queue_oldest_age_seconds", POD), "{{pod}}"
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    "Age of the last event",
                    "Since the last event or answer of a watch, by kind of object.",
                    Unit.SECONDS,
                    (
                        Query(
                            SELECTOR.worst("kvoy_operator_last_event_age_seconds", "kind"),
                            "{{kind}}",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    "Writes",
                    "Calls that change an object, per second; none while nothing happens.",
                    Unit.PER_SECOND,
                    (
                        Query(
                            SELECTOR.rate("kvoy_operator_api_writes_total", "verb", "resource"),
                            "{{verb}} {{resource}}",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    "Refused calls",
                    "Calls that the API server refused, by status; 0: it did not answer.",
                    Unit.PER_SECOND,
                    (
                        Query(
                            SELECTOR.rate("kvoy_operator_api_errors_total", "verb", "code"),
                            "{{verb}} {{code}}",
                        ),
                    ),
                    width=6,
                ),
            ),
        ),
        Row(
            "Pools",
            (
                Panel(
                    "Missing replicas",
                    "What pools should have and do not have ready.",
                    Unit.COUNT,
                    (
                        Query(
                            f"sum by ({NAMESPACE}, service, {POOL}) "
                            "(kvoy_operator_pool_replicas_desired) - "
                            f"sum by ({NAMESPACE}, service, {POOL}) "
                            "(kvoy_operator_pool_replicas_ready)",
                            "{{namespace}}/{{service}} {{pool}}",
                        ),
                    ),
                    width=24,
                ),
            ),
        ),
    ),
)
