"""Memory and CPU of a process, sampled while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil

_INTERVAL_S = 0.5
_MB = 1e6


@dataclass(slots=True)
class Usage:
    """Of one process in one stretch of time."""

    rss_mb: list[float] = field(default_factory=list)
    """One sample every half second."""
    cpu_s: float = 0.0
    """User and system time."""
    wall_s: float = 0.0

    @property
    def max_rss_mb(self) -> float:
        return max(self.rss_mb)

    @property
    def cpu_percent(self) -> float:
        """Of one core."""
        return 100 * self.cpu_s / self.wall_s


@asynccontextmanager
async def measured(pid: int) -> AsyncIterator[Usage]:
    """The usage is complete when the block ends."""
    process, usage = psutil.Process(pid), Usage()
    cpu_s, started_s = _cpu_s(process), time.monotonic()
    sampler = asyncio.create_task(_sample(process, usage))
    try:
        yield usage
        usage.rss_mb.append(_rss_mb(process))
        usage.cpu_s, usage.wall_s = _cpu_s(process) - cpu_s, time.monotonic() - started_s
    finally:
        sampler.cancel()


async def _sample(process: psutil.Process, usage: Usage) -> None:
    while True:
        usage.rss_mb.append(_rss_mb(process))
        await asyncio.sleep(_INTERVAL_S)


def _rss_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / _MB


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
