"""Who uses how much of a model's engines, and whether that is more than its share.

A share is what the others use on average: of the tokens that have gone on lately, and of those that
are under way at this moment. Classes count by whether anything of them is under way or waits."""

from __future__ import annotations

import math

from kvoy_router.flow_rate import FadingSum
from kvoy_router.flow_ticket import Ticket

ACTIVE_S = 10.0
"""A tenant's share stays reserved so long after its last request ended: traffic comes in gaps."""
LATELY_S = 30.0
"""What went on so long ago counts for 1/e."""
DEVIATIONS = 3.0
"""A tenant has used more than its share lately when that is beyond what random arrivals would make
of it, in standard deviations: little in a tenant of many requests, much in one of few."""
TOLERANCE = 2.0
"""And now when it has so many times the tokens under way that the others have on average: a flood
is seen at once."""
_SIZE_MOVE = 0.05
MAX_IDLE = 1024
"""Tenants without a request whose share stays reserved."""


_LEAST_WEIGHT = 1e-6
"""Below what any tenant has, and above what rounding leaves."""


class _Usage:
    __slots__ = ("last_seen_s", "lately", "num_requests", "tokens", "was_beyond", "weight")

    def __init__(self) -> None:
        self.lately = FadingSum(LATELY_S)
        """Tokens that have gone on."""
        self.weight = 0.0
        self.num_requests = 0
        """Waiting or under way."""
        self.tokens = 0.0
        """Of requests under way."""
        self.last_seen_s = 0.0
        self.was_beyond = False
        """Used clearly more than its share lately. Until it is back to it, chance excuses one
        standard deviation only: one that always has requests waiting would send them in bursts,
        each as large as chance allows."""


class Shares:
    """`come`, then perhaps `start` and `correct`, then `go`, once for each request."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Usage] = {}
        self._classes: dict[int, int] = {}
        self._lately = FadingSum(LATELY_S)
        """Of all tenants."""
        self._size = 0.0
        """Moving mean of a request's tokens."""
        self._tokens = 0.0
        self._weight = 0.0
        """Of all tenants that are remembered."""

    @property
    def tokens(self) -> float:
        """Of all requests under way."""
        return self._tokens

    def tokens_of(self, tenant: str) -> float:
        usage = self._tenants.get(tenant)
        return 0.0 if usage is None else usage.tokens

    @property
    def is_idle(self) -> bool:
        return not self._classes

    def come(self, ticket: Ticket, now_s: float) -> None:
        usage = self._tenants.get(ticket.tenant)
        if usage is None:
            if len(self._tenants) >= MAX_IDLE:
                self.forget_idle(now_s)
            usage = self._tenants[ticket.tenant] = _Usage()
        self._weight += ticket.weight - usage.weight
        usage.weight = ticket.weight
        usage.num_requests += 1
        usage.last_seen_s = now_s
        self._classes[ticket.priority] = self._classes.get(ticket.priority, 0) + 1

    def start(self, ticket: Ticket, now_s: float) -> None:
        usage, tokens = self._tenants[ticket.tenant], ticket.tokens
        usage.lately.add(tokens, now_s)
        self._lately.add(tokens, now_s)
        self._size += _SIZE_MOVE * (tokens - self._size) if self._size else tokens
        self._add(ticket, tokens)

    def correct(self, ticket: Ticket, more_tokens: float) -> None:
        usage = self._tenants[ticket.tenant]
        # As if known when the latest request went on: shares forgive a second's difference.
        for lately in (usage.lately, self._lately):
            lately.value = max(lately.value + more_tokens, 0.0)
        self._add(ticket, more_tokens)

    def go(self, ticket: Ticket, now_s: float, *, was_under_way: bool) -> None:
        usage = self._tenants[ticket.tenant]
        usage.num_requests -= 1
        usage.last_seen_s = now_s
        left = self._classes.pop(ticket.priority) - 1
        if left:
            self._classes[ticket.priority] = left
        if was_under_way:
            self._add(ticket, -ticket.tokens)
        if not self._classes:
            # Nothing is under way: what rounding left goes with it.
            self._tokens = 0.0
            for other in self._tenants.values():
                other.tokens = 0.0

    def forget_idle(self, now_s: float) -> None:
        """Give back the shares of tenants that have gone; the most recent ones stay for a while."""
        idle = sorted(
            (usage.last_seen_s, name)
            for name, usage in self._tenants.items()
            if not usage.num_requests
        )
        num_too_many = len(idle) - MAX_IDLE // 2 if len(idle) >= MAX_IDLE else 0
        for position, (last_seen_s, name) in enumerate(idle):
            if position < num_too_many or last_seen_s < now_s - ACTIVE_S:
                del self._tenants[name]
        self._weight = sum(usage.weight for usage in self._tenants.values())
        self._lately.value = sum(usage.lately.at(now_s) for usage in self._tenants.values())

    def is_modest(self, ticket: Ticket, now_s: float) -> bool:
        """Whether nothing more important is here, and its tenant uses no more than its share; one
        that is alone has all of it."""
        if min(self._classes, default=ticket.priority) < ticket.priority:
            return False
        usage = self._tenants[ticket.tenant]
        others_weight = self._weight - usage.weight
        if others_weight < _LEAST_WEIGHT:
            return True
        ratio = usage.weight / others_weight
        now = (self._tokens - usage.tokens) * ratio
        if usage.tokens > TOLERANCE * now + self._noise(now):
            return False
        used = usage.lately.at(now_s)
        lately = (self._lately.at(now_s) - used) * ratio
        noise = self._noise(lately)
        if used > lately + noise:
            usage.was_beyond = True
        elif used <= lately:
            usage.was_beyond = False
        return used <= lately + (noise / DEVIATIONS if usage.was_beyond else noise)

    def _noise(self, share: float) -> float:
        """What random arrivals may add to so many tokens; at least as to one request's."""
        return DEVIATIONS * math.sqrt(max(share, self._size) * self._size)

    def check_integrity(self) -> None:
        assert abs(self._tokens - sum(u.tokens for u in self._tenants.values())) < 1e-3
        assert abs(self._weight - sum(u.weight for u in self._tenants.values())) < 1e-3
        requests = sum(usage.num_requests for usage in self._tenants.values())
        assert requests == sum(self._classes.values())
        assert all(self._classes.values())
        assert min((u.lately.value for u in self._tenants.values()), default=0.0) >= 0.0

    def _add(self, ticket: Ticket, tokens: float) -> None:
        self._tenants[ticket.tenant].tokens += tokens
        self._tokens += tokens
