"""An LLMRouter's children: one router over several services of its namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvoy_contract.fleet import DEFAULT_WEIGHT, Fleet
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests.router import RouterPlan, render_router
from kvoy_operator.manifests.service import fleet_service
from kvoy_operator.observed import Body
from kvoy_operator.options import RenderOptions
from kvoy_operator.resources import LLMRouter, LLMService


def is_behind(router: LLMRouter, service: Body) -> bool:
    """Whether the router serves this service of its namespace; nothing else of it is read."""
    selector = router.spec.selector
    ref = ((service.get("spec") or {}).get("router") or {}).get("ref")
    return (
        ref == router.name
        or selector is None
        or selector.matches(service["metadata"].get("labels") or {})
    )


def render_shared_router(
    router: LLMRouter, services: Iterable[LLMService], options: RenderOptions
) -> list[Manifest]:
    """All children; `services` are those behind the router, in any order.

    Raises InvalidSpec when its `podTemplate` is no patch of a pod.
    """
    weights = {entry.service: entry.weight for entry in router.spec.weights}
    members = sorted(services, key=lambda service: service.name)
    fleet = Fleet(
        services=tuple(
            fleet_service(service, options, weights.get(service.name, DEFAULT_WEIGHT))
            for service in members
        )
    )
    plan = RouterPlan(
        owner=router,
        settings=router.spec,
        field="spec",
        fleet=fleet,
        pull_secrets=options.image_pull_secrets,
    )
    return render_router(plan, options)
