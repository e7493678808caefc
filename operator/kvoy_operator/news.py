"""Asks for Events about what is stuck, and remembers the answers until it no longer is."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoy_operator.cluster import Cluster
from kvoy_operator.observed import Observed
from kvoy_operator.record import Key
from kvoy_operator.stuck import LOOK_S, PATIENCE_S, News, Stuck, latest_news, stuck_since, with_news

_MAX_ASKED = 4
"""About so many at one look: a status tells of one."""


class Newsroom:
    """What has been heard, by service or router. Lost with the process, and asked for anew."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._clock = clock
        self._heard: dict[Key, dict[Stuck, News]] = {}
        self._asked_s: dict[Key, float] = {}

    async def refresh(self, key: Key, observed: Observed) -> float | None:
        """Ask about what is stuck; seconds until it is worth another look. Raises ApiFailure."""
        since_s = stuck_since(observed)
        if not since_s:
            self.forget(key)
            return None
        now_s = self._clock()
        heard = self._heard.setdefault(key, {})
        for stuck in [stuck for stuck in heard if stuck not in since_s]:
            del heard[stuck]
        due = {stuck: at_s for stuck, at_s in since_s.items() if now_s - at_s >= PATIENCE_S}
        if not due:
            return PATIENCE_S - (now_s - min(since_s.values()))
        wait_s = self._asked_s.get(key, 0.0) + LOOK_S - now_s
        if wait_s > 0:
            return wait_s
        self._asked_s[key] = now_s
        for stuck, at_s in sorted(due.items(), key=lambda each: each[1])[:_MAX_ASKED]:
            events = await self._cluster.warnings(key.namespace, *stuck)
            news = latest_news(events, at_s)
            if news is None:
                heard.pop(stuck, None)
            else:
                heard[stuck] = news
        return LOOK_S

    def forget(self, key: Key) -> None:
        self._heard.pop(key, None)
        self._asked_s.pop(key, None)

    def tell(self, key: Key, observed: Observed) -> Observed:
        """With what has been heard."""
        heard = self._heard.get(key)
        return with_news(observed, heard) if heard else observed
