"""`asyncio.timeout` as a plain context manager: every request has one, and two coroutines less are
a fifth of its cost.

A limit that comes late is put off once. An event loop with thousands of readable sockets may be
busy with them for seconds (libuv reads on while it finds a full batch, 48 times over), and looks at
its timers before it delivers what has come: an overloaded router would otherwise take its own
lateness for the silence of every engine.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

_LATE_S = 0.1
"""A timer that comes so long after its time says that the loop was busy."""


class TimeLimit:
    """Cancels the current task's block after `limit_s` and raises TimeoutError in its place."""

    __slots__ = ("_due_s", "_has_expired", "_limit_s", "_num_cancels", "_task", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._has_expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cut short"
        self._task = task
        self._num_cancels = task.cancelling()
        loop = task.get_loop()
        self._due_s = loop.time() + self._limit_s
        self._timer = loop.call_later(self._limit_s, self._come_due)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        # A cancellation from elsewhere, even at the same time, stays one.
        if (
            self._has_expired
            and self._task.uncancel() <= self._num_cancels
            and exc_type is asyncio.CancelledError
        ):
            raise TimeoutError from exc

    def _come_due(self) -> None:
        """As long as the loop was late, at most, what has come meanwhile gets to be seen."""
        loop = self._task.get_loop()
        late_s = loop.time() - self._due_s
        if late_s < _LATE_S:
            self._expire()
        else:
            self._timer = loop.call_later(min(late_s, self._limit_s), self._expire)

    def _expire(self) -> None:
        self._has_expired = True
        self._task.cancel()
