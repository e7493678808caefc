"""The rules of one model's queue, by example and against random operations."""

from __future__ import annotations

import math
from random import Random

import pytest

from kvoy_contract.errors import ApiError, DeadlineExceeded, Saturated, Unavailable
from kvoy_router.flow_queue import FlowQueue
from kvoy_router.flow_ticket import FlowLimits, Line, Stage, Ticket

ROOM, TIGHT, FULL = 0.0, 0.7, 1.0
"""Waits, as shares of the limit: for all, for the modest alone, for nobody."""


def ticket(
    tenant: str = "a",
    tokens: float = 100.0,
    *,
    priority: int = 0,
    at_s: float = 0.0,
    weight: float = 1.0,
    deadline_s: float = math.inf,
) -> Ticket:
    return Ticket(
        Line("m"),
        tokens=tokens,
        arrived_s=at_s,
        deadline_s=deadline_s,
        tenant=tenant,
        priority=priority,
        weight=weight,
    )


def queue_of(*tickets: Ticket, **limits: float) -> FlowQueue:
    """A queue in which these wait, in this order."""
    queue = FlowQueue(FlowLimits(**limits))  # type: ignore[arg-type]
    for each in tickets:
        assert queue.add(each, each.arrived_s, FULL) is None
    return queue


def served(queue: FlowQueue, now_s: float = 0.0, wait: float = ROOM) -> list[Ticket]:
    """All that go on, one after the other."""
    order = []
    while (chosen := queue.next(now_s, wait)) is not None:
        queue.start(chosen)
        order.append(chosen)
        queue.check_integrity()
    return order


# Passing


def test_an_unloaded_fleet_lets_everybody_pass() -> None:
    queue = queue_of()
    for number in range(100):
        each = ticket(f"t{number % 7}", priority=number % 3)
        assert queue.pass_at_once(each, 0.0, ROOM)
        queue.start(each)

    queue.check_integrity()
    assert len(queue) == 0


def test_nobody_passes_who_would_overtake_one_that_waits() -> None:
    queue = queue_of(ticket())

    assert not queue.pass_at_once(ticket("b"), 0.0, ROOM)


def test_one_at_a_time_goes_on_until_it_has_reserved_its_load() -> None:
    first, second = ticket(), ticket()
    queue = queue_of(first, second)

    assert queue.next(0.0, ROOM) is first
    assert queue.next(0.0, ROOM) is None
    assert not queue.pass_at_once(ticket(), 0.0, ROOM)
    queue.start(first)
    assert queue.next(0.0, ROOM) is second


def test_one_that_is_given_up_after_it_was_chosen_makes_way() -> None:
    first, second = ticket(), ticket()
    queue = queue_of(first, second)
    queue.next(0.0, ROOM)

    queue.end(first, 0.0)

    assert queue.next(0.0, ROOM) is second


def test_nothing_goes_on_while_every_engine_is_at_its_limit() -> None:
    queue = queue_of(ticket())

    assert queue.next(0.0, FULL) is None
    assert not queue_of().pass_at_once(ticket(), 0.0, FULL)


# Order


def test_a_tenant_is_served_first_come_first_served() -> None:
    tickets = [ticket(tokens=100 - n) for n in range(5)]

    assert served(queue_of(*tickets)) == tickets


def test_more_important_classes_go_first() -> None:
    low, normal, high = ticket(priority=5), ticket(), ticket(priority=-5)

    assert served(queue_of(low, normal, high)) == [high, normal, low]


def test_tenants_are_served_equal_tokens_and_not_equal_requests() -> None:
    small = [ticket("small", 100) for _ in range(40)]
    large = [ticket("large", 1000) for _ in range(4)]

    order = served(queue_of(*large, *small))

    first = order[:22]
    assert sum(t.tokens for t in first if t.tenant == "small") == pytest.approx(2000, abs=1000)
    assert sum(t.tokens for t in first if t.tenant == "large") == pytest.approx(2000, abs=1000)


def test_weights_are_shares_of_tokens() -> None:
    tickets = [ticket(name, weight=w) for _ in range(40) for name, w in (("a", 1.0), ("b", 3.0))]

    first = served(queue_of(*tickets))[:40]

    assert sum(t.tenant == "b" for t in first) == 30


def test_idling_saves_up_no_service() -> None:
    queue = queue_of(*(ticket("busy") for _ in range(20)))
    for _ in range(10):
        chosen = queue.next(0.0, ROOM)
        assert chosen is not None
        queue.start(chosen)
    for _ in range(10):
        queue.add(ticket("late"), 0.0, FULL)

    order = [t.tenant for t in served(queue)]

    assert order[:8].count("late") == 4


