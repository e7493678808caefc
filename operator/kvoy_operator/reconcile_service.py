"""The story of a service: observe, decide, apply, report.

Everything is decided upon what the store has, which includes the answers to the writes of the step
before.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvoy_operator.acceptance import Refusal, invalid, refusal_of, shadowed
from kvoy_operator.api_errors import ApiRefusal
from kvoy_operator.children import Children, Outcome
from kvoy_operator.cluster import Cluster
from kvoy_operator.conditions import RouterState
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.identity import prefill_scaler_name
from kvoy_operator.kinds import LLM_ROLE_SCALER, LLM_ROUTER
from kvoy_operator.manifests import is_model_cached, render_support
from kvoy_operator.metrics import Metrics
from kvoy_operator.news import Newsroom
from kvoy_operator.observed import Body, ChildKey, Observed
from kvoy_operator.options import RenderOptions
from kvoy_operator.ownership import Ownership, ownership
from kvoy_operator.reconcile import Gone, soonest
from kvoy_operator.record import Key, Ref
from kvoy_operator.refusals import recheck_after_s, server_fault
from kvoy_operator.report import Reporter
from kvoy_operator.resources import LLMService, parse_service
from kvoy_operator.revision import revision_of
from kvoy_operator.rollout import (
    RolloutInput,
    RolloutSettings,
    RolloutStep,
    Strategy,
    plan_rollout,
)
from kvoy_operator.router_state import own_router, shared_router
from kvoy_operator.scaling import PoolCount, pool_counts
from kvoy_operator.status import (
    ServiceFacts,
    facts_of,
    facts_of_refused,
    reported_rollout,
    scaler_status,
    service_status,
)
from kvoy_operator.store import Store
from kvoy_operator.together import together
from kvoy_operator.workloads import Workloads

log = logging.getLogger(__name__)

_RECHECK_S = 2.0
_FAULT_S = 20.0
"""A fault behind the API server becomes a condition when it has lasted for so long."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Told:
    """How far the story has come, for the status."""

    facts: ServiceFacts
    router: RouterState
    step: RolloutStep | None = None
    refusal: Refusal | None = None
    requeue_after_s: float | None = None


