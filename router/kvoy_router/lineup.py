"""Which engines a policy sees for one request: all that may serve it, or of a large fleet the
few that its order says are worth weighing.

Owns the orders of large fleets (`standings`), and what has changed since they were last used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec

from kvoy_contract.errors import ContextLengthExceeded, Unavailable
from kvoy_router import filters, split
from kvoy_router.assumed import Assumed
from kvoy_router.cost import Traffic
from kvoy_router.endpoint import Endpoint
from kvoy_router.filters import Rejection
from kvoy_router.model import Model
from kvoy_router.occupancy import occupancies
from kvoy_router.policies import Ordered, Policy, View
from kvoy_router.prefix_index import Groups, PrefixIndex, slots_of
from kvoy_router.request import InferenceRequest
from kvoy_router.standings import Order, Standings

RETRY_AFTER_S = 2.0
"""Told to clients when nothing can serve: about how soon an engine's readiness shows."""
EXACT_FLEET = 64
"""Up to so many engines of a model each one is weighed; about as many as a shortlist costs."""
MAX_GROUPS = 16
"""Depths that are told apart exactly in a large fleet; whoever holds less is known to hold at least
what the search has seen."""


@dataclass(frozen=True, slots=True)
class Lineup:
    views: Sequence[View]
    """Never empty."""
    groups: Groups
    """Who holds how much of the prompt."""
    traffic: Traffic
    rejected: Sequence[Rejection]
    """Who was left out, and why; of a large fleet only what was looked at."""

    def depth_at(self, slot: int) -> int:
        """Leading hashes that the endpoint of this slot holds."""
        for depth, bits in self.groups:
            if bits >> slot & 1:
                return depth
        return 0


