"""Whether the watches live: for each kind, when the API server last gave a sign of life.

kopf reconnects a quiet watch after a minute and a long one after some more. So a kind whose list or
watch has not been answered for longer than both together is stalled, whatever the reason: a cut
network without an error, a watch task that ended, a rule that is missing.

A watch may also be answered and bring nothing: a server whose cache is stuck, a task between the
stream and us that hangs. A resync sees that, from what it has to fetch itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp

from kvoy_operator.kinds import Kind

log = logging.getLogger(__name__)

SERVER_TIMEOUT_S = 180
"""How long one watch request may last: the server ends it, kopf goes on with the next."""
INACTIVITY_TIMEOUT_S = 70
"""The server sends a bookmark every minute; a watch without one is dead."""
DEAF_AFTER = 2
"""Resyncs in a row that found objects which a watch had not brought; one may have been early."""
STALLED_AFTER_S = SERVER_TIMEOUT_S + 2 * INACTIVITY_TIMEOUT_S


@dataclass(slots=True)
class _Watch:
    kind: str
    last_sign_s: float
    last_status: int = 0


class WatchHealth:
    """Written by kopf's thread, read by the operator's. Each namespace of a kind counts apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[str, _Watch] = {}  # by URL path
        self._num_missed: Counter[str] = Counter()  # resyncs, by kind
        self.num_lists = 0
        """Pages of lists so far. A list after the first one means that a watch had lost its place,
        and does not tell what was deleted meanwhile."""

    def expect(self, kind: Kind, namespace: str | None) -> None:
        """From now on `kind` is watched there; None: in all namespaces."""
        with self._lock:
            self._watches[kind.path(namespace)] = _Watch(kind.name, self._clock())

    def dismiss(self, kind: Kind, namespace: str | None) -> None:
        """`kind` is no longer watched there."""
        with self._lock:
            self._watches.pop(kind.path(namespace), None)
            del self._num_missed[kind.name]

    def missed(self, kinds: Collection[Kind]) -> None:
        """A resync has found objects of these kinds that no watch had brought."""
        with self._lock:
            self._num_missed.update(kind.name for kind in kinds)

    def saw_event(self, kind: Kind, namespace: str) -> None:
        with self._lock:
            del self._num_missed[kind.name]
            watch = self._watches.get(kind.path(namespace)) or self._watches.get(kind.path(None))
            if watch is not None:
                watch.last_sign_s = self._clock()

    def saw_answer(self, path: str, status: int, *, is_list: bool = False) -> None:
        """A list or watch at `path` was answered, which is worth a line when it changes."""
        with self._lock:
            watch = self._watches.get(path)
            if watch is None:
                return
            self.num_lists += is_list
            if status < 400:
                watch.last_sign_s = self._clock()
            before, watch.last_status = watch.last_status, status
        if status >= 400 and status != before:
            log.warning("watch refused", extra={"path": path, "status": status})
        elif status < 400 <= before:
            log.info("watch works again", extra={"path": path})

    def ages_s(self) -> dict[str, float]:
        """Seconds since the last sign of life, by kind: of its most silent watch."""
        now = self._clock()
        ages: dict[str, float] = {}
        with self._lock:
            for watch in self._watches.values():
                ages[watch.kind] = max(ages.get(watch.kind, 0.0), now - watch.last_sign_s)
        return ages

    def stalled(self) -> list[str]:
        """Kinds with a watch that is dead or deaf."""
        dead = {name for name, age_s in self.ages_s().items() if age_s > STALLED_AFTER_S}
        with self._lock:
            deaf = {name for name, count in self._num_missed.items() if count >= DEAF_AFTER}
        return sorted(dead | deaf)

    def trace(self, prefix: str) -> aiohttp.TraceConfig:
        """Hooks for the session that kopf watches with; `prefix` is the path that the server's own
        URL begins with."""
        trace = aiohttp.TraceConfig()

        async def on_end(
            _session: aiohttp.ClientSession,
            _context: SimpleNamespace,
            params: aiohttp.TraceRequestEndParams,
        ) -> None:
            path, is_list = params.url.path.removeprefix(prefix), "watch" not in params.url.query
            self.saw_answer(path, params.response.status, is_list=is_list)

        trace.on_request_end.append(on_end)
        return trace
