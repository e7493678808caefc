"""Tasks at the gate: they wait, go on, give up and are refused, and nothing is left of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

import pytest

from kvoy_contract.errors import ApiError, Saturated, Unavailable
from kvoy_router.flow_gate import FlowGate
from kvoy_router.flow_ticket import FlowLimits, Line, Ticket
from kvoy_router.testing import eventually


class Seats:
    """A fleet with so many seats; None: nobody serves."""

    def __init__(self, num_seats: int | None) -> None:
        self.num_seats = num_seats
        self.num_taken = 0
        self.most_taken = 0

    def wait_s(self, line: Line, now_s: float, enough_s: float) -> float | None:
        if self.num_seats is None:
            return None
        return 0.0 if self.num_taken < self.num_seats else 1000.0

    def __enter__(self) -> None:
        self.num_taken += 1
        self.most_taken = max(self.most_taken, self.num_taken)

    def __exit__(self, *exc: object) -> None:
        self.num_taken -= 1


def gate_of(seats: Seats, now_s: Callable[[], float] = time.monotonic, **limits: float) -> FlowGate:
    return FlowGate(seats, FlowLimits(**limits), now_s)  # type: ignore[arg-type]


def ticket(tenant: str = "", at_s: float = 0.0) -> Ticket:
    return Ticket(Line("m"), tokens=10, arrived_s=at_s or time.monotonic(), tenant=tenant)


async def serve(
    gate: FlowGate, seats: Seats, each: Ticket, until: asyncio.Event, order: list[Ticket]
) -> None:
    async with gate.admit(each) as admission:
        with seats:
            admission.start()
            order.append(each)
            await until.wait()


async def test_an_unloaded_gate_lets_a_task_in_without_giving_up_its_turn() -> None:
    gate = gate_of(Seats(8))
    entry = gate.enter(ticket())

    with pytest.raises(StopIteration) as end:
        entry.send(None)  # no suspension: it runs through at once
    assert end.value.value is False  # it had not to wait, however long that took


async def test_a_task_knows_whether_it_waited_for_its_turn() -> None:
    seats = Seats(1)
    gate = gate_of(seats)

    async with gate.admit(ticket()) as first:
        assert not first.has_waited
        with seats:
            first.start()
            second = gate.admit(ticket())
            entering = asyncio.create_task(second.__aenter__())
            await eventually(lambda: gate.flow.num_waiting == 1)
    await entering
    assert second.has_waited
    await second.__aexit__(None, None, None)


async def test_who_waits_goes_on_when_another_one_ends() -> None:
    seats, order = Seats(1), list[Ticket]()
    gate = gate_of(seats)
    first, second = asyncio.Event(), asyncio.Event()
    tickets = [ticket(), ticket()]
    one = asyncio.create_task(serve(gate, seats, tickets[0], first, order))
    two = asyncio.create_task(serve(gate, seats, tickets[1], second, order))
    await eventually(lambda: gate.flow.num_waiting == 1)

    first.set()
    await one
    await eventually(lambda: order == tickets)
    second.set()
    await two
    assert gate.flow.num_waiting == 0


async def test_who_waits_goes_on_when_a_report_tells_of_room() -> None:
    seats, order = Seats(0), list[Ticket]()
    gate = gate_of(seats)
    until = asyncio.Event()
    until.set()
    task = asyncio.create_task(serve(gate, seats, ticket(), until, order))
    await eventually(lambda: gate.flow.num_waiting == 1)

    seats.num_seats = 1
    await asyncio.wait_for(task, 30.0)


async def test_one_whose_client_goes_leaves_the_queue_at_once() -> None:
    seats = Seats(0)
    gate = gate_of(seats)
    task = asyncio.create_task(serve(gate, seats, ticket(), asyncio.Event(), []))
    await eventually(lambda: gate.flow.num_waiting == 1)

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert gate.flow.num_waiting == 0
    gate.flow.check_integrity()


async def test_one_whose_client_goes_just_when_its_turn_comes_gives_it_to_the_next() -> None:
    seats, order = Seats(0), list[Ticket]()
    gate = gate_of(seats)
    until = asyncio.Event()
    tickets = [ticket(), ticket()]
    tasks = [asyncio.create_task(serve(gate, seats, each, until, order)) for each in tickets]
    await eventually(lambda: gate.flow.num_waiting == 2)

    seats.num_seats = 1
    gate._look()  # the first one's turn has come, and its task has not run yet
    tasks[0].cancel()
    await eventually(lambda: order == [tickets[1]])
    until.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    gate.flow.check_integrity()


async def test_beyond_the_bound_a_task_is_refused() -> None:
    seats = Seats(0)
    gate = gate_of(seats, max_waiting=1)
    task = asyncio.create_task(serve(gate, seats, ticket(), asyncio.Event(), []))
    await eventually(lambda: gate.flow.num_waiting == 1)

    with pytest.raises(Saturated):
        await gate.enter(ticket())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_task_that_loses_its_place_hears_so() -> None:
    seats = Seats(0)
    gate = gate_of(seats, max_waiting=2)
    tasks = [
        asyncio.create_task(serve(gate, seats, ticket("greedy"), asyncio.Event(), []))
        for _ in range(2)
    ]
    await eventually(lambda: gate.flow.num_waiting == 2)

    small = asyncio.create_task(serve(gate, seats, ticket("small"), asyncio.Event(), []))
    with pytest.raises(Saturated) as refused:
        await tasks[1]
    assert refused.value.code == "displaced"
    for task in (tasks[0], small):
        task.cancel()
    await asyncio.gather(*tasks, small, return_exceptions=True)


async def test_a_task_that_waited_too_long_is_refused() -> None:
    now_s = 100.0
    seats = Seats(0)
    gate = gate_of(seats, lambda: now_s, max_waiting_s=5.0)
    task = asyncio.create_task(serve(gate, seats, ticket(at_s=now_s), asyncio.Event(), []))
    await eventually(lambda: gate.flow.num_waiting == 1)

    now_s = 105.0
    with pytest.raises(Saturated):
        await asyncio.wait_for(task, 30.0)


async def test_tasks_are_held_until_a_first_engine_serves_or_for_a_bounded_time() -> None:
    now_s = 100.0
    seats, order = Seats(None), list[Ticket]()
    gate = gate_of(seats, lambda: now_s, max_held=2, max_held_s=5.0)
    until = asyncio.Event()
    until.set()
    held = [
        asyncio.create_task(serve(gate, seats, ticket(at_s=at_s), until, order))
        for at_s in (97.0, 100.0)
    ]
    await eventually(lambda: gate.flow.num_waiting == 2)
    with pytest.raises(Unavailable):
        await gate.enter(ticket(at_s=now_s))

    seats.num_seats = 1
    await asyncio.wait_for(asyncio.gather(*held), 30.0)

    assert len(order) == 2


async def test_five_hundred_tasks_that_come_go_and_give_up_leave_nothing_behind() -> None:
    random = Random(7)
    seats = Seats(5)
    gate = gate_of(seats, max_waiting=200)
    outcomes: list[str] = []

    async def client(number: int) -> None:
        await asyncio.sleep(random.random() * 0.2)
        try:
            async with asyncio.timeout(random.choice((0.01, 0.2, 30.0))):
                async with gate.admit(ticket(random.choice("abc"))) as admission:
                    if random.random() < 0.1:
                        raise RuntimeError  # the pick failed
                    with seats:
                        admission.start()
                        await asyncio.sleep(random.random() * 0.01)
            outcomes.append("served")
        except TimeoutError:
            outcomes.append("gone")
        except ApiError:
            outcomes.append("refused")
        except RuntimeError:
            outcomes.append("failed")
        gate.flow.check_integrity()

    await asyncio.gather(*(client(number) for number in range(500)))

    assert len(outcomes) == 500
    assert {"served", "gone", "failed"} <= set(outcomes)
    assert seats.most_taken == 5
    assert gate.flow.num_waiting == 0
    assert all(queue.is_idle for _, queue in gate.flow.queues())
    assert gate._futures == {}
