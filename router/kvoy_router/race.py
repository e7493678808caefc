"""Two attempts at one request, of which the first to begin its answer goes on and the other ends.

Nothing of an answer has reached the client while this lasts. Whoever loses, or fails, has its
connection closed, which aborts it at its engine, and its lease released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvoy_router.attempt import Attempt, Attempts, Refusal
from kvoy_router.errors import UpstreamError
from kvoy_router.http_client import Exchange

Opening = asyncio.Task[Exchange | Refusal]


async def race(
    attempts: Attempts,
    first: Attempt,
    delay_s: float,
    make_second: Callable[[], Attempt | None],
    on_end: Callable[[Attempt, Refusal | UpstreamError | None], None],
) -> tuple[Attempt, Opening]:
    """Open `first`, and after `delay_s` without an answer what `make_second` gives, if anything.

    Returns the attempt that has an answer, or the last one to fail, with its opening, which is
    done; that attempt's lease is the caller's to release. `on_end` hears of every other one: what
    it failed of, None for one that was slower.
    """
    running: dict[Opening, Attempt] = {asyncio.create_task(attempts.open(first)): first}
    try:
        done, _ = await asyncio.wait(running, timeout=delay_s)
        if not done and (second := make_second()) is not None:
            running[asyncio.create_task(attempts.open(second))] = second
        while True:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for opening in [opening for opening in running if opening in done]:
                failure = _failure_of(opening)
                if failure is None or len(running) == 1:
                    return running.pop(opening), opening
                attempt = running.pop(opening)
                attempts.release(attempt)
                on_end(attempt, failure)
    finally:
        # Without a pause, in which this task could be cancelled once more.
        for opening, attempt in running.items():
            opening.add_done_callback(_close)
            opening.cancel()
            attempts.release(attempt)
            on_end(attempt, None)


def _failure_of(opening: Opening) -> Refusal | UpstreamError | None:
    """What makes another engine worth waiting for. A defect is raised."""
    error = opening.exception()
    if error is None:
        opened = opening.result()
        return opened if isinstance(opened, Refusal) and not opened.concerns_request else None
    if isinstance(error, UpstreamError):
        return error
    raise error


def _close(opening: Opening) -> None:
    """An answer that has begun all the same is not read, and leaving it closes its connection."""
    if not opening.cancelled() and opening.exception() is None:
        opened = opening.result()
        if isinstance(opened, Exchange):
            opened.__exit__(None, None, None)
