"""A deduplicating work queue: a key waits at most once and is worked on by one worker at a time.

Knows neither Kubernetes nor what the work is: handlers add keys, `work` returns when to look at the
key again. Owned by one event loop; every time is that loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential, with jitter so that keys which failed together do not come back together."""

    first_s: float = 0.5
    max_s: float = 30.0
    """A server that fails many calls at random fails most attempts of many calls, and each gets a
    little further: longer pauses would make minutes of it. A thousand keys that all fail cost some
    fifty attempts a second."""

    def delay_s(self, num_failures: int, jitter: float) -> float:
        """Seconds before the next try; `jitter` in [0, 1) takes up to half of the full delay."""
        full = min(self.max_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return full * (1.0 - jitter / 2)


class RetryLater(Exception):
    """Raised by work that failed and has said so.

    With `delay_s` the key is held back for that long, whatever is added meanwhile: the server asked
    for it. Without, the backoff decides, and an `add` brings it forward.
    """

    def __init__(self, message: str, delay_s: float | None = None) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class WorkQueue(Generic[K]):
    """`add` from anywhere in the loop; `run` works until it is cancelled.

    Keys added while `run` is not running are dropped: who starts it adds everything.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        num_workers: int,
        turn_s: float = 0.0,
        backoff: Backoff | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`work` returns the seconds until it wants the key again, or None: not by itself.

        Within its first `turn_s` seconds a work is alone among the young: what makes the server
        busy is then not done four times at once, each four times slower, and what waits for
        something slow holds nobody up for longer.
        """
        self._work = work
        self._num_workers = num_workers
        self._turn_s = turn_s
        self._turn = asyncio.Lock()
        self._backoff = backoff or Backoff()
        self._jitter = jitter
        self._is_open = False
        self._ready: asyncio.Queue[K] = asyncio.Queue()  # bounded: each key is in it at most once
        self._ready_since: dict[K, float] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._running: set[K] = set()
        self._again: dict[
            K, float
        ] = {}  # keys added while they are worked on, and when they are due
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}

    @property
    def depth(self) -> int:
        """Keys that are due and wait for a worker."""
        return len(self._ready_since)

    @property
    def oldest_age_s(self) -> float:
        """How long the key that waits longest has been due."""
        if not self._ready_since:
            return 0.0
        # Insertion order is the order of becoming due.
        return asyncio.get_running_loop().time() - next(iter(self._ready_since.values()))

    @property
    def num_failing(self) -> int:
        return len(self._failures)

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Have `key` worked on in `delay_s` seconds, or earlier if it is due earlier already."""
        if not self._is_open:
            return
        now = asyncio.get_running_loop().time()
        due = max(now + delay_s, self._not_before.get(key, 0.0))
        if key in self._running:
            self._again[key] = min(due, self._again.get(key, due))
        elif key not in self._ready_since:
            self._schedule(key, due, now)

    async def run(self) -> None:
        """Work until cancelled; what then waits is forgotten."""
        self._is_open = True
        try:
            async with asyncio.TaskGroup() as workers:
                for number in range(self._num_workers):
                    workers.create_task(self._run_worker(), name=f"worker {number}")
        finally:
            self._close()

    def _close(self) -> None:
        self._is_open = False
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._ready_since.clear()
        self._ready = asyncio.Queue()
        self._again.clear()
        self._failures.clear()
        self._not_before.clear()

    def _schedule(self, key: K, due: float, now: float) -> None:
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
            del self._timers[key]
        if due <= now:
            self._make_ready(key)
        else:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_at(due, self._make_ready, key)

    def _make_ready(self, key: K) -> None:
        self._timers.pop(key, None)
        self._ready_since[key] = asyncio.get_running_loop().time()
        self._ready.put_nowait(key)

    async def _run_worker(self) -> None:
        while True:
            async with self._turn_of_one() as key:
                self._running.add(key)
                try:
                    delay_s = await self._try(key)
                finally:
                    self._running.discard(key)
            self._finish(key, delay_s)

    @asynccontextmanager
    async def _turn_of_one(self) -> AsyncIterator[K]:
        """The key that is next, and the turn until `turn_s` later or the end of the block."""
        await self._turn.acquire()
        turn = contextlib.ExitStack()
        turn.callback(self._turn.release)
        with turn:
            key = await self._ready.get()
            del self._ready_since[key]
            self._not_before.pop(key, None)
            # Closed twice, it releases once.
            timer = asyncio.get_running_loop().call_later(self._turn_s, turn.close)
            try:
                yield key
            finally:
                timer.cancel()

    async def _try(self, key: K) -> float | None:
        """Work on `key`; the seconds until it is due again."""
        try:
            delay_s = await self._work(key)
        except RetryLater as error:
            backoff_s = self._count_failure(key)
            if error.delay_s is None:
                return backoff_s
            self._not_before[key] = asyncio.get_running_loop().time() + error.delay_s
            return error.delay_s
        except Exception:
            # Work reports its own failures; what arrives here is a defect, worth a traceback.
            log.exception("work failed", extra={"key": str(key)})
            return self._count_failure(key)
        self._failures.pop(key, None)
        return delay_s

    def _count_failure(self, key: K) -> float:
        """The seconds of backoff that one more failure of `key` earns."""
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._backoff.delay_s(self._failures[key], self._jitter())

    def _finish(self, key: K, delay_s: float | None) -> None:
        again = self._again.pop(key, None)
        now = asyncio.get_running_loop().time()
        dues = [
            due for due in (again, None if delay_s is None else now + delay_s) if due is not None
        ]
        if dues:
            self._schedule(key, max(min(dues), self._not_before.get(key, 0.0)), now)
