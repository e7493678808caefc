"""The status of each custom resource, from what is observed and decided. Pure.

Written whole each time; equal facts give an equal status, so that one which has not changed is not
written. Its conditions are also the operator's only memory: `reported_rollout` reads what the next
rollout step has to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvoy_contract.names import POOL_LABEL, ROUTER_COMPONENT, SERVING_POOL
from kvoy_operator import conditions
from kvoy_operator.acceptance import Refusal
from kvoy_operator.conditions import Condition, PoolState, RouterState
from kvoy_operator.failures import Failure, first_failure
from kvoy_operator.group_failures import ends_pods, lasting_failure
from kvoy_operator.identity import endpoint_url, engine_selector
from kvoy_operator.observed import Body, Observed, PodView, WorkloadView
from kvoy_operator.resources import LLMRouter, LLMService
from kvoy_operator.rollout import Reported, RolloutStep
from kvoy_operator.rollout_state import LEADER_WORKER_SET, Pool, pools_of
from kvoy_operator.scaling import PoolCount
from kvoy_operator.views import seconds

_LEADERS_ONLY: Final = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What of a service its status repeats; `facts_of` and `facts_of_refused` make it."""

    name: str
    generation: int
    previous: Mapping[str, Any]
    """The status as last written."""
    model: str
    url: str
    counts: Mapping[str, PoolCount]
    max_unavailable: int
    wanted: str
    """The revision that the spec asks for; empty: the spec cannot be read."""


def facts_of(
    service: LLMService, counts: Mapping[str, PoolCount], wanted: str, *, is_tls: bool
) -> ServiceFacts:
    """`is_tls`: of the router that serves it."""
    return ServiceFacts(
        name=service.name,
        generation=service.generation,
        previous=service.status,
        model=service.model_name,
        url=endpoint_url(service.spec.router.ref or service.name, service.namespace, is_tls=is_tls),
        counts=counts,
        max_unavailable=service.spec.rollout.max_unavailable,
        wanted=wanted,
    )


def facts_of_refused(body: Body) -> ServiceFacts:
    """Of a service whose spec cannot be read: as its last status says."""
    metadata, previous = body["metadata"], body.get("status") or {}
    pools = previous.get("pools") or ()
    return ServiceFacts(
        name=metadata["name"],
        generation=metadata["generation"],
        previous=previous,
        model=previous.get("model", ""),
        url=previous.get("url", ""),
        counts={
            pool["name"]: PoolCount(pool.get("desired", 0), pool.get("replicasOwner", ""))
            for pool in pools
        },
        max_unavailable=0,
        wanted="",
    )


def service_status(
    facts: ServiceFacts,
    observed: Observed,
    step: RolloutStep | None,
    router: RouterState,
    refusal: Refusal | None,
    now_s: float,
) -> dict[str, Any]:
    """`step` is what was decided now; None: nothing was, because the spec is refused."""
    reported = reported_rollout(facts.previous)
    current = step.current if step else reported.current
    update = facts.wanted or reported.update
    pools = pools_of(
        update,
        current,
        {name: count.desired for name, count in facts.counts.items()},
        observed.workloads,
        observed.pods,
    )
    serving = current if current != update else ""
    states = [_state(pool, facts.counts[pool.name], serving) for pool in pools if pool.is_wanted]
    failure = _failure(states, observed)
    told = {each["type"]: each for each in facts.previous.get("conditions") or ()}
    degraded = told.get(conditions.DEGRADED, {})
    failure = lasting_failure(failure, degraded, observed, facts.generation, now_s)
    status: dict[str, Any] = {
        "observedGeneration": facts.generation,
        "model": facts.model,
        "url": facts.url,
        "replicas": _num_existing(observed.workloads, SERVING_POOL),
        "selector": pool_selector(facts.name, SERVING_POOL, observed.workloads),
        "pools": [_pool_status(state) for state in states],
        "revision": {"current": current, "update": update},
        "conditions": conditions.as_status(
            _conditions(facts, states, step, router, refusal, failure),
            facts.previous.get("conditions") or (),
            facts.generation,
            now_s,
        ),
    }
    status["revision"] = {name: value for name, value in status["revision"].items() if value}
    return {name: value for name, value in status.items() if value not in ("", {})}


def reported_rollout(status: Mapping[str, Any]) -> Reported:
    """What the status last said about the rollout."""
    said = {each["type"]: each for each in status.get("conditions") or ()}
    revision = status.get("revision") or {}
    degraded = said.get(conditions.DEGRADED, {})
    is_failing = ends_pods(degraded)
    return Reported(
        failing=degraded["message"] if is_failing else "",
        failing_since_s=seconds(degraded["lastTransitionTime"]) if is_failing else 0.0,
        phase=said.get(conditions.PROGRESSING, {}).get("reason", ""),
        current=revision.get("current", ""),
        update=revision.get("update", ""),
    )


