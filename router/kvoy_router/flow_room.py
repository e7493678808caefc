"""How long a new request would wait at the engines of a pool: the signal of flow control.

It is the wait of the cost that the pick minimises, from the same reports and reservations. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvoy_contract.errors import ApiError
from kvoy_router import filters
from kvoy_router.cost import Traffic, estimate
from kvoy_router.endpoint import Endpoint
from kvoy_router.flow_ticket import Line
from kvoy_router.occupancy import occupancies
from kvoy_router.pool import Pool

_is_serving = filters.is_serving(frozenset())


class PoolRoom:
    """`flow.Room` of a pool.

    An engine that a pick would pass over makes no room: one whose telemetry is lost looks empty,
    and a dead one would switch flow control off for all the others; and so would a service that has
    little to do, for another one that shares the model's traffic."""

    def __init__(self, pool: Pool, blocked: Callable[[float], frozenset[str]]) -> None:
        """`blocked`: ids of the engines that are to get nothing now, as `Breakers.blocked`."""
        self._pool = pool
        self._blocked = blocked
        self._turns: dict[Line, int] = {}
        """Where the last engine with enough room was: it most likely has more."""

    def wait_s(self, line: Line, now_s: float, enough_s: float) -> float | None:
        """Looks at engines until one has enough room: at one, in a fleet that has some."""
        try:
            endpoints = self._pool.endpoints_of(line.model)
            output_tokens = self._pool.output_tokens(line.model)
        except ApiError:
            self._turns.pop(line, None)
            return None
        stale_after_s = self._pool.config.stale_after_s
        blocked = self._blocked(now_s)
        service = line.service
        least_s: float | None = None
        of_others: list[Endpoint] = []
        passed_over: list[Endpoint] = []
        first = self._turns.get(line, 0)
        for turn in range(first, first + len(endpoints)):
            endpoint = endpoints[turn % len(endpoints)]
            if _is_serving(endpoint) is not None:
                continue
            if endpoint.id in blocked or not endpoint.is_fresh(now_s, stale_after_s):
                passed_over.append(endpoint)
                continue
            if service and endpoint.origin.service != service:
                of_others.append(endpoint)
                continue
            wait_s = self._wait_at(endpoint, output_tokens, now_s)
            if least_s is None or wait_s < least_s:
                least_s = wait_s
                if wait_s < enough_s:
                    self._turns[line] = turn % len(endpoints)
                    break
        if least_s is None:
            # A pick falls back in the same order.
            waits = (self._wait_at(e, output_tokens, now_s) for e in of_others or passed_over)
            return min(waits, default=None)
        return least_s

    def _wait_at(self, endpoint: Endpoint, output_tokens: float, now_s: float) -> float:
        """Until it turns to a new prompt: what is queued, and what has to end to make room. The
        step that is under way does not count, and an engine without requests has room, however
        slow or small it is: else nobody would ever be served by it."""
        is_known = endpoint.is_known(now_s, self._pool.config.stale_after_s)
        (occupancy,) = occupancies([endpoint], [is_known])
        if occupancy.num_requests <= 0.0:
            return 0.0
        cost = estimate(1, 0, occupancy, Traffic(output_tokens, 0.0))
        return cost.wait_s - occupancy.step_s
