"""`reconcile(key)`: the frame around the story of a service or router: times, failures, lines.

The stories themselves are in `reconcile_service` and `reconcile_router`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping

from kvoy_operator.api_errors import ApiFailure, ApiRefusal, ApiUnreachable
from kvoy_operator.metrics import Metrics
from kvoy_operator.record import Key
from kvoy_operator.work_queue import RetryLater

log = logging.getLogger(__name__)

_LACK_S = 15.0
"""A right that is missing is told when it has been missing for so long."""

Story = Callable[[Key], Awaitable[float | None]]
"""Seconds until the key wants to be looked at again; None: when something changes. Raises
`Gone` for a resource that is no more, ApiFailure for what may pass."""


class Gone(Exception):
    """There is no such resource, or it is on its way out: nothing to do, garbage collection does
    it."""


def soonest(*delays_s: float | None) -> float | None:
    """The first that is due; None: nothing is."""
    return min((delay_s for delay_s in delays_s if delay_s is not None), default=None)


class Reconciler:
    """The work of the queue."""

    def __init__(
        self,
        stories: Mapping[str, Story],
        metrics: Metrics,
        resync_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stories` by kind."""
        self._stories = stories
        self._metrics = metrics
        self._resync_s = resync_s
        self._clock = clock
        self._failing: dict[Key, str] = {}
        self._lacking_since_s: dict[Key, float] = {}

    async def __call__(self, key: Key) -> float | None:
        """Seconds until the next look. Raises RetryLater."""
        started_s = self._clock()
        result = "defect"
        try:
            delay_s = await self._stories[key.kind](key)
            result = "ok"
        except Gone:
            result = "ok"
            self._recovered(key)
            return None
        except ApiFailure as error:
            result = "retry"
            if isinstance(error, ApiRefusal) and error.is_namespace_terminating:
                # Everything here goes away, and nothing can be created: no error, no line.
                return self._resync_delay_s()
            self._report(key, error)
            raise RetryLater(str(error), error.retry_after_s) from error
        finally:
            self._metrics.reconciles.labels(key.kind, result).inc()
            self._metrics.reconcile_seconds.labels(key.kind).observe(self._clock() - started_s)
        self._recovered(key)
        return soonest(delay_s, self._resync_delay_s())

    def _resync_delay_s(self) -> float:
        """Spread, so that resources that were created together do not stay together."""
        return self._resync_s * random.uniform(0.9, 1.1)

    def _report(self, key: Key, error: ApiFailure) -> None:
        """A line when a resource begins to fail, or fails otherwise. That the server is away is
        said once for all, by who watches the calls; a conflict is everyday."""
        message = str(error)
        if self._failing.get(key) == message or self._is_recent_lack(key, error):
            return
        is_known = isinstance(error, ApiUnreachable) or (
            isinstance(error, ApiRefusal) and error.is_conflict
        )
        if not is_known:
            self._failing[key] = message
        level = logging.DEBUG if is_known else logging.WARNING
        log.log(level, "reconcile fails", extra={"resource": str(key), "error": message})

    def _is_recent_lack(self, key: Key, error: ApiFailure) -> bool:
        """In a namespace that is being deleted, the operator's role may go before the services."""
        if not (isinstance(error, ApiRefusal) and error.is_missing_right):
            return False
        now_s = self._clock()
        return now_s - self._lacking_since_s.setdefault(key, now_s) < _LACK_S

    def _recovered(self, key: Key) -> None:
        self._lacking_since_s.pop(key, None)
        if self._failing.pop(key, None) is not None:
            log.info("reconcile works again", extra={"resource": str(key)})
