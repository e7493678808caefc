import asyncio

import pytest

from kvoy_router.loop_share import LoopShare


async def test_work_takes_turns_with_everybody_elses() -> None:
    share = LoopShare()
    order: list[str] = []

    async def other() -> None:
        while "work 2" not in order:
            order.append("other")
            await asyncio.sleep(0)

    def work(number: int) -> None:
        until_s = loop.time() + 0.02
        while loop.time() < until_s:
            pass
        order.append(f"work {number}")

    loop = asyncio.get_running_loop()
    running = [asyncio.create_task(share.run(lambda n=n: work(n))) for n in range(3)]  # type: ignore[misc]
    await asyncio.gather(other(), *running)

    for number in range(2):
        first, second = order.index(f"work {number}"), order.index(f"work {number + 1}")
        assert "other" in order[first:second]


async def test_a_failure_and_a_client_that_goes_give_the_turn_on() -> None:
    share = LoopShare()
    with pytest.raises(ZeroDivisionError):
        await share.run(lambda: 1 // 0)
    running = asyncio.create_task(share.run(lambda: 1))
    waiting = asyncio.create_task(share.run(lambda: 2))
    await asyncio.sleep(0)
    waiting.cancel()

    assert await running == 1
    assert await asyncio.wait_for(share.run(lambda: 3), 30) == 3
