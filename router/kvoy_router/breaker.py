"""Circuit breakers: an engine that fails one request after another gets none for a while.

    closed ─ max_failures in a row, or `trip` ─► open ─ pause ─► half-open ─ first byte ─► closed
                                                  ▲                 │
                                                  └─ failure: twice the pause ─┘

Half-open lets one request through; while that one has not answered, the next may go after another
pause. A new epoch is another process: its breaker is closed. A breaker is a preference: where all
engines are open, any of them is better than none."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvoy_contract.errors import ApiError
from kvoy_router.decision import Decision
from kvoy_router.endpoint import Endpoint
from kvoy_router.pool import Pool
from kvoy_router.request import InferenceRequest

_NONE: frozenset[str] = frozenset()


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    max_failures: int = 3
    """In a row until it opens; 0: never."""
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0


@dataclass(slots=True, eq=False)
class _Breaker:
    endpoint: Endpoint
    epoch: bytes
    num_failures: int = 0
    pause_s: float = 0.0
    """Of the open state; 0: closed."""
    blocked_until_s: float = 0.0
    is_probing: bool = False

    @property
    def is_stale(self) -> bool:
        return self.epoch != _epoch_of(self.endpoint)

    def state(self, now_s: float) -> BreakerState:
        if not self.pause_s or self.is_stale:
            return BreakerState.CLOSED
        if self.is_probing or now_s >= self.blocked_until_s:
            return BreakerState.HALF_OPEN
        return BreakerState.OPEN

    def open(self, pause_s: float, now_s: float) -> None:
        self.pause_s = pause_s
        self.blocked_until_s = now_s + pause_s
        self.is_probing = False


class Breakers:
    """Only engines that have failed since their last answer have one here."""

    def __init__(self, limits: BreakerLimits) -> None:
        self.limits = limits
        """May be replaced at any time."""
        self._by_id: dict[str, _Breaker] = {}

    def blocked(self, now_s: float) -> frozenset[str]:
        """Ids of the engines that are to get nothing now."""
        if not self._by_id:
            return _NONE
        return frozenset(
            endpoint_id
            for endpoint_id, breaker in self._by_id.items()
            if breaker.pause_s and now_s < breaker.blocked_until_s and not breaker.is_stale
        )

    def on_pick(self, endpoint: Endpoint, now_s: float) -> None:
        """A request goes to this engine: of an open one whose pause is over, it is the probe."""
        breaker = self._by_id.get(endpoint.id)
        if breaker is not None and breaker.pause_s and now_s >= breaker.blocked_until_s:
            breaker.is_probing = True
            breaker.blocked_until_s = now_s + breaker.pause_s

    def on_success(self, endpoint: Endpoint) -> None:
        """The engine has begun to answer a request."""
        self._by_id.pop(endpoint.id, None)

    def on_failure(self, endpoint: Endpoint, now_s: float) -> None:
        """An attempt has failed for the engine's sake."""
        limits = self.limits
        if not limits.max_failures:
            return
        breaker = self._breaker_of(endpoint)
        breaker.num_failures += 1
        if not breaker.pause_s:
            if breaker.num_failures >= limits.max_failures:
                breaker.open(limits.first_pause_s, now_s)
        elif breaker.is_probing:
            breaker.open(min(2 * breaker.pause_s, limits.max_pause_s), now_s)

    def trip(self, endpoint: Endpoint, now_s: float) -> None:
        """Open at once, or stay open: the engine is known to hang."""
        breaker = self._breaker_of(endpoint)
        breaker.open(breaker.pause_s or self.limits.first_pause_s, now_s)

    def state(self, endpoint: Endpoint, now_s: float) -> BreakerState:
        breaker = self._by_id.get(endpoint.id)
        return BreakerState.CLOSED if breaker is None else breaker.state(now_s)

    def keep_only(self, endpoints: Iterable[Endpoint]) -> None:
        """Forget engines that there are no more, and earlier processes of those that there are."""
        if self._by_id:
            known = {endpoint.id: endpoint for endpoint in endpoints}
            for endpoint_id, breaker in list(self._by_id.items()):
                if known.get(endpoint_id) is not breaker.endpoint or breaker.is_stale:
                    del self._by_id[endpoint_id]

    def _breaker_of(self, endpoint: Endpoint) -> _Breaker:
        breaker = self._by_id.get(endpoint.id)
        if breaker is None or breaker.is_stale or breaker.endpoint is not endpoint:
            breaker = self._by_id[endpoint.id] = _Breaker(endpoint, _epoch_of(endpoint))
        return breaker


def pick_around(
    pool: Pool,
    breakers: Breakers,
    request: InferenceRequest,
    exclude: frozenset[str],
    now_s: float,
) -> Decision:
    """A pick that leaves out engines whose breaker is open, unless nobody else is left.

    Raises as `Pool.pick`.
    """
    blocked = breakers.blocked(now_s)
    try:
        decision = pool.pick(request, now_s, exclude | blocked)
    except ApiError:
        if not blocked:
            raise
        decision = pool.pick(request, now_s, exclude)
    breakers.on_pick(decision.endpoint, now_s)
    return decision


def _epoch_of(endpoint: Endpoint) -> bytes:
    return endpoint.info.epoch if endpoint.info is not None else b""
