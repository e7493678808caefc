"""The memory of a running router: looks at what is resident, and tells requests what is left."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path

from kvoy_contract.host_limits import container_memory_limit, host_memory
from kvoy_router.body_memory import BodyMemory
from kvoy_router.memory_balance import LOOK_S, MIB, MemoryBalance

_STATM = Path("/proc/self/statm")
_LOOKS_PER_TRIM = 20
_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 2 * 1024 * 1024
"""Smaller ones are used again: to have each one anew from the kernel costs more than to fill it."""
_TRIM_S = 1.0


class RouterMemory:
    def __init__(self, memory_mib: int | None, max_buffered_mib: int | None) -> None:
        """`memory_mib`: what the router keeps to; None: its container's limit."""
        limit = container_memory_limit() if memory_mib is None else memory_mib * MIB
        self.balance = MemoryBalance(limit, host_memory().total, resident_bytes())
        self.balance.told_bytes = _told_bytes(max_buffered_mib)
        self.bodies = BodyMemory(self.balance.budget)

    def cache_bytes(self, told_mib: int | None) -> int:
        return self.balance.cache_bytes(told_mib)

    def use_bounds(self, max_buffered_mib: int | None) -> None:
        """From now on."""
        self.balance.told_bytes = _told_bytes(max_buffered_mib)
        self.bodies.use(self.balance.budget)

    async def run(self) -> None:
        """Look again and again; while requests wait, have back what is free."""
        num_looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            num_looks += 1
            if self.bodies.num_waiting and num_looks >= _LOOKS_PER_TRIM:
                num_looks = 0
                await asyncio.to_thread(return_free_memory)
            self.balance.look(resident_bytes(), self.bodies.used_bytes)
            self.bodies.use(self.balance.budget)


def _told_bytes(max_buffered_mib: int | None) -> int | None:
    return None if max_buffered_mib is None else max_buffered_mib * MIB


def resident_bytes() -> int:
    """Of this process; 0 where the kernel does not tell."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_large_blocks() -> None:
    """Have the C library return large blocks to the kernel as soon as they are free. It would keep
    tens of megabytes once it has seen one go, and this process has only so much."""
    library = _c_library()
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


class FreeMemory:
    """Returned to the kernel as `return_free_memory` does, at most once a second."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def give_back(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _TRIM_S
            return_free_memory()


def return_free_memory() -> None:
    """Likewise what is free between small blocks. Other threads run meanwhile, for the milliseconds
    that it takes, as far as they want no memory."""
    library = _c_library()
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
