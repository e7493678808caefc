"""Whether a tenant uses more than its share, from what has gone on lately and what is under way."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from random import Random

import pytest

from kvoy_router.flow_share import LATELY_S, Shares
from kvoy_router.flow_ticket import Line, Stage, Ticket

STAY_S = 5.0
"""How long a request is under way."""


class Traffic:
    """Requests of several tenants at random times, all served at once."""

    def __init__(self, rates: dict[str, float], seed: int) -> None:
        self.random = Random(seed)
        self.shares = Shares()
        self.rates = rates
        self.now_s = 0.0
        self.arrivals = [(self._gap_s(tenant), tenant) for tenant in rates]
        heapq.heapify(self.arrivals)
        self.ends: list[tuple[float, int, Ticket]] = []
        self.asked: Counter[str] = Counter()
        self.beyond: Counter[str] = Counter()
        self.used: dict[str, float] = defaultdict(float)
        """Faded by hand, to compare with."""

    def _gap_s(self, tenant: str) -> float:
        return self.random.expovariate(self.rates[tenant])

    def step(self) -> None:
        arrival_s, tenant = heapq.heappop(self.arrivals)
        heapq.heappush(self.arrivals, (arrival_s + self._gap_s(tenant), tenant))
        while self.ends and self.ends[0][0] <= arrival_s:
            end_s, _, ended = heapq.heappop(self.ends)
            self.shares.go(ended, end_s, was_under_way=True)
        fade = math.exp((self.now_s - arrival_s) / LATELY_S)
        self.now_s = arrival_s
        tokens = self.random.uniform(100, 2000)
        ticket = Ticket(Line("m"), tenant=tenant, tokens=tokens, arrived_s=arrival_s)
        self.shares.come(ticket, arrival_s)
        self.asked[tenant] += 1
        self.beyond[tenant] += not self.shares.is_modest(ticket, arrival_s)
        self.shares.start(ticket, arrival_s)
        ticket.stage = Stage.STARTED
        heapq.heappush(self.ends, (arrival_s + STAY_S, sum(self.asked.values()), ticket))
        for name in self.rates:
            self.used[name] *= fade
        self.used[tenant] += tokens
        self.shares.check_integrity()

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.step()

    def share_beyond(self, tenant: str) -> float:
        return self.beyond[tenant] / self.asked[tenant]


@pytest.mark.parametrize(("per_s", "at_most"), [(0.2, 0.06), (3.0, 0.03), (20.0, 0.03)])
def test_tenants_that_ask_equally_much_are_hardly_ever_beyond_their_shares(
    per_s: float, at_most: float
) -> None:
    traffic = Traffic({f"tenant-{number}": per_s for number in range(5)}, seed=1)

    traffic.run(2000 / per_s)

    assert sum(traffic.beyond.values()) <= at_most * sum(traffic.asked.values())


@pytest.mark.parametrize("seed", range(3))
def test_one_that_asks_twice_as_much_is_beyond_its_share_and_the_others_are_not(seed: int) -> None:
    rates = {f"tenant-{number}": 4.0 for number in range(4)} | {"greedy": 8.0}
    traffic = Traffic(rates, seed)
    traffic.run(60.0)
    traffic.beyond.clear()
    traffic.asked.clear()

    traffic.run(160.0)

    assert traffic.share_beyond("greedy") >= 0.95
    assert max(traffic.share_beyond(name) for name in rates if name != "greedy") <= 0.01


def test_a_flood_is_seen_within_a_few_requests_beyond_what_the_others_have_under_way() -> None:
    traffic = Traffic({f"tenant-{number}": 2.0 for number in range(4)}, seed=2)
    traffic.run(60.0)
    seen = flood(traffic, 200)

    first = seen.index(False)
    assert not any(seen[first:])
    assert first <= 45, "the others have about ten each"


def test_who_was_beyond_its_share_gets_no_more_than_the_share_as_one_that_is_modest() -> None:
    traffic = Traffic({f"tenant-{number}": 4.0 for number in range(4)}, seed=3)
    shares, modest = traffic.shares, 0.0
    traffic.run(90.0)
    for _ in range(50):
        flood(traffic, 1)
    begin_s = traffic.now_s
    while traffic.now_s < begin_s + 200.0:
        # As many as may go on, and no others: what flow control does in a full fleet.
        for _ in range(100):
            ticket = Ticket(Line("m"), tenant="flood", tokens=1000.0, arrived_s=traffic.now_s)
            shares.come(ticket, traffic.now_s)
            if not shares.is_modest(ticket, traffic.now_s):
                shares.go(ticket, traffic.now_s, was_under_way=False)
                break
            shares.start(ticket, traffic.now_s)
            shares.go(ticket, traffic.now_s, was_under_way=True)
            modest += ticket.tokens
        traffic.step()

    others = 4.0 * 1050 * 200.0
    # A tenth more, and once what it had not used lately.
    assert 0.8 * others <= modest <= 1.1 * others + 4.0 * 1050 * LATELY_S


def test_who_was_beyond_its_share_is_forgiven_when_it_is_back_to_it() -> None:
    rates = {f"tenant-{number}": 4.0 for number in range(4)} | {"greedy": 20.0}
    traffic = Traffic(rates, seed=3)
    traffic.run(60.0)
    traffic.rates["greedy"] = 1.0
    traffic.run(160.0)
    traffic.rates["greedy"] = 4.0
    traffic.beyond.clear()
    traffic.asked.clear()

    traffic.run(260.0)

    assert traffic.share_beyond("greedy") <= 0.02


def flood(traffic: Traffic, number: int) -> list[bool]:
    """Of so many requests at once, which count as modest. They stay."""
    results = []
    for _ in range(number):
        ticket = Ticket(Line("m"), tenant="flood", tokens=1000.0, arrived_s=traffic.now_s)
        traffic.shares.come(ticket, traffic.now_s)
        results.append(traffic.shares.is_modest(ticket, traffic.now_s))
        traffic.shares.start(ticket, traffic.now_s)
    return results


def test_what_a_request_costs_in_truth_counts_once_it_is_known() -> None:
    shares = Shares()
    for name, tokens in [("a", 1000.0)] * 10 + [("b", 1000.0)] * 10:
        ticket = Ticket(Line("m"), tenant=name, tokens=tokens, arrived_s=0.0)
        shares.come(ticket, 0.0)
        shares.start(ticket, 0.0)
    assert shares.is_modest(ticket, 0.0)

    ticket.tokens += 30_000.0
    shares.correct(ticket, 30_000.0)

    assert not shares.is_modest(ticket, 0.0)
    shares.check_integrity()
