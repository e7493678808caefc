"""The bounded queue of one model: what may go on now, what waits, what is turned away.

Strict priority between classes, with a small share for requests of lower ones that have waited
long; fair between tenants inside a class (`flow_fair`). `wait` in these rules is the fleet's: how
long the engine that would begin first makes a new request wait, as a share of the limit; None
while no engine serves the model at all. Pure: time and wait come as arguments."""

from __future__ import annotations

from collections.abc import Iterator

from kvoy_contract.errors import ApiError, DeadlineExceeded, Saturated, Unavailable
from kvoy_router.flow_fair import FairQueue
from kvoy_router.flow_rate import TokenRate
from kvoy_router.flow_share import Shares
from kvoy_router.flow_ticket import FlowLimits, Stage, Ticket

MAX_EMPTY_CLASSES = 64
"""Classes whose tenants' counters are kept while nothing of them waits."""
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_HELD_RETRY_S = 2.0
"""About how soon an engine's readiness shows."""


class FlowQueue:
    def __init__(self, limits: FlowLimits) -> None:
        self.limits = limits
        self.shares = Shares()
        self._classes: dict[int, FairQueue] = {}
        self._num_waiting = 0
        self._num_kept = 0
        """Requests that waited when the limits were last replaced."""
        self._chosen: Ticket | None = None
        """May go on and has not said what it reserves: until then nobody knows what is left."""
        self._strict_tokens = 0.0
        self._aged_tokens = 0.0
        self._rate = TokenRate()
        self._unserved_s: float | None = None
        """Since when no engine serves the model."""

    def use_limits(self, limits: FlowLimits) -> None:
        """From now on; what waits keeps its place."""
        self.limits = limits
        self._num_kept = self._num_waiting

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def waiting_tokens(self) -> float:
        return sum(queue.tokens for queue in self._classes.values())

    @property
    def is_idle(self) -> bool:
        return self.shares.is_idle

    def waiting(self) -> Iterator[Ticket]:
        """All that wait, by class, oldest first within each."""
        for priority in sorted(self._classes):
            yield from self._classes[priority]

    # Coming

    def pass_at_once(self, ticket: Ticket, now_s: float, wait: float | None) -> bool:
        """Let a new request go on where nobody waits and there is room; False changes nothing."""
        if self._num_waiting or self._chosen is not None or wait is None or wait >= 1.0:
            return False
        self.shares.come(ticket, now_s)
        if wait >= self.limits.shared_wait and not self.shares.is_modest(ticket, now_s):
            self.shares.go(ticket, now_s, was_under_way=False)
            return False
        self._class(ticket.priority).charge(ticket)
        self._choose(ticket, now_s)
        return True

    def add(self, ticket: Ticket, now_s: float, wait: float | None) -> Ticket | None:
        """Let a new request wait. Returns the one, less entitled, that lost its place to it.

        Raises Saturated, or Unavailable while no engine serves the model.
        """
        self._note_service(now_s, wait)
        displaced = self._make_place(ticket, now_s, wait)
        if displaced is not None:
            self._drop(displaced, now_s)
        self.shares.come(ticket, now_s)
        self._class(ticket.priority).push(ticket)
        self._num_waiting += 1
        ticket.stage = Stage.WAITING
        return displaced

    # Going on

    def next(self, now_s: float, wait: float | None) -> Ticket | None:
        """The one that goes on now, if any. It says by `start` what it takes, or ends, before the
        next one may."""
        self._note_service(now_s, wait)
        if not self._num_waiting or self._chosen is not None or wait is None or wait >= 1.0:
            return None
        has_plenty = wait < self.limits.shared_wait

        def is_allowed(ticket: Ticket) -> bool:
            is_aged = ticket.priority == first_aged
            return has_plenty or is_aged or self.shares.is_modest(ticket, now_s)

        aged = self._aged_class(now_s)
        first_aged = aged if self._is_turn_of_aged(aged) else None
        for priority in self._in_order(first_aged):
            queue = self._classes[priority]
            ticket = queue.choose(is_allowed)
            if ticket is not None:
                self._count_aged(ticket, aged)
                queue.take(ticket)
                self._num_waiting -= 1
                self._choose(ticket, now_s)
                return ticket
        return None

    def start(self, ticket: Ticket, tokens: float | None = None) -> None:
        """Its load is reserved at an engine; `tokens` is what it costs as known by then."""
        assert ticket.stage is Stage.CHOSEN
        assert self._chosen is ticket
        self._chosen = None
        ticket.stage = Stage.STARTED
        if tokens is not None:
            self.correct(ticket, tokens)

    def correct(self, ticket: Ticket, tokens: float) -> None:
        """What it costs is known better now; its tenant is charged the difference."""
        assert ticket.stage is Stage.STARTED
        more_tokens = tokens - ticket.tokens
        ticket.tokens = tokens
        self.shares.correct(ticket, more_tokens)
        self._class(ticket.priority).correct(ticket, more_tokens)

    def end(self, ticket: Ticket, now_s: float) -> None:
        """It is over, wherever it was: answered, failed, given up. May be called again."""
        if ticket.stage is Stage.WAITING:
            self._drop(ticket, now_s)
        elif ticket.stage in (Stage.CHOSEN, Stage.STARTED):
            if self._chosen is ticket:
                self._chosen = None
            ticket.stage = Stage.ENDED
            self.shares.go(ticket, now_s, was_under_way=True)

    def expire(self, now_s: float, wait: float | None) -> list[tuple[Ticket, ApiError]]:
        """Take out those that have waited too long, each with what to tell its client."""
        self._note_service(now_s, wait)
        self.shares.forget_idle(now_s)
        expired = [
            (ticket, error)
            for ticket in self.waiting()
            if (error := self._why_expired(ticket, now_s)) is not None
        ]
        for ticket, _ in expired:
            self._drop(ticket, now_s)
        return expired

    def displaced_error(self, ticket: Ticket, now_s: float) -> Saturated:
        """What to tell the client of a request that lost its place."""
        return self._full(
            ticket, now_s, "More entitled requests have filled the queue.", "displaced"
        )

    def check_integrity(self) -> None:
        for queue in self._classes.values():
            queue.check_integrity()
        self.shares.check_integrity()
        waiting = list(self.waiting())
        assert len(waiting) == self._num_waiting
        assert all(ticket.stage is Stage.WAITING for ticket in waiting)
        assert self._num_waiting <= max(
            self.limits.max_waiting, self.limits.max_held, self._num_kept
        )

    # Bounds

    def _make_place(self, ticket: Ticket, now_s: float, wait: float | None) -> Ticket | None:
        """Whom it displaces. Raises Saturated or Unavailable where there is no place for it."""
        limits = self.limits
        if wait is None:
            if limits.max_held_s <= 0.0 or self._num_waiting >= limits.max_held:
                raise _no_engine(ticket)
            return None
        queue = self._classes.get(ticket.priority)
        if queue is not None and len(queue) >= limits.max_waiting_per_priority:
            raise self._full(ticket, now_s, "The queue of its priority is full.", "priority_full")
        if self._num_of(ticket.tenant) >= limits.max_waiting_per_tenant:
            raise self._full(ticket, now_s, "Too many of your requests wait.", "tenant_full")
        if self._num_waiting < limits.max_waiting:
            return None
        victim = self._less_entitled_than(ticket)
        if victim is None:
            raise self._full(ticket, now_s, "The queue is full.", "queue_full")
        return victim

    def _less_entitled_than(self, ticket: Ticket) -> Ticket | None:
        """The youngest request of the tenant that waits with most, in the least important class;
        None unless that class is a lower one, or that tenant has more waiting than this one."""
        lowest = max((p for p, queue in self._classes.items() if len(queue)), default=None)
        if lowest is None or lowest < ticket.priority:
            return None
        queue = self._classes[lowest]
        largest = queue.largest_tenant()
        victim = queue.youngest_of(largest)
        if lowest > ticket.priority:
            return victim
        own = (queue.waiting_tokens(ticket.tenant) + ticket.tokens) / ticket.weight
        left = (queue.waiting_tokens(largest) - victim.tokens) / victim.weight
        return victim if left >= own else None

    def _num_of(self, tenant: str) -> int:
        return sum(queue.num_waiting(tenant) for queue in self._classes.values())

    def _full(self, ticket: Ticket, now_s: float, why: str, code: str) -> Saturated:
        return Saturated(
            f"The engines of the model `{ticket.model}` are busy. {why}",
            code=code,
            retry_after_s=self.retry_after_s(ticket.priority, now_s),
        )

    def retry_after_s(self, priority: int, now_s: float) -> float:
        """About how long until what waits now, at this priority or before it, has gone on."""
        ahead = sum(queue.tokens for p, queue in self._classes.items() if p <= priority)
        per_s = self._rate.per_s(now_s)
        wait_s = ahead / per_s if per_s > 0.0 else _LEAST_RETRY_S
        return min(max(wait_s, _LEAST_RETRY_S), _MOST_RETRY_S)

    # Order

    def _aged_class(self, now_s: float) -> int | None:
        """Of the classes below the first one that has any waiting, the one whose oldest request
        has waited longest, if too long."""
        oldest = {p: queue.oldest for p, queue in self._classes.items() if len(queue)}
        if len(oldest) < 2:
            return None
        del oldest[min(oldest)]
        arrived_s, priority = min((t.arrived_s, p) for p, t in oldest.items() if t is not None)
        return priority if now_s - arrived_s >= self.limits.age_s else None

    def _is_turn_of_aged(self, aged: int | None) -> bool:
        if aged is None:
            self._strict_tokens = self._aged_tokens = 0.0
            return False
        share = self.limits.aged_share
        return self._aged_tokens * (1.0 - share) <= self._strict_tokens * share

    def _in_order(self, first: int | None) -> list[int]:
        """Classes with anything waiting: `first` before all, then by priority."""
        order = [priority for priority, queue in self._classes.items() if len(queue)]
        return sorted(order, key=lambda priority: (priority != first, priority))

    def _count_aged(self, ticket: Ticket, aged: int | None) -> None:
        if aged is None:
            return
        if ticket.priority == aged:
            self._aged_tokens += ticket.tokens
        else:
            self._strict_tokens += ticket.tokens

    # Small steps

    def _choose(self, ticket: Ticket, now_s: float) -> None:
        ticket.stage = Stage.CHOSEN
        ticket.is_modest = self.shares.is_modest(ticket, now_s)
        self._chosen = ticket
        self.shares.start(ticket, now_s)
        self._rate.add(ticket.tokens, now_s)

    def _drop(self, ticket: Ticket, now_s: float) -> None:
        self._classes[ticket.priority].remove(ticket)
        self._num_waiting -= 1
        ticket.stage = Stage.ENDED
        self.shares.go(ticket, now_s, was_under_way=False)

    def _note_service(self, now_s: float, wait: float | None) -> None:
        if wait is not None:
            self._unserved_s = None
        elif self._unserved_s is None:
            self._unserved_s = now_s

    def _why_expired(self, ticket: Ticket, now_s: float) -> ApiError | None:
        if now_s >= ticket.deadline_s:
            return DeadlineExceeded("The request's time was over before an engine had room.")
        if self._unserved_s is not None:
            held_s = now_s - max(ticket.arrived_s, self._unserved_s)
            return _no_engine(ticket) if held_s >= self.limits.max_held_s else None
        if now_s - ticket.arrived_s >= self.limits.max_waiting_s:
            return self._full(ticket, now_s, "It waited too long.", "waited_too_long")
        return None

    def _class(self, priority: int) -> FairQueue:
        queue = self._classes.get(priority)
        if queue is None:
            if len(self._classes) >= MAX_EMPTY_CLASSES:
                self._classes = {p: q for p, q in self._classes.items() if len(q)}
            queue = self._classes[priority] = FairQueue()
        return queue


def _no_engine(ticket: Ticket) -> Unavailable:
    return Unavailable(
        f"No engine can serve the model `{ticket.model}` now.", retry_after_s=_HELD_RETRY_S
    )
