"""The waiting requests of one priority class: fair between tenants by tokens, first come first
served within a tenant.

Each tenant has a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, algorithm 2): what it has been served, divided by its weight. The backlogged tenant with
the least one goes first. A tenant that comes back is lifted to the least of those that wait, so
that nobody saves up service by being idle; with nobody waiting, to where the last one stood, as
start-time fair queueing does (Goyal, Vin and Cheng, SIGCOMM 1996). So between any two tenants that
both wait all the time, served tokens by weight differ by at most the largest request of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvoy_router.flow_ticket import Ticket

MAX_REMEMBERED = 4096
"""Counters of tenants that have nothing waiting; forgetting one forgives at most its lead."""


class _Tenant:
    __slots__ = ("counter", "tickets", "waiting_tokens")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.waiting_tokens = 0.0


class FairQueue:
    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._backlogged: dict[str, _Tenant] = {}
        self._order: OrderedDict[Ticket, None] = OrderedDict()
        """All that wait, oldest first."""
        self.tokens = 0.0
        """Of all that wait."""
        self._floor = 0.0
        """Where the counter of a tenant begins that comes while nobody waits."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Ticket]:
        """All that wait, oldest first."""
        return iter(self._order)

    def num_waiting(self, tenant: str) -> int:
        backlog = self._backlogged.get(tenant)
        return 0 if backlog is None else len(backlog.tickets)

    def waiting_tokens(self, tenant: str) -> float:
        backlog = self._backlogged.get(tenant)
        return 0.0 if backlog is None else backlog.waiting_tokens

    @property
    def oldest(self) -> Ticket | None:
        return next(iter(self._order), None)

    def push(self, ticket: Ticket) -> None:
        tenant = self._tenant(ticket.tenant)
        if not tenant.tickets:
            tenant.counter = max(tenant.counter, self._least())
            self._backlogged[ticket.tenant] = tenant
        tenant.tickets[ticket] = None
        tenant.waiting_tokens += ticket.tokens
        self._order[ticket] = None
        self.tokens += ticket.tokens

    def choose(self, is_allowed: Callable[[Ticket], bool]) -> Ticket | None:
        """Whose turn it is among those whose tenant's first request may go on; it stays."""
        best: Ticket | None = None
        least = 0.0
        for tenant in self._backlogged.values():
            if best is not None and tenant.counter >= least:
                continue
            first = next(iter(tenant.tickets))
            if is_allowed(first):
                best, least = first, tenant.counter
        return best

    def take(self, ticket: Ticket) -> None:
        """It goes on now: off the queue, and its tokens on its tenant's counter."""
        tenant = self._tenants[ticket.tenant]
        self._floor = max(self._floor, tenant.counter)
        tenant.counter += ticket.tokens / ticket.weight
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It waits no longer, and costs nothing."""
        tenant = self._tenants[ticket.tenant]
        del tenant.tickets[ticket]
        del self._order[ticket]
        tenant.waiting_tokens -= ticket.tokens
        self.tokens = self.tokens - ticket.tokens if self._order else 0.0
        if not tenant.tickets:
            tenant.waiting_tokens = 0.0
            del self._backlogged[ticket.tenant]

    def charge(self, ticket: Ticket) -> None:
        """It goes on without having waited."""
        tenant = self._tenant(ticket.tenant)
        start = max(tenant.counter, self._least())
        self._floor = max(self._floor, start)
        tenant.counter = start + ticket.tokens / ticket.weight

    def correct(self, ticket: Ticket, more_tokens: float) -> None:
        """What went on costs more, or less, than was thought."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None:
            tenant.counter += more_tokens / ticket.weight

    def largest_tenant(self) -> str:
        """Who has most tokens waiting, by weight of its requests' tenant. Only while some wait."""

        def size(item: tuple[str, _Tenant]) -> float:
            _, tenant = item
            return tenant.waiting_tokens / next(iter(tenant.tickets)).weight

        return max(self._backlogged.items(), key=size)[0]

    def youngest_of(self, tenant: str) -> Ticket:
        return next(reversed(self._backlogged[tenant].tickets))

    def check_integrity(self) -> None:
        waiting = [t for tenant in self._tenants.values() for t in tenant.tickets]
        assert len(waiting) == len(self._order)
        assert set(waiting) == set(self._order)
        assert self._backlogged == {k: t for k, t in self._tenants.items() if t.tickets}
        for tenant in self._backlogged.values():
            total = sum(t.tokens for t in tenant.tickets)
            assert abs(tenant.waiting_tokens - total) <= 1e-6 * max(1.0, total)
        assert abs(self.tokens - sum(t.tokens for t in waiting)) <= 1e-6 * max(1.0, self.tokens)

    def _least(self) -> float:
        """The least counter of those that wait, else where the last one that was served stood."""
        counters = (tenant.counter for tenant in self._backlogged.values())
        return min(counters, default=self._floor)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) - len(self._backlogged) >= MAX_REMEMBERED:
                self._tenants = dict(self._backlogged)
            tenant = self._tenants[name] = _Tenant(self._floor)
        return tenant
