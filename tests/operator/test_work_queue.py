"""The work queue in virtual time: a loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvoy_operated.virtual_time import run_virtually
from kvoy_operator.work_queue import Backoff, RetryLater, WorkQueue

_LONG_S = 10_000.0


class _Work:
    """Records when each key was worked on, and does what the test says."""

    def __init__(self, answer: Callable[[str], Awaitable[float | None]] | None = None) -> None:
        self.calls: list[tuple[str, float]] = []
        self.num_running = 0
        self.most_running = 0
        self._answer = answer

    async def __call__(self, key: str) -> float | None:
        self.calls.append((key, round(asyncio.get_running_loop().time(), 3)))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._answer(key) if self._answer else None
        finally:
            self.num_running -= 1


def _queue(work: _Work, num_workers: int = 2, jitter: float = 0.0) -> WorkQueue[str]:
    return WorkQueue(work, num_workers=num_workers, jitter=lambda: jitter)


async def _run_for(
    queue: WorkQueue[str], seconds: float, script: Callable[[], Awaitable[None]]
) -> None:
    runner = asyncio.create_task(queue.run())
    await asyncio.sleep(0)
    await script()
    await asyncio.sleep(seconds)
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner


def test_a_key_added_many_times_before_it_is_worked_on_is_worked_on_once() -> None:
    work = _Work()
    queue = _queue(work)

    async def script() -> None:
        for _ in range(5):
            queue.add("a")
        queue.add("b")

    run_virtually(_run_for(queue, 1, script))

    assert work.calls == [("a", 0.0), ("b", 0.0)]


def test_a_key_added_while_it_is_worked_on_is_worked_on_once_more_and_never_twice_at_once() -> None:
    async def take_a_second(_: str) -> None:
        await asyncio.sleep(1)

    work = _Work(take_a_second)
    queue = _queue(work)

    async def script() -> None:
        queue.add("a")
        await asyncio.sleep(0.5)
        queue.add("a")
        queue.add("a")

    run_virtually(_run_for(queue, 10, script))

    assert work.calls == [("a", 0.0), ("a", 1.0)]
    assert work.most_running == 1


def test_workers_bound_how_much_is_worked_on_at_the_same_time() -> None:
    async def take_a_second(_: str) -> None:
        await asyncio.sleep(1)

    work = _Work(take_a_second)
    queue = _queue(work, num_workers=3)

    async def script() -> None:
        for number in range(7):
            queue.add(str(number))
        await asyncio.sleep(0.5)
        assert queue.depth == 4
        assert queue.oldest_age_s == 0.5

    run_virtually(_run_for(queue, 10, script))

    assert len(work.calls) == 7
    assert work.most_running == 3


def test_one_works_at_a_time_and_one_that_is_slow_holds_nobody_up_for_longer_than_its_turn() -> (
    None
):
    async def work_long_on_slow(key: str) -> None:
        await asyncio.sleep(60 if key.startswith("slow") else 0.5)

    work = _Work(work_long_on_slow)
    queue = WorkQueue(work, num_workers=3, turn_s=2.0)

    async def script() -> None:
        for key in ("a", "b", "slow 1", "c", "slow 2", "d"):
            queue.add(key)

    run_virtually(_run_for(queue, 10, script))

    assert work.calls == [
        ("a", 0.0),
        ("b", 0.5),
        ("slow 1", 1.0),
        ("c", 3.0),
        ("slow 2", 3.5),
        ("d", 5.5),
    ]


def test_a_queue_that_is_run_again_begins_with_a_free_turn() -> None:
    async def take_a_second(_: str) -> None:
        await asyncio.sleep(1)

    work = _Work(take_a_second)
    queue = WorkQueue(work, num_workers=2, turn_s=2.0)

    async def script() -> None:
        queue.add("a")

    async def main() -> None:
        await _run_for(queue, 0.5, script)
        await _run_for(queue, 10, script)

    run_virtually(main())

    assert work.calls == [("a", 0.0), ("a", 0.5)]


def test_work_comes_back_when_it_asked_to_and_earlier_when_something_changes() -> None:
    async def ask_for_a_minute(_: str) -> float:
        return 60.0

    work = _Work(ask_for_a_minute)
    queue = _queue(work)

    async def script() -> None:
        queue.add("a")
        await asyncio.sleep(130)
        queue.add("a")

    run_virtually(_run_for(queue, 40, script))

    assert work.calls == [("a", 0.0), ("a", 60.0), ("a", 120.0), ("a", 130.0)]


def test_failures_back_off_and_a_success_forgets_them() -> None:
    outcomes = iter([ValueError, RetryLater, RetryLater, None, RetryLater])

    async def follow_the_script(_: str) -> None:
        outcome = next(outcomes, None)
        if outcome is not None:
            raise outcome("no")

    work = _Work(follow_the_script)
    queue = _queue(work)

    async def script() -> None:
        queue.add("a")
        await asyncio.sleep(100)
        queue.add("a")

    run_virtually(_run_for(queue, 100, script))

    starts = [time for _, time in work.calls]
    assert starts == [0.0, 0.5, 1.5, 3.5, 100.0, 100.5]


def test_a_failed_key_is_tried_at_once_when_something_changes() -> None:
    async def fail(_: str) -> None:
        raise RetryLater("no")

    work = _Work(fail)
    queue = _queue(work)

    async def script() -> None:
        queue.add("a")
        await asyncio.sleep(0.1)
        queue.add("a")

    run_virtually(_run_for(queue, 0.2, script))

    assert work.calls == [("a", 0.0), ("a", 0.1)]


def test_what_the_server_asked_to_wait_is_waited_whatever_changes() -> None:
    async def be_told_to_wait(_: str) -> None:
        raise RetryLater("too many requests", delay_s=30.0)

    work = _Work(be_told_to_wait)
    queue = _queue(work)

    async def script() -> None:
        queue.add("a")
        for _ in range(20):
            await asyncio.sleep(1)
            queue.add("a")

    run_virtually(_run_for(queue, 15, script))

    assert work.calls == [("a", 0.0), ("a", 30.0)]


@pytest.mark.parametrize(
    ("num_failures", "jitter", "delay_s"),
    [(1, 0.0, 0.5), (1, 0.999, 0.25), (4, 0.0, 4.0), (9, 0.0, 30.0), (10_000, 0.5, 22.5)],
)
def test_the_backoff_doubles_up_to_its_limit_and_jitter_takes_up_to_half(
    num_failures: int, jitter: float, delay_s: float
) -> None:
    assert Backoff().delay_s(num_failures, jitter) == pytest.approx(delay_s, rel=0.01)


def test_what_is_added_before_the_start_or_after_the_end_is_dropped() -> None:
    work = _Work()
    queue = _queue(work)

    async def main() -> None:
        queue.add("early")
        await _run_for(queue, 1, lambda: asyncio.sleep(0))
        queue.add("late", delay_s=1)
        await asyncio.sleep(_LONG_S)

    run_virtually(main())

    assert work.calls == []
    assert queue.depth == 0


def test_a_key_asked_for_later_does_not_put_off_one_that_is_due_earlier() -> None:
    work = _Work()
    queue = _queue(work)

    async def script() -> None:
        queue.add("a", delay_s=5)
        queue.add("a", delay_s=50)
        queue.add("b", delay_s=50)
        queue.add("b", delay_s=5)

    run_virtually(_run_for(queue, 100, script))

    assert work.calls == [("a", 5.0), ("b", 5.0)]
