"""Places in memory for the work on large bodies: who wants to decode or encode one waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvoy_contract.errors import PayloadTooLarge
from kvoy_router.body_cost import decoding_bytes
from kvoy_router.body_memory import SMALL_BODY_BYTES, BodyMemory, Room
from kvoy_router.http_body import too_many

_WAIT_S = 30.0


@contextlib.asynccontextmanager
async def room_to_decode(memory: BodyMemory, body: bytes, has_ids: bool) -> AsyncIterator[None]:
    """For what `body` is decoded to. A small body waits for small ones alone.

    Raises PayloadTooLarge where there is never so much, and Unavailable where it does not come in
    time.
    """
    room = memory.reading if len(body) <= SMALL_BODY_BYTES else memory.decoding
    async with room_for(room, decoding_bytes(body, has_ids)):
        yield


@contextlib.asynccontextmanager
async def room_for(room: Room, num_bytes: int, wait_s: float = _WAIT_S) -> AsyncIterator[None]:
    """Raises as `room_to_decode`."""
    if num_bytes > room.most_bytes:
        raise PayloadTooLarge(
            f"To read this request takes up to {num_bytes} bytes of memory, more than the "
            f"{room.most_bytes} that this router has for that."
        )
    is_held = asyncio.get_running_loop().create_future()
    claim = room.claim(num_bytes, lambda: None if is_held.done() else is_held.set_result(None))
    try:
        if not claim.is_held:
            try:
                async with asyncio.timeout(wait_s):
                    await is_held
            except TimeoutError:
                if not claim.is_held:  # else another one gave up in the same moment
                    raise too_many() from None
        yield
    finally:
        claim.end()
