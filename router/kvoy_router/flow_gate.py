"""Flow control for tasks: a request's task waits at the gate until its turn has come.

The rules are `flow`'s. This wakes tasks, looks at the fleet again whenever a request has ended or
reserved its load, and a few times a second while anybody waits, since reports come at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from kvoy_contract.errors import ApiError
from kvoy_router.flow import FlowControl, Room
from kvoy_router.flow_ticket import FlowLimits, Line, Ticket

LOOK_S = 0.02
"""Between two looks at the fleet while anybody waits: less than a decode step of most engines."""
_LOOKS_PER_SWEEP = 10
"""Whose time is over is looked for so much less often."""


class FlowGate:
    """One for all models of a router; lives in one event loop."""

    def __init__(self, room: Room, limits: FlowLimits, now_s: Callable[[], float]) -> None:
        self.flow = FlowControl(room, limits, self._on_refused)
        self._now_s = now_s
        self._futures: dict[Ticket, asyncio.Future[ApiError | None]] = {}
        """Of those that wait: None when they may go on, else why not."""
        self._timer: asyncio.TimerHandle | None = None
        self._num_looks = 0

    def admit(self, ticket: Ticket) -> Admission:
        """`async with gate.admit(ticket) as admission:` waits for the ticket's turn; inside, the
        request picks its engine and calls `admission.start`. Raises Saturated, Unavailable or
        DeadlineExceeded instead of entering. At the end all that it took is given back."""
        return Admission(self, ticket)

    async def enter(self, ticket: Ticket) -> bool:
        """As `admit`; whoever it lets in calls `leave`. Returns whether it had to wait."""
        if self.flow.enter(ticket, self._now_s()):
            return False
        future = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self._look_later()
        self._let_go_on(ticket.line)
        has_waited = not future.done()
        try:
            error = await future
        except asyncio.CancelledError:
            self.leave(ticket)
            raise
        finally:
            del self._futures[ticket]
        if error is not None:
            raise error
        return has_waited

    def start(self, ticket: Ticket, tokens: float | None = None) -> None:
        """The ticket's load is reserved at an engine; the next one may look for room."""
        self.flow.start(ticket, tokens)
        self._let_go_on(ticket.line)

    def leave(self, ticket: Ticket) -> None:
        self.flow.end(ticket, self._now_s())
        self._let_go_on(ticket.line)

    def _let_go_on(self, line: Line) -> None:
        while (ticket := self.flow.next(line, self._now_s())) is not None:
            future = self._futures[ticket]
            if not future.done():
                future.set_result(None)
                return
            # Its client has gone, which its task has not heard of yet.
            self.flow.end(ticket, self._now_s())

    def _on_refused(self, ticket: Ticket, error: ApiError) -> None:
        future = self._futures[ticket]
        if not future.done():
            future.set_result(error)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._num_looks += 1
        if self._num_looks % _LOOKS_PER_SWEEP == 0:
            self.flow.expire(self._now_s())
        for line in self.flow.waiting_lines():
            self._let_go_on(line)
        if self.flow.num_waiting:
            self._look_later()


class Admission:
    """One ticket's way through the gate."""

    __slots__ = ("_gate", "has_waited", "prefill_tokens", "ticket")

    def __init__(self, gate: FlowGate, ticket: Ticket) -> None:
        self._gate = gate
        self.ticket = ticket
        self.has_waited = False
        """For its turn."""
        self.prefill_tokens = 0
        """To compute at the engine that was picked; for whoever calls `correct`."""

    def start(self, tokens: float | None = None) -> None:
        """Call it once, when an engine is picked; `tokens`: what it costs as known then."""
        self._gate.start(self.ticket, tokens)

    def correct(self, tokens: float) -> None:
        """What it costs is known better, as at its end; only after `start`."""
        self._gate.flow.correct(self.ticket, tokens)

    async def __aenter__(self) -> Admission:
        self.has_waited = await self._gate.enter(self.ticket)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.leave(self.ticket)
