"""Half of the event loop at most for work that cannot leave it: the decoding of large bodies.

A body of 20 MB takes 25 to 300 ms to decode, in which no stream moves, and a thread would not help,
since the interpreter's lock is held all the while. Bodies that arrive together are therefore
decoded one by one, and after each the loop belongs to everybody else for as long as it took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LoopShare:
    """Made inside a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, once it is its turn."""
        await self._turn.acquire()
        begun_s = time.monotonic()  # the loop's own clock may stand while it works
        try:
            return work()
        finally:
            self._loop.call_later(time.monotonic() - begun_s, self._turn.release)
