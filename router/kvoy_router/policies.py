"""How to choose among the endpoints that may serve: four policies behind one interface.

kv-aware      least cost in seconds (see `cost`); the default
least-load    fewest requests running, waiting or on their way
round-robin   in turn
random        any

Endpoints between which a policy sees no difference share the traffic in turn or at random: an order
of their own would send everything to the first one whenever the fleet is idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from kvoy_router.cost import Cost, Traffic, estimate
from kvoy_router.decision import Candidate
from kvoy_router.endpoint import Endpoint
from kvoy_router.occupancy import Occupancy
from kvoy_router.request import InferenceRequest
from kvoy_router.standings import Order

TIE_SHARE = 0.02
"""Measured rates and step times of equal engines differ by about so much from one report to the
next."""
TIE_S = 0.001


class View(msgspec.Struct, frozen=True, gc=False):
    """One endpoint as a policy sees it."""

    endpoint: Endpoint
    cached_tokens: int
    occupancy: Occupancy
    home_share: float = 1.0
    """Of all that has its home somewhere, how much it has here; 1.0: as an average engine."""


def is_new_to_all(prompt_tokens: int, views: Sequence[View]) -> bool:
    """Whether most of a prompt is held by nobody, so that its engine becomes its home."""
    return 2 * max(view.cached_tokens for view in views) < prompt_tokens


class Policy(Protocol):
    """`choose` returns the position of its choice, and every view's reasons in the same order."""

    @property
    def name(self) -> str: ...

    def choose(
        self, request: InferenceRequest, views: Sequence[View], traffic: Traffic
    ) -> tuple[int, tuple[Candidate, ...]]: ...


@runtime_checkable
class Ordered(Protocol):
    """A policy that needs to see only the first engines of a large fleet in this order; others see
    every engine."""

    order: ClassVar[Order]


class KvAware:
    name = "kv-aware"
    order: ClassVar[Order] = Order.COST

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(
        self, request: InferenceRequest, views: Sequence[View], traffic: Traffic
    ) -> tuple[int, tuple[Candidate, ...]]:
        prompt_tokens = request.num_prompt_tokens
        mean_requests = traffic.mean_requests
        if mean_requests is None:
            mean_requests = _mean_but_greatest([view.occupancy.num_requests for view in views])
        is_new = is_new_to_all(prompt_tokens, views)
        costs = [
            estimate(
                prompt_tokens,
                view.cached_tokens,
                view.occupancy,
                traffic,
                mean_requests,
                view.home_share if is_new else 1.0,
            )
            for view in views
        ]
        totals = [cost.total_s for cost in costs]
        lowest = min(totals)
        best = totals.index(lowest)
        # A longer held prefix is a difference that counts however small it is; noise is not.
        limit = lowest + TIE_SHARE * abs(lowest) + TIE_S
        cached = views[best].cached_tokens
        tied = [
            i
            for i, total in enumerate(totals)
            if total <= limit and views[i].cached_tokens == cached
        ]
        if len(tied) > 1:
            # In turn: at random some would get two requests during one step, others none.
            best = _longest_ago(views, tied, self._random)
        return best, tuple(
            _candidate(view, cost.total_s, cost) for view, cost in zip(views, costs, strict=True)
        )


class LeastLoad:
    name = "least-load"
    order: ClassVar[Order] = Order.LOAD

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(
        self, request: InferenceRequest, views: Sequence[View], traffic: Traffic
    ) -> tuple[int, tuple[Candidate, ...]]:
        loads = [view.occupancy.num_requests for view in views]
        lowest = min(loads)
        best = self._random.choice([i for i, load in enumerate(loads) if load == lowest])
        return best, tuple(_candidate(view, load) for view, load in zip(views, loads, strict=True))


class RoundRobin:
    """In turn: the endpoint that was picked longest ago, a new one first."""

    name = "round-robin"
    order: ClassVar[Order] = Order.TURN

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(
        self, request: InferenceRequest, views: Sequence[View], traffic: Traffic
    ) -> tuple[int, tuple[Candidate, ...]]:
        best = _longest_ago(views, range(len(views)), self._random)
        return best, tuple(_candidate(view, 0.0) for view in views)


class RandomChoice:
    name = "random"
    order: ClassVar[Order] = Order.ANY

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(
        self, request: InferenceRequest, views: Sequence[View], traffic: Traffic
    ) -> tuple[int, tuple[Candidate, ...]]:
        best = self._random.randrange(len(views))
        return best, tuple(_candidate(view, 0.0) for view in views)


POLICIES: dict[str, Callable[[Random], Policy]] = {
    "kv-aware": KvAware,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
    "random": RandomChoice,
}


def make_policy(name: str, random: Random) -> Policy:
    """Raises ValueError for a name that is none of `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name](random)


def _mean_but_greatest(loads: Sequence[float]) -> float:
    """One overloaded engine says nothing about how busy the others will be."""
    return (sum(loads) - max(loads)) / (len(loads) - 1) if len(loads) > 1 else 0.0


def _longest_ago(views: Sequence[View], among: Sequence[int], random: Random) -> int:
    """Of these positions the one that was picked longest ago; any of those that never were."""
    oldest = min(views[i].endpoint.last_pick for i in among)
    return random.choice([i for i in among if views[i].endpoint.last_pick == oldest])


def _candidate(view: View, score: float, cost: Cost | None = None) -> Candidate:
    occupancy = view.occupancy
    return Candidate(
        endpoint_id=view.endpoint.id,
        cached_tokens=view.cached_tokens,
        num_requests=occupancy.num_requests,
        is_known=occupancy.is_known,
        score=score,
        cost=cost,
    )