def test_what_a_request_turned_out_to_cost_is_charged() -> None:
    queue = queue_of(*(ticket(name) for _ in range(10) for name in ("cheap", "dear")))
    first = queue.next(0.0, ROOM)
    assert first is not None
    queue.start(first, tokens=500)

    order = [t.tenant for t in served(queue)]

    other = "dear" if first.tenant == "cheap" else "cheap"
    assert order[:5] == [other] * 5


# Ageing


def test_a_lower_class_gets_its_small_share_once_it_has_waited_long() -> None:
    low = [ticket(priority=1) for _ in range(40)]
    high = [ticket(priority=0) for _ in range(40)]
    queue = queue_of(*low, *high, age_s=5.0, aged_share=0.25)

    assert {t.priority for t in [queue.next(4.9, ROOM)] if t} == {0}
    chosen = next(t for t in (*high,) if t.stage is Stage.CHOSEN)
    queue.start(chosen)
    order = served(queue, now_s=5.0)

    first = order[:40]
    assert sum(t.priority == 1 for t in first) == 10


def test_an_aged_request_goes_on_even_where_room_is_kept_for_more_important_ones() -> None:
    low = ticket(priority=1)
    queue = queue_of(low, *(ticket() for _ in range(3)))

    order = served(queue, now_s=1000.0, wait=TIGHT)

    assert low in order


# Room that is kept


def test_a_tenant_beyond_its_share_leaves_room_to_others() -> None:
    queue = queue_of()
    for _ in range(9):
        each = ticket("greedy")
        assert queue.pass_at_once(each, 0.0, ROOM)
        queue.start(each)
    other = ticket("other")
    assert queue.pass_at_once(other, 0.0, TIGHT)
    queue.start(other)

    assert not queue.pass_at_once(ticket("greedy"), 0.0, TIGHT)
    assert queue.pass_at_once(ticket("other"), 0.0, TIGHT)


def test_a_tenant_that_is_alone_has_all_the_room() -> None:
    queue = queue_of()
    for _ in range(20):
        each = ticket("alone")
        assert queue.pass_at_once(each, 0.0, TIGHT)
        queue.start(each)


def test_the_share_of_a_tenant_that_has_gone_is_given_back() -> None:
    queue = queue_of()
    for name in (*["greedy"] * 9, "gone"):
        each = ticket(name)
        assert queue.pass_at_once(each, 0.0, ROOM)
        queue.start(each)
    queue.end(each, 0.0)

    assert not queue.pass_at_once(ticket("greedy"), 9.0, TIGHT)
    queue.expire(11.0, TIGHT)
    assert queue.pass_at_once(ticket("greedy"), 11.0, TIGHT)


def test_a_lower_class_leaves_room_while_a_more_important_one_is_served() -> None:
    queue = queue_of()
    high = ticket()
    assert queue.pass_at_once(high, 0.0, ROOM)
    queue.start(high)

    assert not queue.pass_at_once(ticket("b", priority=1), 0.0, TIGHT)
    queue.end(high, 0.0)
    assert queue.pass_at_once(ticket("b", priority=1), 0.0, TIGHT)


def test_who_is_beyond_its_share_does_not_stand_in_the_way_of_others() -> None:
    queue = queue_of()
    for _ in range(5):
        each = ticket("greedy", 10)
        queue.pass_at_once(each, 0.0, ROOM)
        queue.start(each)
    modest = ticket("modest", 10)
    queue.add(ticket("greedy", 10), 0.0, FULL)
    queue.add(modest, 0.0, FULL)

    assert served(queue, wait=TIGHT) == [modest]


def test_who_is_beyond_its_share_lets_others_of_its_class_pass_inside_an_engine_too() -> None:
    queue = queue_of()
    levels = {}
    for name in ("greedy", "other", *["greedy"] * 9, "other"):
        each = ticket(name)
        assert queue.pass_at_once(each, 0.0, ROOM)
        queue.start(each)
        levels[name] = each.engine_priority
    low = ticket("third", priority=1)
    assert queue.pass_at_once(low, 0.0, ROOM)

    assert levels == {"greedy": 1, "other": 0}
    assert low.engine_priority == 3


# Bounds


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_waiting": 3}, "queue_full"),
        ({"max_waiting": 0}, "queue_full"),
        ({"max_waiting_per_tenant": 3}, "tenant_full"),
        ({"max_waiting_per_priority": 3}, "priority_full"),
    ],
)
def test_beyond_a_bound_requests_are_refused_with_a_time_to_come_again(
    limits: dict[str, float], code: str
) -> None:
    num_places = min(3, int(limits.get("max_waiting", 3)))
    queue = queue_of(*(ticket() for _ in range(num_places)), **limits)

    with pytest.raises(Saturated) as refused:
        queue.add(ticket(), 0.0, FULL)

    assert refused.value.code == code
    assert refused.value.retry_after_s is not None
    assert len(queue) == num_places
    queue.check_integrity()


