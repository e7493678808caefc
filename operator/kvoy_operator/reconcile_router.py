"""The story of an LLMRouter: one router over the services of its namespace that it selects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from kvoy_contract.fleet import DEFAULT_WEIGHT
from kvoy_operator import conditions
from kvoy_operator.acceptance import Refusal, invalid, shadowed
from kvoy_operator.children import Children, Outcome
from kvoy_operator.cluster import Cluster
from kvoy_operator.errors import InvalidSpec
from kvoy_operator.identity import router_name
from kvoy_operator.kinds import LLM_SERVICE
from kvoy_operator.manifests import is_behind, render_shared_router
from kvoy_operator.news import Newsroom
from kvoy_operator.observed import Body, ChildKey, Observed
from kvoy_operator.options import RenderOptions
from kvoy_operator.reconcile import Gone, soonest
from kvoy_operator.record import Key, Ref
from kvoy_operator.refusals import recheck_after_s
from kvoy_operator.report import Reporter
from kvoy_operator.resources import LLMRouter, LLMService, parse_router, parse_service
from kvoy_operator.router_state import own_router, router_counts
from kvoy_operator.status import router_status
from kvoy_operator.store import Store


class RouterStory:
    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        children: Children,
        reporter: Reporter,
        options: RenderOptions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._children = children
        self._options = options
        self._reporter = reporter
        self._news = Newsroom(cluster, clock)
        self._clock = clock

    async def reconcile(self, key: Key) -> float | None:
        """Make the router what its spec says; see `reconcile.Story`."""
        body = self._store.custom(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._news.forget(key)
            raise Gone
        try:
            router = parse_router(body)
        except InvalidSpec as error:
            await self._reporter.report(body, self._refused(body, invalid(error)))
            return None
        look_s = await self._news.refresh(key, self._store.observed(key))
        services = self._services_behind(router)
        rival = self._store.body(Ref(LLM_SERVICE.name, key.namespace, key.name))
        clash = shadowed(body, rival)
        try:
            outcome = (
                Outcome((clash,), recheck_after_s(clash))
                if clash
                else await self._settle(key, body, router, services)
            )
        except InvalidSpec as error:
            outcome = Outcome((invalid(error),))
        refusal = outcome.refusals[0] if outcome.refusals else None
        await self._report(key, body, router, services, refusal)
        return soonest(outcome.requeue_after_s, look_s)

    async def _settle(
        self, key: Key, body: Body, router: LLMRouter, services: list[LLMService]
    ) -> Outcome:
        wanted = render_shared_router(router, services, self._options)
        observed = self._observe(key)
        return await self._children.settle(body, wanted, observed, kept=())

    def _observe(self, key: Key) -> Observed:
        return self._news.tell(key, self._store.observed(key))

    async def _report(
        self,
        key: Key,
        body: Body,
        router: LLMRouter,
        services: list[LLMService],
        refusal: Refusal | None,
    ) -> None:
        observed = self._observe(key)
        weights = {entry.service: entry.weight for entry in router.spec.weights}
        deployment = observed.children.get(ChildKey("Deployment", router_name(key.name)))
        status = router_status(
            router,
            [(each, weights.get(each.name, DEFAULT_WEIGHT)) for each in services],
            own_router(key.name, observed, refusal),
            router_counts(deployment),
            refusal,
            self._clock(),
        )
        await self._reporter.report(body, status)

    def _refused(self, body: Body, refusal: Refusal) -> dict[str, Any]:
        """The spec cannot be read: what the status said last stays, and what runs."""
        previous, generation = body.get("status") or {}, body["metadata"]["generation"]
        told = previous.get("conditions") or ()
        (verdict,) = conditions.as_status(
            [conditions.accepted(refusal.reason, refusal.message)], told, generation, self._clock()
        )
        others = [each for each in told if each["type"] != conditions.ACCEPTED]
        return {
            **previous,
            "observedGeneration": generation,
            "conditions": [verdict, *others],
        }

    def _services_behind(self, router: LLMRouter) -> list[LLMService]:
        """Those that can be read: a service with a broken spec says so itself."""
        services = []
        for body in self._store.customs(LLM_SERVICE.name, router.namespace):
            if "deletionTimestamp" in body["metadata"] or not is_behind(router, body):
                continue
            with contextlib.suppress(InvalidSpec):
                services.append(parse_service(body))
        return services
