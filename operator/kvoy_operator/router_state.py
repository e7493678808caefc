"""Whether a router is up: a service's own, from its Deployment and pods, or a shared one, from what
its LLMRouter says of itself. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvoy_contract.names import ROUTER_COMPONENT
from kvoy_operator.acceptance import Refusal
from kvoy_operator.conditions import READY, RouterState
from kvoy_operator.failures import first_failure
from kvoy_operator.identity import router_name
from kvoy_operator.observed import Body, ChildKey, Observed
from kvoy_operator.views import workload_view


def own_router(owner: str, observed: Observed, refusal: Refusal | None = None) -> RouterState:
    """The router whose children are in `observed`; `owner` is the service's or LLMRouter's name.
    `refusal` is why it may not have been made."""
    deployment = observed.children.get(ChildKey("Deployment", router_name(owner)))
    wanted, num_ready = router_counts(deployment)
    shown = f"{num_ready} of {wanted} router pods ready."
    pods = [pod for pod in observed.pods if pod.component == ROUTER_COMPONENT]
    workloads = [workload_view("Deployment", deployment)] if deployment else []
    is_full = 0 < wanted <= num_ready and _is_rolled_out(deployment)
    failure = None if is_full else first_failure(pods, workloads)
    if failure is not None:
        shown += f" {failure.message}"
    if num_ready:
        return RouterState(True, "RouterAvailable", shown)
    if failure is not None:
        return RouterState(False, failure.reason, shown)
    if deployment is None and refusal is not None:
        return RouterState(False, refusal.reason, refusal.message)
    return RouterState(False, "RouterStarting", shown)


def shared_router(name: str, router: Body | None) -> RouterState:
    """The LLMRouter that a service refers to; None: there is none."""
    if router is None:
        return RouterState(False, "RouterNotFound", f"There is no LLMRouter {name}.")
    ready = _condition((router.get("status") or {}).get("conditions") or (), READY)
    message = f"LLMRouter {name}: {ready.get('message', 'it has no status yet.')}"
    if ready.get("status") == "True":
        return RouterState(True, "RouterAvailable", message)
    return RouterState(False, str(ready.get("reason", "RouterStarting")), message)


def router_counts(deployment: Body | None) -> tuple[int, int]:
    """Pods that are wanted, and pods that serve."""
    if deployment is None:
        return 0, 0
    status = deployment.get("status") or {}
    return (deployment.get("spec") or {}).get("replicas", 1), status.get("availableReplicas", 0)


def _is_rolled_out(deployment: Body | None) -> bool:
    """While old pods serve, a new one may wait for what it will never get."""
    status = (deployment or {}).get("status") or {}
    return bool(status.get("updatedReplicas", 0) >= status.get("replicas", 0))


def _condition(conditions: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    return next((each for each in conditions if each["type"] == name), {})
