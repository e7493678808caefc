"""Whether a router is up: a service's own, from its Deployment and pods, or a shared one, from what
its LLMRouter says of itself. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvoy_contract.names import ROUTER_COMPONENT
from kvoy_operator.conditions import READY, RouterState
from kvoy_operator.failures import first_failure
from kvoy_operator.identity import router_name
from kvoy_operator.observed import Body, ChildKey, Observed


def own_router(owner: str, observed: Observed) -> RouterState:
    """The router whose children are in `observed`; `owner` is the service's or LLMRouter's name."""
    deployment = observed.children.get(ChildKey("Deployment", router_name(owner)))
    wanted, num_ready = router_counts(deployment)
    shown = f"{num_ready} of {wanted} router pods ready."
    if num_ready:
        return RouterState(True, "RouterAvailable", shown)
    pods = [pod for pod in observed.pods if pod.component == ROUTER_COMPONENT]
    failure = first_failure(pods)
    if failure is not None:
        return RouterState(False, failure.reason, f"{shown} {failure.message}")
    refused = _replica_failure(deployment)
    if refused:
        return RouterState(False, "PodsRefused", f"{shown} {refused}")
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


def _replica_failure(deployment: Body | None) -> str:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    failure = _condition(conditions, "ReplicaFailure")
    return str(failure.get("message", "")) if failure.get("status") == "True" else ""


def _condition(conditions: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    return next((each for each in conditions if each["type"] == name), {})
