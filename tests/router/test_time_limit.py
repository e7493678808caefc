"""A block's time limit: it tells its own end from a cancellation by somebody else."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvoy_router.time_limit import TimeLimit


async def test_a_block_that_takes_too_long_ends_with_a_timeout() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0.01):
        await asyncio.Event().wait()

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_in_time_leaves_no_trace() -> None:
    limit = TimeLimit(60.0)
    with limit:
        await asyncio.sleep(0)

    assert limit._timer.cancelled()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def work() -> None:
        with TimeLimit(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_in_the_block_passes_through() -> None:
    with pytest.raises(ValueError, match="wrong"), TimeLimit(60.0):
        raise ValueError("wrong")


async def test_what_comes_while_the_loop_is_busy_is_in_time() -> None:
    """The loop does not look at anything for longer than the limit; then all is due at once."""
    loop = asyncio.get_running_loop()
    came = loop.create_future()

    def block() -> None:
        time.sleep(1.0)
        loop.call_soon(loop.call_soon, came.set_result, "here")

    loop.call_soon(block)
    # Put off by as long as the limit, which what has come is to be seen in.
    with TimeLimit(0.5):
        assert await came == "here"


async def test_a_late_limit_still_ends_what_never_comes() -> None:
    asyncio.get_running_loop().call_soon(time.sleep, 0.3)

    with pytest.raises(TimeoutError), TimeLimit(0.05):
        await asyncio.Event().wait()
