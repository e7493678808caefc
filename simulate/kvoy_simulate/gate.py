"""Flow control at a router's door, in virtual time: who waits, and when they go on.

The rules are those of `kvoy_router.flow`; the looks at the fleet come as often as
`kvoy_router.flow_gate` takes them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoy_contract.errors import ApiError
from kvoy_router.flow import FlowControl
from kvoy_router.flow_gate import LOOK_S
from kvoy_router.flow_room import PoolRoom
from kvoy_router.flow_ticket import FlowLimits, Line, Ticket
from kvoy_router.lease import Lease
from kvoy_router.pool import Pool
from kvoy_simulate.clock import VirtualClock
from kvoy_simulate.job import Job

EXPIRE_S = 0.1


class VirtualGate:
    def __init__(
        self,
        clock: VirtualClock,
        pool: Pool,
        blocked: Callable[[float], frozenset[str]],
        model: str,
        limits: FlowLimits,
        go_on: Callable[[Job], None],
        refuse: Callable[[Job], None],
    ) -> None:
        """`blocked`: as `PoolRoom` asks. `go_on` has a job that is still open pick its engine and
        call `start`, or ends it; `refuse` ends it."""
        self._clock = clock
        self._pool = pool
        self._line = Line(model)
        self._go_on = go_on
        self._refuse = refuse
        self.flow = FlowControl(PoolRoom(pool, blocked), limits, self._on_refused)
        self._waiting: dict[Ticket, Job] = {}
        self._tickets: dict[int, Ticket] = {}
        """By row, of all jobs that are inside or wait."""
        self._is_looking = False
        self._expired_s = 0.0

    def enter(self, job: Job) -> None:
        request, now_s = job.request, self._clock.now_s
        ticket = Ticket(
            self._line,
            tokens=request.num_prompt_tokens + self._expected_answer(job),
            arrived_s=now_s,
            tenant=request.tenant,
            priority=request.priority,
        )
        # Known before it enters: whom it displaces ends at once, and then it may be its turn.
        self._waiting[ticket] = job
        try:
            may_go_on = self.flow.enter(ticket, now_s)
        except ApiError:
            del self._waiting[ticket]
            self._refuse(job)
            return
        self._tickets[job.row] = ticket
        if may_go_on:
            del self._waiting[ticket]
            self._go_on(job)
            return
        self._look_later()
        self._let_go_on()

    def start(self, job: Job, lease: Lease) -> None:
        """The job's load is reserved at an engine, for the first time."""
        tokens = lease.prefill_tokens + self._expected_answer(job)
        ticket = self._tickets[job.row]
        job.engine_priority = ticket.engine_priority
        self.flow.start(ticket, tokens)
        self._let_go_on()

    def leave(self, job: Job) -> None:
        """The job has ended, wherever it was."""
        ticket = self._tickets.pop(job.row, None)
        if ticket is not None:
            self._waiting.pop(ticket, None)
            self.flow.end(ticket, self._clock.now_s)
            self._let_go_on()

    def _expected_answer(self, job: Job) -> float:
        return min(self._pool.output_tokens(self._line.model), float(job.request.max_tokens))

    def _let_go_on(self) -> None:
        """Not at once but next, as a woken task does; until it starts, no other may go on."""
        ticket = self.flow.next(self._line, self._clock.now_s)
        if ticket is not None:
            self._clock.after(0.0, self._go_on, self._waiting.pop(ticket))

    def _on_refused(self, ticket: Ticket, error: ApiError) -> None:
        self._refuse(self._waiting.pop(ticket))

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        now_s = self._clock.now_s
        if now_s - self._expired_s >= EXPIRE_S:
            self._expired_s = now_s
            self.flow.expire(now_s)
        self._let_go_on()
        if self.flow.num_waiting:
            self._look_later()
