"""Flow control: requests wait here, in a fair order, rather than in an engine's queue.

A request goes on while the fleet of its model has room; what a router holds back it can still send
to the best engine, in any order, or refuse in time. One `FlowQueue` for each line. Pure: whoever
runs it (the gate in a router, the fleet in virtual time) brings the time, and calls `next` until it
says None whenever an engine may have more room than before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvoy_contract.errors import ApiError
from kvoy_router.flow_queue import FlowQueue
from kvoy_router.flow_ticket import FlowLimits, Line, Ticket

MAX_IDLE_LINES = 256
"""Queues that are kept while nothing of theirs is here."""


class Room(Protocol):
    def wait_s(self, line: Line, now_s: float, enough_s: float) -> float | None:
        """How long a new request would wait at the engine that would begin with it first, or at
        any that would within `enough_s`. None while no engine serves the model."""


class FlowControl:
    def __init__(
        self, room: Room, limits: FlowLimits, on_refused: Callable[[Ticket, ApiError], None]
    ) -> None:
        """`on_refused` hears of each ticket that waited and does so no longer: it has ended."""
        self.limits = limits
        self._room = room
        self._on_refused = on_refused
        self._queues: dict[Line, FlowQueue] = {}
        self._gone: set[str] = set()
        """Models that there are no more, while something of theirs is still under way."""

    def use_limits(self, limits: FlowLimits) -> None:
        """From now on. Whoever waits keeps its place, also beyond a new bound."""
        self.limits = limits
        for queue in self._queues.values():
            queue.use_limits(limits)

    def enter(self, ticket: Ticket, now_s: float) -> bool:
        """True: it goes on at once. False: it waits for `next`.

        Raises Saturated, or Unavailable while no engine serves the model.
        """
        line = ticket.line
        queue = self._queues.get(line)
        if queue is None:
            queue = self._new_queue(line)
        if self._gone:
            self._gone.discard(line.model)
        wait = self._wait(line, now_s)
        if queue.pass_at_once(ticket, now_s, wait):
            return True
        displaced = queue.add(ticket, now_s, wait)
        if displaced is not None:
            self._on_refused(displaced, queue.displaced_error(displaced, now_s))
        return False

    def next(self, line: Line, now_s: float) -> Ticket | None:
        """The ticket that goes on now. It has to `start` or `end` before there is another."""
        queue = self._queues.get(line)
        if queue is None or not len(queue):
            return None
        return queue.next(now_s, self._wait(line, now_s))

    def start(self, ticket: Ticket, tokens: float | None = None) -> None:
        """Its load is reserved at an engine; `tokens`: what it costs, where that is known now."""
        self._queues[ticket.line].start(ticket, tokens)

    def correct(self, ticket: Ticket, tokens: float) -> None:
        """What it costs is known better than at `start`."""
        self._queues[ticket.line].correct(ticket, tokens)

    def end(self, ticket: Ticket, now_s: float) -> None:
        """It is over, wherever it was; for every ticket that `enter` has let in."""
        line = ticket.line
        queue = self._queues.get(line)
        if queue is not None:
            queue.end(ticket, now_s)
            if line.model in self._gone:
                self.forget(line.model)

    def forget(self, model: str) -> None:
        """There is no such model any more: its queues go with the last request of each."""
        for line in [line for line in self._queues if line.model == model]:
            if self._queues[line].is_idle:
                del self._queues[line]
        if any(line.model == model for line in self._queues):
            self._gone.add(model)
        else:
            self._gone.discard(model)

    def expire(self, now_s: float) -> None:
        """Refuse those that have waited too long; `on_refused` hears of them."""
        for line in self.waiting_lines():
            queue = self._queues[line]
            for ticket, error in queue.expire(now_s, self._wait(line, now_s)):
                self._on_refused(ticket, error)

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def waiting_lines(self) -> list[Line]:
        return [line for line, queue in self._queues.items() if len(queue)]

    def queues(self) -> Iterable[tuple[Line, FlowQueue]]:
        """For gauges."""
        return self._queues.items()

    def check_integrity(self) -> None:
        for queue in self._queues.values():
            queue.check_integrity()

    def _wait(self, line: Line, now_s: float) -> float | None:
        limits = self.limits
        enough_s = limits.max_engine_wait_s * limits.shared_wait
        wait_s = self._room.wait_s(line, now_s, enough_s)
        return None if wait_s is None else wait_s / limits.max_engine_wait_s

    def _new_queue(self, line: Line) -> FlowQueue:
        if len(self._queues) >= MAX_IDLE_LINES:
            self._queues = {key: queue for key, queue in self._queues.items() if not queue.is_idle}
        queue = self._queues[line] = FlowQueue(self.limits)
        return queue
