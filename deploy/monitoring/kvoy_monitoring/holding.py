"""Rows of the fleet dashboard about what routers hold back and hold up: requests that wait, and
streams that go on behind a failing engine."""

from __future__ import annotations

from kvoy_monitoring.labels import NAMESPACE
from kvoy_monitoring.panel import Panel, Row, Unit
from kvoy_monitoring.query import Query, Selector, quantiles

REFUSED = 'outcome=~"queue_full|tenant_full|priority_full|displaced|waited_too_long"'
"""Requests that flow control turned away; what a key's own limits refuse is not among them."""


def rows(selector: Selector) -> tuple[Row, ...]:
    return (
        Row(
            "Waiting in the router",
            (
                Panel(
                    "Requests that wait",
                    "Requests that wait in the routers for room at an engine, by the side of "
                    "priority 0 on which they are.",
                    Unit.COUNT,
                    (
                        Query(
                            selector.total("kvoy_router_queued_requests", "priority"),
                            "{{priority}}",
                        ),
                    ),
                    is_stacked=True,
                ),
                Panel(
                    "Tokens that wait and that are under way",
                    "Of prompts and expected answers: waiting for room, and gone on to engines.",
                    Unit.COUNT,
                    (
                        Query(selector.total("kvoy_router_queued_tokens"), "waiting"),
                        Query(selector.total("kvoy_router_admitted_tokens"), "under way"),
                    ),
                ),
                Panel(
                    "Time that they waited",
                    "Of requests that could not go on at once, and did in the end.",
                    Unit.SECONDS,
                    quantiles(selector, "kvoy_router_queue_wait_seconds"),
                ),
                Panel(
                    "Turned away",
                    "Requests refused by flow control, per second, by model.",
                    Unit.PER_SECOND,
                    (
                        Query(
                            f"{selector.where(REFUSED).rate('kvoy_router_requests_total')} "
                            "or vector(0)",
                            "refused",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Going on behind a failing engine",
            (
                Panel(
                    "Streams whose engine failed",
                    "Per second: resumed by another engine, or why the stream ended with an error.",
                    Unit.PER_SECOND,
                    (Query(selector.rate("kvoy_router_resumes_total", "outcome"), "{{outcome}}"),),
                    is_stacked=True,
                ),
                Panel(
                    "Budget of further attempts",
                    "Retries and resumes that are allowed now, of the router that has fewest; and "
                    "those that were not allowed, per second.",
                    Unit.COUNT,
                    (
                        Query(
                            f"min by (kind) ({selector.of('kvoy_router_budget_attempts')})",
                            "{{kind}} allowed",
                        ),
                        Query(
                            selector.rate("kvoy_router_budget_refusals_total", "kind"),
                            "{{kind}} refused",
                        ),
                    ),
                ),
                Panel(
                    "Circuit breakers not closed",
                    "Engines that some router sends nothing, or one request to try.",
                    Unit.COUNT,
                    (
                        Query(
                            selector.where('state!="closed"').total(
                                "kvoy_router_engine_breaker", NAMESPACE, "state"
                            ),
                            "{{namespace}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Memory for resuming",
                    "What routers remember of their open streams, of its bound; the fullest "
                    "router.",
                    Unit.RATIO,
                    (
                        Query(
                            f"max({selector.of('kvoy_router_resume_bytes')} / "
                            f"{selector.of('kvoy_router_resume_bytes_limit')})",
                            "used",
                        ),
                    ),
                ),
            ),
        ),
    )
