"""The parent's look at a soak while it runs: the router's memory and CPU, its gauges, and what the
load says of itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx
import msgspec

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.processes import BenchError, Child, child, cpu_seconds
from kvoy_cli.bench.soak.memory import Sample, resident_bytes

SAMPLE_S = 2.0
_STOPPED_S = 20.0
_HTTP_TIMEOUT_S = 10.0

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Watched:
    """One look."""

    sample: Sample
    gauges: dict[str, float]
    """Unlabelled series of the router's /metrics, by name."""


@dataclass(slots=True)
class Load(Generic[P]):
    """A process that puts load on the router and prints a line of progress each second."""

    process: Child
    progress: P

    def check(self) -> None:
        if self.process.has_ended:
            raise self.process.failure("ended while it should put load on the router")


@dataclass(slots=True)
class Course(Generic[P]):
    """All looks of a run, and the load's progress at each of them."""

    looks: list[Watched] = field(default_factory=list)
    progress: list[P] = field(default_factory=list)

    def after(self, warmup_s: float) -> list[Sample]:
        return [look.sample for look in self.looks if look.sample.at_s >= warmup_s]


@asynccontextmanager
async def load(
    module: str, arguments: Sequence[str], kind: type[P], first: P, context: BenchContext
) -> AsyncIterator[Load[P]]:
    """Run the load while the block runs; it is asked to stop at the end, and its last words are the
    progress then."""
    command = [sys.executable, "-m", f"kvoy_cli.bench.soak.{module}", *arguments]
    pipe = subprocess.PIPE
    async with child(module, command, context.logs, stdin=pipe, stdout=pipe) as process:
        started = Load(process, first)
        reading = asyncio.ensure_future(_read(started, kind))
        try:
            yield started
            assert process.process.stdin is not None
            process.process.stdin.close()
            async with asyncio.timeout(_STOPPED_S):
                await reading
        finally:
            reading.cancel()


async def _read(started: Load[P], kind: type[P]) -> None:
    stdout = started.process.process.stdout
    assert stdout is not None
    while line := await asyncio.to_thread(stdout.readline):
        started.progress = msgspec.json.decode(line, type=kind)


async def follow(
    router: Child,
    metrics_url: str,
    load: Load[P],
    duration_s: float,
    say: Callable[[Watched, P], None],
) -> Course[P]:
    """Look every two seconds until the time is over. Raises BenchError where a process ends."""
    course: Course[P] = Course()
    begin_s = time.monotonic()
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
        for at in range(1, int(duration_s / SAMPLE_S) + 1):
            await asyncio.sleep(max(0.0, begin_s + at * SAMPLE_S - time.monotonic()))
            load.check()
            if router.has_ended:
                raise router.failure("ended under load")
            gauges = await _gauges(client, metrics_url)
            sample = Sample(
                time.monotonic() - begin_s, resident_bytes(router.pid), cpu_seconds(router.pid)
            )
            course.looks.append(Watched(sample, gauges))
            course.progress.append(load.progress)
            say(course.looks[-1], load.progress)
    return course


async def _gauges(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    try:
        answer = await client.get(url)
    except httpx.HTTPError as error:
        raise BenchError(f"{url} does not answer: {error!r}") from error
    if answer.status_code != 200:
        raise BenchError(f"{url} answered {answer.status_code}")
    return read_gauges(answer.text)


def read_gauges(text: str) -> dict[str, float]:
    """The series without labels in Prometheus' text form."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name and not name.startswith("#") and "{" not in name:
            found[name] = float(value)
    return found