def test_retry_after_is_the_time_that_the_queue_takes() -> None:
    queue = queue_of(*(ticket(tokens=1000) for _ in range(4)), max_waiting=3 + 1)
    for second in range(60):  # 100 tokens go on each second
        each = ticket(tokens=100, at_s=float(second))
        queue._rate.add(each.tokens, float(second))

    with pytest.raises(Saturated) as refused:
        queue.add(ticket(), 60.0, FULL)

    assert refused.value.retry_after_s == pytest.approx(40.0, rel=0.1)


def test_a_full_queue_gives_the_place_of_the_least_important_to_a_more_important_one() -> None:
    low = [ticket(priority=1) for _ in range(3)]
    queue = queue_of(*low, max_waiting=3)

    assert queue.add(ticket(priority=0), 0.0, FULL) is low[-1]
    assert low[-1].stage is Stage.ENDED
    with pytest.raises(Saturated):
        queue.add(ticket(priority=2), 0.0, FULL)
    queue.check_integrity()


def test_a_full_queue_gives_the_place_of_the_largest_tenant_to_a_smaller_one() -> None:
    greedy = [ticket("greedy") for _ in range(4)]
    queue = queue_of(*greedy, max_waiting=4)

    assert queue.add(ticket("small"), 0.0, FULL) is greedy[3]
    assert queue.add(ticket("small"), 0.0, FULL) is greedy[2]
    with pytest.raises(Saturated):
        queue.add(ticket("small"), 0.0, FULL)
    with pytest.raises(Saturated):
        queue.add(ticket("greedy"), 0.0, FULL)


# Waiting too long


def test_who_has_waited_too_long_is_refused_and_whose_time_is_over_is_told_so() -> None:
    late = ticket(at_s=0.0)
    overdue = ticket(at_s=8.0, deadline_s=9.0)
    patient = ticket(at_s=8.0)
    queue = queue_of(late, overdue, patient, max_waiting_s=10.0)

    expired = dict(queue.expire(10.0, FULL))

    assert set(expired) == {late, overdue}
    assert isinstance(expired[late], Saturated)
    assert isinstance(expired[overdue], DeadlineExceeded)
    assert served(queue) == [patient]


def test_requests_are_held_for_the_first_engine_and_refused_when_none_comes() -> None:
    queue = FlowQueue(FlowLimits(max_held=2, max_held_s=10.0))
    held = [ticket(at_s=0.0), ticket(at_s=5.0)]
    for each in held:
        assert not queue.pass_at_once(each, each.arrived_s, None)
        queue.add(each, each.arrived_s, None)
    with pytest.raises(Unavailable):
        queue.add(ticket(), 5.0, None)

    (expired,) = queue.expire(10.0, None)

    assert expired[0] is held[0]
    assert isinstance(expired[1], Unavailable)
    assert served(queue, now_s=11.0) == [held[1]]


def test_who_waited_for_room_gets_the_whole_time_when_the_last_engine_goes() -> None:
    queue = queue_of(ticket(at_s=0.0), max_held_s=10.0, max_waiting_s=20.0)
    queue.next(15.0, None)

    assert not queue.expire(24.0, None)
    assert len(queue.expire(25.0, None)) == 1


def test_without_holding_nothing_waits_for_an_engine() -> None:
    queue = FlowQueue(FlowLimits(max_held_s=0.0))

    with pytest.raises(Unavailable):
        queue.add(ticket(), 0.0, None)


# Random operations