class Lineups:
    def __init__(
        self,
        policy: Policy,
        index: PrefixIndex,
        assumed: Assumed,
        random: Random,
        stale_after_s: float,
    ) -> None:
        self._order = _order_of(policy)
        self._index = index
        self._assumed = assumed
        self._random = random
        self._stale_after_s = stale_after_s
        self._changed: dict[Endpoint, None] = {}
        """In a dict, since the order of a set differs from run to run."""
        self._large: dict[str, Standings] = {}
        """By model, of those with many engines."""

    def use_policy(self, policy: Policy) -> None:
        """Orders are made anew, when they are asked for."""
        self._order = _order_of(policy)
        self._large.clear()

    def watch(self, endpoint: Endpoint) -> None:
        """A new endpoint: from now on its accounts tell when they change."""
        endpoint.ledger.watch = partial(self._changed.setdefault, endpoint)

    def mark(self, endpoint: Endpoint) -> None:
        """What is known of it otherwise has changed."""
        self._changed[endpoint] = None

    def forget(self, endpoint: Endpoint) -> None:
        """It is removed. Leases on it may end later; they are nobody's business any more."""
        endpoint.ledger.watch = None
        self._changed.pop(endpoint, None)

    def join(self, model: str, endpoint: Endpoint) -> None:
        """It serves this model now."""
        self.mark(endpoint)
        if (standings := self._large.get(model)) is not None:
            standings.members[endpoint] = None

    def leave(self, model: str, endpoint: Endpoint) -> None:
        if (standings := self._large.get(model)) is not None:
            standings.leave(endpoint)

    def drop_model(self, model: str) -> None:
        self._large.pop(model, None)

    def of(
        self,
        model: Model,
        models: Mapping[str, Model],
        request: InferenceRequest,
        keys: Sequence[int],
        now_s: float,
        exclude: frozenset[str],
    ) -> Lineup:
        """Raises Unavailable or ContextLengthExceeded when nobody may serve it."""
        if self._order is not None and len(model.endpoints) > EXACT_FLEET:
            standings = self._standings(model, models, now_s)
            few = self._few(standings, model, request, keys, now_s, exclude)
            if few is not None:
                return few
        return self._all(model, request, keys, now_s, exclude)

    def _all(
        self,
        model: Model,
        request: InferenceRequest,
        keys: Sequence[int],
        now_s: float,
        exclude: frozenset[str],
    ) -> Lineup:
        rejected: list[Rejection] = []
        endpoints = self._eligible(model, request, now_s, exclude, rejected)
        groups = self._index.match_groups(keys, self._assumed.sets)
        depths = {slot: depth for depth, bits in groups for slot in slots_of(bits)}
        views = self._views(model, endpoints, depths, request, now_s, None)
        return Lineup(views, groups, model.traffic(request), rejected)

    def _few(
        self,
        standings: Standings,
        model: Model,
        request: InferenceRequest,
        keys: Sequence[int],
        now_s: float,
        exclude: frozenset[str],
    ) -> Lineup | None:
        groups = self._index.match_groups(keys, self._assumed.sets, MAX_GROUPS)
        service = None
        if len(model.weights) > 1 and standings.services:
            service = split.order(model.weights, standings.services, request.affinity)[0]
        endpoints = standings.shortlist(request, groups, exclude, service)
        if not endpoints:
            return None
        traffic = msgspec.structs.replace(
            model.traffic(request), mean_requests=standings.mean_requests()
        )
        lineup = Lineup((), groups, traffic, ())
        depths = {endpoint.slot: lineup.depth_at(endpoint.slot) for endpoint in endpoints}
        views = self._views(model, endpoints, depths, request, now_s, standings)
        return Lineup(views, groups, traffic, ())

    def _standings(self, model: Model, models: Mapping[str, Model], now_s: float) -> Standings:
        """Of this model, as things are now."""
        assert self._order is not None
        standings = self._large.get(model.name)
        if standings is None:
            standings = Standings(self._order, self._random, self._stale_after_s)
            self._large[model.name] = standings
            standings.members = dict.fromkeys(model.endpoints)
            self._changed |= standings.members
        for endpoint in self._changed:
            for name in endpoint.info.model_names if endpoint.info else ():
                if (affected := self._large.get(name)) is not None:
                    owner = models[name]
                    affected.update(endpoint, now_s, int(owner.prompt_tokens), owner.expected)
        self._changed.clear()
        for endpoint in standings.gone_silent(now_s):
            standings.update(endpoint, now_s, int(model.prompt_tokens), model.expected)
        return standings

    def _eligible(
        self,
        model: Model,
        request: InferenceRequest,
        now_s: float,
        exclude: frozenset[str],
        rejected: list[Rejection],
    ) -> Sequence[Endpoint]:
        if len(model.weights) < 2 and filters.all_pass(
            model.endpoints, request, exclude, now_s, self._stale_after_s
        ):
            return model.endpoints
        serving = filters.keep(model.endpoints, filters.is_serving(exclude), rejected)
        if not serving:
            raise Unavailable(
                f"No engine can serve the model `{request.model}` now.",
                retry_after_s=RETRY_AFTER_S,
            )
        fitting = filters.keep(serving, filters.can_hold_prompt(request), rejected)
        if not fitting:
            raise ContextLengthExceeded(
                f"The prompt has {request.num_prompt_tokens} tokens, more than any engine of the"
                f" model `{request.model}` can take.",
                param=request.prompt_field,
            )
        fitting = filters.prefer(fitting, filters.can_hold_output(request), rejected)
        is_fresh = filters.is_fresh(now_s, self._stale_after_s)
        fresh = filters.prefer(fitting, is_fresh, rejected)
        if len(model.weights) < 2:
            return fresh
        names = {endpoint.origin.service for endpoint in fresh}
        chosen = split.order(model.weights, names, request.affinity)[0]
        return filters.keep(fresh, filters.is_of(chosen), rejected)

    def _views(
        self,
        model: Model,
        endpoints: Sequence[Endpoint],
        depths: Mapping[int, int],
        request: InferenceRequest,
        now_s: float,
        standings: Standings | None,
    ) -> Sequence[View]:
        known = [endpoint.is_known(now_s, self._stale_after_s) for endpoint in endpoints]
        average = standings.average(now_s) if standings and not all(known) else None
        stride, prompt_tokens = request.stride, request.num_prompt_tokens
        share = model.homes.share
        return [
            View(
                endpoint,
                min(depths.get(endpoint.slot, 0) * stride, prompt_tokens),
                occupancy,
                share(endpoint.id),
            )
            for endpoint, occupancy in zip(
                endpoints, occupancies(endpoints, known, average), strict=True
            )
        ]

    def check_integrity(self) -> None:
        for standings in self._large.values():
            standings.check_integrity()


def _order_of(policy: Policy) -> Order | None:
    return policy.order if isinstance(policy, Ordered) else None
