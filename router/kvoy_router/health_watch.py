"""Looks for hanging engines several times a second, and frees the requests that wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from kvoy_router.breaker import Breakers
from kvoy_router.endpoint import Endpoint
from kvoy_router.errors import EngineHung
from kvoy_router.hang_watch import TICK_S, Hang, HangWatch
from kvoy_router.pool import Pool

log = logging.getLogger(__name__)


class Exchanges(Protocol):
    """The requests that are with engines now."""

    def fail_quiet(self, address: str, quiet_s: float, min_age_s: float, error: Exception) -> int:
        """End those at an engine that are silent for `quiet_s` and at least `min_age_s` old."""
        ...


class HealthWatch:
    """`tick` does no I/O of its own."""

    def __init__(
        self,
        pool: Pool,
        clients: Exchanges,
        breakers: Breakers,
        now_s: Callable[[], float],
        silence_s: float,
    ) -> None:
        """`silence_s`: see `HangWatch`; a request waits at least so long for a byte."""
        self._pool = pool
        self._clients = clients
        self._breakers = breakers
        self._now_s = now_s
        self._hangs = HangWatch(silence_s)
        self._known: set[Endpoint] = set()

    def use_silence(self, silence_s: float) -> None:
        """From now on."""
        self._hangs.silence_s = silence_s

    async def run(self) -> None:
        """Never returns; cancel it."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        now_s = self._now_s()
        endpoints = self._pool.endpoints
        self._breakers.keep_only(endpoints)
        hangs = self._hangs.tick(endpoints, now_s)
        for hang in hangs:
            self._breakers.trip(hang.endpoint, now_s)
            if hang.endpoint not in self._known:
                log.warning(
                    "engine hangs", extra={"engine": hang.endpoint.name, "reason": hang.reason}
                )
            if self._has_other(hang.endpoint, endpoints):
                self._free(hang, now_s)
        self._known = {hang.endpoint for hang in hangs}

    def _free(self, hang: Hang, now_s: float) -> None:
        """Requests that were sent later knew of the hang: there was nobody else for them."""
        self._clients.fail_quiet(
            hang.endpoint.address,
            self._hangs.silence_s,
            now_s - hang.since_s,
            EngineHung(hang.reason),
        )

    def _has_other(self, hung: Endpoint, endpoints: Sequence[Endpoint]) -> bool:
        """Whether another engine of the model could do better. Otherwise its requests wait on: it
        may come back, and nothing else would help them."""
        return hung.info is not None and any(
            other is not hung
            and other.is_routable
            and other.info is not None
            and other.info.served_model == hung.info.served_model
            and not self._hangs.is_hung(other)
            for other in endpoints
        )