@pytest.mark.parametrize("seed", range(12))
def test_no_ticket_is_lost_or_counted_twice(seed: int) -> None:
    random = Random(seed)
    limits = FlowLimits(
        max_waiting=random.choice((2, 8, 30)),
        max_waiting_per_tenant=random.choice((2, 20)),
        max_held=random.choice((1, 8)),
        max_held_s=random.choice((0.0, 3.0)),
        max_waiting_s=20.0,
        age_s=2.0,
    )
    queue = FlowQueue(limits)
    open_tickets: set[Ticket] = set()
    num_ended = num_made = 0
    now_s = 0.0
    for _ in range(600):
        now_s += random.expovariate(5.0)
        wait = random.choice((ROOM, TIGHT, FULL, FULL, None))
        action = random.random()
        if action < 0.5:
            num_made += 1
            each = ticket(
                random.choice("abcd"),
                random.randint(1, 5000),
                priority=random.randint(-1, 1),
                at_s=now_s,
                deadline_s=now_s + random.expovariate(0.1),
            )
            try:
                if not queue.pass_at_once(each, now_s, wait):
                    displaced = queue.add(each, now_s, wait)
                    if displaced is not None:
                        open_tickets.remove(displaced)
                        num_ended += 1
                open_tickets.add(each)
            except ApiError:
                num_ended += 1
        elif action < 0.7:
            queue.next(now_s, wait)
        elif action < 0.9 and open_tickets:
            each = random.choice(sorted(open_tickets, key=lambda t: t.arrived_s))
            if each.stage is Stage.CHOSEN:
                queue.start(each, random.randint(1, 9000))
            elif each.stage is Stage.STARTED:
                queue.correct(each, random.randint(1, 9000))
            if random.random() < 0.5:
                queue.end(each, now_s)
                queue.end(each, now_s)
                open_tickets.remove(each)
                num_ended += 1
        else:
            for each, _ in queue.expire(now_s, wait):
                open_tickets.remove(each)
                num_ended += 1
        queue.check_integrity()
        under_way = [t for t in open_tickets if t.stage in (Stage.CHOSEN, Stage.STARTED)]
        assert queue.shares.tokens == pytest.approx(sum(t.tokens for t in under_way))
        assert num_made == num_ended + len(open_tickets)
    for each in open_tickets:
        queue.end(each, now_s)
    assert len(queue) == 0
    assert queue.is_idle
    assert queue.waiting_tokens == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_tenants_that_wait_all_the_time_get_equal_tokens_up_to_their_largest_requests(
    seed: int,
) -> None:
    """The bound of fair queueing, by trying every interval in which both wait without a break."""
    random = Random(seed)
    weights = {name: random.choice((0.5, 1.0, 2.0)) for name in "abcd"}
    largest = {name: random.choice((50, 400, 3000)) for name in weights}
    queue = FlowQueue(FlowLimits(max_waiting=10_000, max_waiting_per_tenant=10_000))
    history: list[dict[str, float]] = [dict.fromkeys(weights, 0.0)]
    backlogged: list[dict[str, bool]] = []

    def add(name: str) -> None:
        tokens = random.randint(1, largest[name])
        queue.add(ticket(name, tokens, weight=weights[name]), 0.0, FULL)

    for name in weights:
        for _ in range(random.randint(0, 30)):
            add(name)
    for _ in range(120):
        if random.random() < 0.5:
            add(random.choice(list(weights)))
        waiting = {t.tenant for t in queue.waiting()}
        chosen = queue.next(0.0, ROOM)
        if chosen is None:
            continue
        queue.start(chosen)
        done = dict(history[-1])
        done[chosen.tenant] += chosen.tokens / weights[chosen.tenant]
        history.append(done)
        still = {t.tenant for t in queue.waiting()}
        backlogged.append({name: name in waiting and name in still for name in weights})

    for one in weights:
        for other in weights:
            bound = largest[one] / weights[one] + largest[other] / weights[other]
            for begin in range(len(backlogged)):
                for end in range(begin, len(backlogged)):
                    if not (backlogged[end][one] and backlogged[end][other]):
                        break
                    gained = history[end + 1][one] - history[begin][one]
                    other_gained = history[end + 1][other] - history[begin][other]
                    assert gained - other_gained <= bound + 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_no_request_of_any_class_or_tenant_waits_for_ever(seed: int) -> None:
    """New requests of the first class come as fast as any go on; still each one has its turn."""
    random = Random(seed)
    limits = FlowLimits(max_waiting=10_000, max_waiting_per_priority=10_000, age_s=5.0)
    queue = FlowQueue(limits)
    patient = [
        ticket(random.choice("xyz"), random.randint(1, 2000), priority=random.randint(1, 3))
        for _ in range(12)
    ]
    for each in patient:
        queue.add(each, 0.0, FULL)
    ahead = sum(t.tokens for t in patient)

    tokens = 0.0
    now_s = 0.0
    while any(t.stage is Stage.WAITING for t in patient):
        now_s += 0.1
        queue.add(ticket(random.choice("ab"), 500, at_s=now_s), now_s, FULL)
        chosen = queue.next(now_s, random.choice((ROOM, TIGHT)))
        if chosen is not None:
            tokens += chosen.tokens if now_s > limits.age_s else 0.0
            queue.start(chosen)
            queue.end(chosen, now_s)
        assert tokens <= (ahead + 2000 * 4) / limits.aged_share
