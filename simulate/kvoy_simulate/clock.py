"""Virtual time: what is to happen, in order of time, and of being asked for at equal times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class VirtualClock:
    """One thread, no waiting. An action that is due no more has to notice that itself."""

    __slots__ = ("_heap", "_num_asked", "now_s", "num_done")

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.num_done = 0
        """Actions done so far."""
        self._num_asked = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []

    def time(self) -> float:
        """Now, for those that take a clock."""
        return self.now_s

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Once it is `time_s`, or at once if it is already."""
        self._num_asked += 1
        time_s = max(time_s, self.now_s)
        heappush(self._heap, (time_s, self._num_asked, action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        self._num_asked += 1
        heappush(self._heap, (self.now_s + delay_s, self._num_asked, action, arguments))

    def run(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Do everything that is due through `until_s`, or until `is_over` after some action."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, arguments = heappop(heap)
            action(*arguments)
            self.num_done += 1
            if is_over():
                return
        self.now_s = max(self.now_s, until_s)
