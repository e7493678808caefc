"""`kvoy bench soak streams`: thousands of open streams through one router, every chunk checked.

A source of numbered chunks, the router with all that it has on by default, and the clients are
processes of their own, on loopback.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.processes import child, cpu_seconds
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.soak.config import SoakConfig
from kvoy_cli.bench.soak.file_limit import raise_file_limit
from kvoy_cli.bench.soak.growth import growth_goal, growth_table
from kvoy_cli.bench.soak.memory import Growth
from kvoy_cli.bench.soak.numbered import Tally
from kvoy_cli.bench.soak.stream_client import Progress
from kvoy_cli.bench.soak.watch import Course, Watched, follow, load
from kvoy_cli.bench.stack import router
from kvoy_cli.bench.stats import ratio

STREAMS_PER_ENGINE = 200
"""Of the 256 that a stand-in says it can run: room for choices that are not perfectly even."""
ROUTER_FLAGS = ("--log-format", "json")
"""A line for each request, as in a cluster; all else that is on by default stays on."""
_RATE_GOAL = 0.98
_OPEN_PER_S = 250.0
_SAY_EVERY_S = 30.0


async def run(config: SoakConfig, context: BenchContext) -> Report:
    raise_file_limit(config.streams)
    gap_s = config.streams / config.per_s
    num_engines = math.ceil(config.streams / STREAMS_PER_ENGINE)
    context.say(f"{num_engines} stand-in engines, each with a step every {1000 * gap_s:g} ms")
    folder = None if config.model == "bytes" else context.model_folder()
    flags = ["--count", str(num_engines), "--gap-s", str(gap_s)]
    flags += [] if folder is None else ["--tokenizer", str(folder)]
    arguments = ["--streams", str(config.streams), "--events", str(config.chunks)]
    async with (
        _source(context, flags) as (entries, source_pid),
        router(entries, "kv-aware", context, *ROUTER_FLAGS) as front,
        load(
            "stream_client",
            [str(front.port), *arguments, "--open-per-s", str(_open_per_s(config))],
            Progress,
            Progress(0, Tally()),
            context,
        ) as clients,
    ):

        def say(look: Watched, progress: Progress) -> None:
            if look.sample.at_s % _SAY_EVERY_S < 2.0:
                context.say(
                    f"{look.sample.at_s:.0f} s: {progress.open:,} streams open, "
                    f"{progress.tally.events:,} chunks, {progress.tally.num_wrong} wrong, "
                    f"{look.sample.resident_bytes / 1e6:.0f} MB"
                )

        url = f"{front.url}/metrics"
        before_s = cpu_seconds(source_pid), cpu_seconds(clients.process.pid)
        course = await follow(front.child, url, clients, config.duration_s, say)
        after_s = cpu_seconds(source_pid), cpu_seconds(clients.process.pid)
    used_s = after_s[0] - before_s[0], after_s[1] - before_s[1]
    return build_report(config, num_engines, course, clients.progress.tally, used_s)


def _open_per_s(config: SoakConfig) -> float:
    """All are open after a quarter of the warm-up, or as fast as a fleet fills up."""
    return max(_OPEN_PER_S, 4 * config.streams / max(config.warmup_s, 1.0))


@asynccontextmanager
async def _source(context: BenchContext, flags: list[str]) -> AsyncIterator[tuple[list[str], int]]:
    command = [sys.executable, "-m", "kvoy_cli.bench.soak.source", *flags]
    async with child("source", command, context.logs, stdout=subprocess.PIPE) as process:
        stdout = process.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise process.failure("did not start")
        yield msgspec.json.decode(line, type=list[str]), process.pid


def build_report(
    config: SoakConfig,
    num_engines: int,
    course: Course[Progress],
    final: Tally,
    used_s: tuple[float, float],
) -> Report:
    """`used_s`: CPU time of source and clients."""
    looks = [
        (look, progress)
        for look, progress in zip(course.looks, course.progress, strict=True)
        if look.sample.at_s >= config.warmup_s
    ]
    (first, begun), (last, done) = looks[0], looks[-1]
    seconds = last.sample.at_s - first.sample.at_s
    chunks = done.tally.events - begun.tally.events
    cpu_s = last.sample.cpu_s - first.sample.cpu_s
    growth = Growth.of(course.after(config.warmup_s))
    least_open = min(progress.open for _, progress in looks)
    seconds_in_all = course.looks[-1].sample.at_s
    return Report(
        name="soak streams",
        setting=(
            f"{config.streams:,} open streams of {config.chunks:,} chunks in the mean, "
            f"{config.per_s:,.0f} chunks/s asked for, {num_engines} stand-in engines in one "
            f"process; {seconds_in_all:.0f} s, of which {config.warmup_s:.0f} s warm-up"
        ),
        tables=(
            Table(
                "Chunks, over all of the run",
                ("chunks", "lost", "repeated or out of order", "altered", "streams", "failed"),
                (
                    (
                        final.events,
                        final.lost,
                        final.repeated,
                        final.strange,
                        final.streams,
                        final.failed,
                    ),
                ),
            ),
            Table(
                "After the warm-up",
                ("chunks/s", "least open", "router: cores", "CPU µs per chunk", "source", "client"),
                (
                    (
                        ratio(chunks, seconds),
                        least_open,
                        ratio(cpu_s, seconds),
                        1e6 * ratio(cpu_s, chunks),
                        *(used / seconds_in_all for used in used_s),
                    ),
                ),
            ),
            growth_table(growth),
        ),
        goals=(
            Goal(
                "chunks lost, repeated, out of order or altered; broken streams",
                float(final.num_wrong),
                "==",
                0.0,
            ),
            Goal("streams open at all times", float(least_open), ">=", 0.99 * config.streams),
            Goal("chunks/s", ratio(chunks, seconds), ">=", _RATE_GOAL * config.per_s, "/s"),
            growth_goal(growth),
        ),
        notes=(
            "source and client: cores of these processes, over all of the run",
            *((f"first failure: {final.failure}",) if final.failure else ()),
        ),
        figures={
            "chunks": float(final.events),
            "chunks_per_s": ratio(chunks, seconds),
            "wrong": float(final.num_wrong),
            "router_cores": ratio(cpu_s, seconds),
            "rss_spread": growth.spread,
            "rss_bytes_per_hour": growth.bytes_per_hour,
        },
    )
