"""Open-loop and closed-loop load on one client, and what the generator itself cost.

Open loop: requests start on a schedule, whatever the answers do. Closed loop: each user sends
its next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoy_cli.bench.client import Client
from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.request import Request

_LEAD_S = 0.05
"""From the call to the first arrival, so that the first requests are not late."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    outcomes: list[Outcome]
    start_s: float
    end_s: float
    generator_cpu_share: float
    """CPU seconds of this process per second of the run, of one core."""


async def run_open_loop(
    client: Client,
    requests: Iterator[Request],
    offsets: Sequence[float],
    duration_s: float,
    drain_s: float = 0.0,
) -> LoadRun:
    """Start one request at each offset; after `duration_s` cut what has not ended.

    With `drain_s`, first tokens are still awaited for so long before the cut. `end_s` of the run
    is the end of `duration_s` all the same.
    """
    cpu_before = time.process_time()
    start_s = time.perf_counter() + _LEAD_S
    end_s = start_s + duration_s
    outcomes = [Outcome(due_s=start_s + offset) for offset in offsets]
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Outcome]] = []
        for outcome, request in zip(outcomes, requests, strict=False):
            await _sleep_until(outcome.due_s)
            tasks.append(group.create_task(client.send(request, outcome)))
        await _sleep_until(end_s)
        await _wait_begun(outcomes, end_s + drain_s)
        for task in tasks:
            task.cancel()
    cpu_s = time.process_time() - cpu_before
    return LoadRun(outcomes, start_s, end_s, cpu_s / (time.perf_counter() - start_s + _LEAD_S))


async def run_closed_loop(
    client: Client, requests: Iterator[Request], num_users: int, duration_s: float | None = None
) -> LoadRun:
    """`num_users` users take requests in turn until none is left or `duration_s` has passed."""
    cpu_before = time.process_time()
    start_s = time.perf_counter()
    outcomes: list[Outcome] = []

    async def user() -> None:
        for request in requests:
            outcome = Outcome(due_s=time.perf_counter())
            outcomes.append(outcome)
            await client.send(request, outcome)
            if outcome.error is not None:
                await asyncio.sleep(_LEAD_S)  # a dead server must not become a busy loop

    async with asyncio.TaskGroup() as group:
        users = [group.create_task(user()) for _ in range(num_users)]
        if duration_s is not None:
            await asyncio.wait(users, timeout=duration_s)
            for task in users:
                task.cancel()
    end_s = time.perf_counter()
    cpu_s = time.process_time() - cpu_before
    return LoadRun(outcomes, start_s, end_s, cpu_s / (end_s - start_s))


async def _wait_begun(outcomes: Sequence[Outcome], limit_s: float) -> None:
    """Until every request has its first token or has failed; polled, for nobody is told of it."""
    while time.perf_counter() < limit_s and not all(map(_has_begun, outcomes)):  # noqa: ASYNC110
        await asyncio.sleep(_LEAD_S)


def _has_begun(outcome: Outcome) -> bool:
    return bool(outcome.arrivals) or outcome.error is not None


async def _sleep_until(moment_s: float) -> None:
    delay_s = moment_s - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
