"""Waiting for one of several things on the event loop."""

from __future__ import annotations

import asyncio
from typing import Any


async def first_event(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Until one of the events is set, or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def first_done(
    task: asyncio.Future[Any], event: asyncio.Event, timeout_s: float | None = None
) -> None:
    """Until the task is done, the event is set or the time is over; the task goes on."""
    wait = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, wait), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wait.cancel()
