"""Waiting for a place in memory, and what happens when it does not come."""

from __future__ import annotations

import asyncio

import pytest

from kvoy_contract.errors import PayloadTooLarge, Unavailable
from kvoy_router.body_memory import BodyMemory, Budget, Room
from kvoy_router.body_work import room_for

BUDGET = Budget(now=3200, most=3200)
"""800 of it for decoding."""


async def use(room: Room, num_bytes: int, wait_s: float = 30.0) -> str:
    async with room_for(room, num_bytes, wait_s):
        return "used"


async def test_work_waits_for_room_and_gives_it_back() -> None:
    room = BodyMemory(BUDGET).decoding
    first = room.claim(700)
    waiting = asyncio.create_task(use(room, 200))
    await asyncio.sleep(0)
    assert room.num_waiting == 1

    first.end()

    assert await waiting == "used"
    assert room.used_bytes == 0


async def test_work_for_which_no_room_comes_is_refused_and_that_for_which_there_never_is() -> None:
    room = BodyMemory(BUDGET).decoding
    room.claim(700)

    with pytest.raises(Unavailable):
        await use(room, 200, wait_s=0.01)
    with pytest.raises(PayloadTooLarge, match="up to 801 bytes of memory, more than the 800"):
        await use(room, 801)

    assert (room.used_bytes, room.num_waiting) == (700, 0)


async def test_room_that_comes_when_time_is_up_is_used() -> None:
    """Two give up in the same moment; what the first did not get is enough for the second."""
    room = BodyMemory(BUDGET).decoding
    room.claim(700)

    results = await asyncio.gather(
        *(use(room, size, wait_s=0.01) for size in (200, 100)), return_exceptions=True
    )

    assert isinstance(results[0], Unavailable)
    assert results[1] == "used"
    assert (room.used_bytes, room.num_waiting) == (700, 0)


async def test_a_time_limit_inside_is_no_matter_of_the_room() -> None:
    room = BodyMemory(BUDGET).decoding

    with pytest.raises(TimeoutError):
        async with room_for(room, 100), asyncio.timeout(0.001):
            await asyncio.Event().wait()

    assert room.used_bytes == 0


async def test_a_client_that_leaves_gives_up_its_place_in_the_queue() -> None:
    room = BodyMemory(BUDGET).decoding
    room.claim(700)
    waiting = asyncio.create_task(use(room, 200))
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert (room.used_bytes, room.num_waiting) == (700, 0)