class ServiceStory:
    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        children: Children,
        reporter: Reporter,
        options: RenderOptions,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._children = children
        self._workloads = Workloads(cluster, children, options)
        self._options = options
        self._metrics = metrics
        self._reporter = reporter
        self._news = Newsroom(cluster, clock)
        self._faulty_since_s: dict[Key, float] = {}
        self._clock = clock

    async def reconcile(self, key: Key) -> float | None:
        """Take one step; see `reconcile.Story`."""
        body = self._store.custom(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._metrics.set_pools(key, {})
            self._news.forget(key)
            self._faulty_since_s.pop(key, None)
            raise Gone
        look_s = await self._news.refresh(key, self._seen(key, body))
        told = await self._tell(key, body)
        observed = self._observe(key, body)
        status = service_status(
            told.facts, observed, told.step, told.router, told.refusal, self._clock()
        )
        await together(
            self._reporter.report(body, status), self._report_scaler(told.facts, observed)
        )
        self._metrics.set_pools(
            key, {pool["name"]: (pool["desired"], pool["ready"]) for pool in status["pools"]}
        )
        return soonest(told.requeue_after_s, look_s)

    async def _tell(self, key: Key, body: Body) -> _Told:
        try:
            service = parse_service(body)
        except InvalidSpec as error:
            return self._refused(key, body, invalid(error))
        routers = [each["metadata"]["name"] for each in self._routers(key.namespace)]
        refusal = refusal_of(service, has_lws=self._store.has_lws, router_names=routers)
        rival = self._store.body(Ref(LLM_ROUTER.name, key.namespace, key.name))
        refusal = refusal or shadowed(body, rival)
        if refusal is not None:
            told = self._stopped(key, body, service, refusal)
            return dataclasses.replace(told, requeue_after_s=recheck_after_s(refusal))
        try:
            told = await self._serve(key, body, service)
        except InvalidSpec as error:
            told = self._stopped(key, body, service, invalid(error))
        except ApiRefusal as error:
            refusal = self._lasting_fault(key, error)
            if refusal is None:
                raise
            told = self._stopped(key, body, service, refusal)
            return dataclasses.replace(told, requeue_after_s=recheck_after_s(refusal))
        self._faulty_since_s.pop(key, None)
        return told

    def _lasting_fault(self, key: Key, error: ApiRefusal) -> Refusal | None:
        """A fault behind the API server that has lasted: by then users should read of it."""
        if not error.is_server_fault:
            return None
        since_s = self._faulty_since_s.setdefault(key, self._clock())
        return server_fault(error) if self._clock() - since_s >= _FAULT_S else None

    async def _serve(self, key: Key, body: Body, service: LLMService) -> _Told:
        """An accepted service: its surroundings, then one step of its engines.

        Raises InvalidSpec when it turns out that a `podTemplate` does not fit.
        """
        outcome = await self._settle_surroundings(key, body, service)
        if outcome.refusals:
            told = self._stopped(key, body, service, outcome.refusals[0])
            return dataclasses.replace(told, requeue_after_s=outcome.requeue_after_s)
        await self._workloads.take_over(body, service, self._store.observed(key))
        observed, counts = self._observe(key, body), self._counts(key, service)
        await self._seed_scaler(key, counts)
        step = plan_rollout(self._rollout_input(service, counts, observed))
        refusal = await self._workloads.take(body, service, step, observed)
        if refusal is not None:
            told = self._stopped(key, body, service, refusal)
            return dataclasses.replace(told, requeue_after_s=recheck_after_s(refusal))
        observed = self._observe(key, body)
        is_waiting = any(workload.is_deleting for workload in observed.workloads)
        recheck_s = _RECHECK_S if is_waiting else None
        return _Told(
            self._facts(key, service, counts),
            self._router_state(key, service.spec.router.ref, observed),
            step,
            requeue_after_s=soonest(step.requeue_after_s, outcome.requeue_after_s, recheck_s),
        )

    async def _settle_surroundings(self, key: Key, body: Body, service: LLMService) -> Outcome:
        observed = self._observe(key, body)
        kept = [ChildKey(each.kind, each.name) for each in observed.workloads]
        wanted = render_support(service, self._options)
        return await self._children.settle(body, wanted, observed, kept)

    async def _seed_scaler(self, key: Key, counts: Mapping[str, PoolCount]) -> None:
        for count in counts.values():
            scaler = self._scaler(key)
            if count.scaler_replicas is not None and scaler is not None:
                metadata = scaler["metadata"]
                await self._cluster.scale(
                    LLM_ROLE_SCALER,
                    key.namespace,
                    metadata["name"],
                    metadata["uid"],
                    count.scaler_replicas,
                )

    async def _report_scaler(self, facts: ServiceFacts, observed: Observed) -> None:
        scaler = observed.children.get(
            ChildKey(LLM_ROLE_SCALER.name, prefill_scaler_name(facts.name))
        )
        if scaler is not None and "deletionTimestamp" not in scaler["metadata"]:
            pool = scaler["spec"]["pool"]
            await self._reporter.write(scaler, scaler_status(scaler, facts.name, pool, observed))

    def _refused(self, key: Key, body: Body, refusal: Refusal) -> _Told:
        """The spec cannot be read: the status repeats what it said last."""
        ref = ((body.get("spec") or {}).get("router") or {}).get("ref")
        observed = self._observe(key, body)
        router = self._router_state(key, ref, observed, refusal)
        return _Told(facts_of_refused(body), router, refusal=refusal)

    def _stopped(self, key: Key, body: Body, service: LLMService, refusal: Refusal) -> _Told:
        """What runs is left as it is."""
        counts, observed = self._counts(key, service), self._observe(key, body)
        facts = self._facts(key, service, counts)
        router = self._router_state(key, service.spec.router.ref, observed, refusal)
        return _Told(facts, router, refusal=refusal)

    def _observe(self, key: Key, body: Body) -> Observed:
        return self._news.tell(key, self._seen(key, body))

    def _seen(self, key: Key, body: Body) -> Observed:
        """With each workload's true owner: a namesake's may still be there, on its way out."""
        observed = self._store.observed(key)
        views = []
        for view in observed.workloads:
            whose = ownership(observed.children[ChildKey(view.kind, view.name)], body)
            views.append(
                dataclasses.replace(
                    view,
                    is_ours=whose is not Ownership.STRANGER,
                    is_deleting=view.is_deleting or whose is Ownership.DYING,
                )
            )
        return dataclasses.replace(observed, workloads=tuple(views))

    def _counts(self, key: Key, service: LLMService) -> dict[str, PoolCount]:
        return pool_counts(service, self._scaler(key))

    def _scaler(self, key: Key) -> dict[str, Any] | None:
        name = prefill_scaler_name(key.name)
        return self._store.body(Ref(LLM_ROLE_SCALER.name, key.namespace, name))

    def _routers(self, namespace: str) -> list[dict[str, Any]]:
        return self._store.customs(LLM_ROUTER.name, namespace)

    def _facts(
        self, key: Key, service: LLMService, counts: Mapping[str, PoolCount]
    ) -> ServiceFacts:
        is_tls = service.spec.router.tls_secret_ref is not None
        if (ref := service.spec.router.ref) is not None:
            router = self._store.body(Ref(LLM_ROUTER.name, key.namespace, ref)) or {}
            is_tls = (router.get("spec") or {}).get("tlsSecretRef") is not None
        return facts_of(service, counts, revision_of(service), is_tls=is_tls)

    def _router_state(
        self, key: Key, ref: str | None, observed: Observed, refusal: Refusal | None = None
    ) -> RouterState:
        if ref is None:
            return own_router(key.name, observed, refusal)
        return shared_router(ref, self._store.body(Ref(LLM_ROUTER.name, key.namespace, ref)))

    def _rollout_input(
        self, service: LLMService, counts: Mapping[str, PoolCount], observed: Observed
    ) -> RolloutInput:
        rollout = service.spec.rollout
        return RolloutInput(
            wanted=revision_of(service),
            desired={name: count.desired for name, count in counts.items()},
            workloads=observed.workloads,
            pods=observed.pods,
            settings=RolloutSettings(
                strategy=Strategy(rollout.strategy),
                max_unavailable=rollout.max_unavailable,
                surge_timeout_s=rollout.surge_timeout.seconds,
                progress_deadline_s=service.spec.progress_deadline_s,
            ),
            now_s=self._clock(),
            is_model_ready=is_model_cached(service, observed),
            reported=reported_rollout(service.status),
        )