def router_status(
    router: LLMRouter,
    services: Iterable[tuple[LLMService, int]],
    state: RouterState,
    counts: tuple[int, int],
    refusal: Refusal | None,
    now_s: float,
) -> dict[str, Any]:
    """Of an LLMRouter: `services` are those behind it with their weights, `counts` its pods that
    are wanted and that serve."""
    behind = sorted(services, key=lambda each: each[0].name)
    verdict = _verdict_on(router, {service.name for service, _ in behind}, refusal)
    if not behind and state.is_ready:
        ready = Condition(conditions.READY, False, "NoServices", "No service is behind the router.")
    else:
        ready = Condition(conditions.READY, state.is_ready, state.reason, state.message)
    return {
        "observedGeneration": router.generation,
        "url": endpoint_url(
            router.name, router.namespace, is_tls=router.spec.tls_secret_ref is not None
        ),
        "models": sorted({service.model_name for service, _ in behind}),
        "services": [
            {"name": service.name, "model": service.model_name, "weight": weight}
            for service, weight in behind
        ],
        "replicas": counts[0],
        "readyReplicas": counts[1],
        "conditions": conditions.as_status(
            (verdict, ready, conditions.router_ready(state)),
            router.status.get("conditions") or (),
            router.generation,
            now_s,
        ),
    }


def scaler_status(scaler: Body, service: str, pool: str, observed: Observed) -> dict[str, Any]:
    """Of an LLMRoleScaler: what its `/scale` shows to autoscalers."""
    return {
        "observedGeneration": scaler["metadata"]["generation"],
        "replicas": _num_existing(observed.workloads, pool),
        "selector": pool_selector(service, pool, observed.workloads),
    }


def pool_selector(service: str, pool: str, workloads: Iterable[WorkloadView]) -> str:
    """The pool's pods for autoscalers; of groups only the leaders, which report for all."""
    labels = {**engine_selector(service), POOL_LABEL: pool}
    newest = max(
        (each for each in workloads if each.pool == pool and each.is_ours),
        key=lambda each: (each.replicas > 0, each.created_s),
        default=None,
    )
    if newest is not None and newest.kind == LEADER_WORKER_SET:
        labels[_LEADERS_ONLY] = "0"
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _conditions(
    facts: ServiceFacts,
    pools: list[PoolState],
    step: RolloutStep | None,
    router: RouterState,
    refusal: Refusal | None,
    failure: Failure | None,
) -> list[Condition]:
    verdict = conditions.accepted(*_said(refusal))
    phase, message = (step.phase, step.message) if step else (None, "")
    return [
        verdict,
        conditions.ready(pools, facts.max_unavailable, router, failure, verdict),
        conditions.progressing(step.phase, message, failure)
        if step
        else conditions.not_progressing(verdict),
        conditions.degraded(pools, phase, failure, message, router),
        conditions.router_ready(router),
    ]


def _verdict_on(router: LLMRouter, names: set[str], refusal: Refusal | None) -> Condition:
    verdict = conditions.accepted(*_said(refusal))
    lost = [each.service for each in router.spec.weights if each.service not in names]
    if refusal is not None or not lost:
        return verdict
    # No refusal: a service may well be made after the router.
    said = f"spec.weights: of no effect for {', '.join(lost)}, not behind this router."
    return replace(verdict, message=f"{verdict.message} {said}")


def _said(refusal: Refusal | None) -> tuple[str, str]:
    return (refusal.reason, refusal.message) if refusal else ("", "")


def _state(pool: Pool, count: PoolCount, serving: str) -> PoolState:
    """`serving` is the revision that is being replaced; empty: none is."""
    rows = (pool.new, *pool.olds)
    most = max(rows, key=lambda row: (row.num_serving, row.size))
    return PoolState(
        name=pool.name,
        desired=pool.desired,
        ready=sum(row.num_serving for row in rows),
        updated=pool.new.size,
        owner=count.owner,
        revision=most.key.revision if most.workload else "",
        is_new=bool(serving) and serving not in {row.key.revision for row in pool.olds},
    )


def _pool_status(state: PoolState) -> dict[str, Any]:
    shown = {
        "name": state.name,
        "desired": state.desired,
        "ready": state.ready,
        "updated": state.updated,
        "replicasOwner": state.owner,
        "revision": state.revision,
    }
    return {name: value for name, value in shown.items() if value != ""}


def _failure(pools: Iterable[PoolState], observed: Observed) -> Failure | None:
    """The first failure of engines and of what fetches their model. A pod that has ended tells
    nothing once others have taken its place."""
    is_full = all(pool.is_full for pool in pools)
    pods = [pod for pod in observed.pods if _counts(pod, is_full)]
    workloads = [each for each in observed.workloads if each.is_ours and not each.is_deleting]
    return first_failure(pods, workloads)


def _counts(pod: PodView, is_full: bool) -> bool:
    if pod.component == ROUTER_COMPONENT:
        return False
    return not (is_full and (pod.phase == "Failed" or pod.is_terminating))


def _num_existing(workloads: Iterable[WorkloadView], pool: str) -> int:
    return sum(each.current_replicas for each in workloads if each.pool == pool and each.is_ours)
