"""Sizes and figures of the router-cost benchmark, and the report made of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.stats import Spread, median, paired_ratios, percentile

_CPU_GOAL = 1.5
_ADDED_P50_MS = 1.0
_ADDED_P99_MS = 5.0
_RESIDENT_MB = 200.0
_STRIDE = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    num_streams: int = 16
    chunks_per_stream: int = 1000
    gap_s: float = 0.004
    """Between two events of a stream: long enough that each is read by itself."""
    latency_s: float = 5.0
    """Seconds of short requests per repeat and route."""
    rate: float = 200.0
    num_known_engines: int = 100
    hashes_per_engine: tuple[int, ...] = (0, 2000, 4800)
    """The last one decides: 4,800 strides of 64 tokens fill a large accelerator's KV cache."""


@dataclass(frozen=True, slots=True)
class ChunkCost:
    cpu_us: float
    chunks_per_s: float
    events_per_read: float
    generator_cpu_share: float


@dataclass(frozen=True, slots=True)
class Latency:
    times_ms: tuple[float, ...]
    cpu_us: float
    """Of the process in the middle, per request."""
    generator_cpu_share: float

    def percentile(self, q: float) -> float:
        return percentile(self.times_ms, q)


def added_ms(latencies: dict[str, list[Latency]], route: str, q: float) -> list[float]:
    """Repeat by repeat: this route's percentile less that of going directly."""
    return [
        through.percentile(q) - direct.percentile(q)
        for through, direct in zip(latencies[route], latencies["direct"], strict=True)
    ]


def build_report(
    sizes: Sizes,
    costs: dict[str, list[ChunkCost]],
    latencies: dict[str, list[Latency]],
    resident: dict[int, int],
) -> Report:
    cpu = {name: [cost.cpu_us for cost in runs] for name, runs in costs.items()}
    against_relay = paired_ratios(cpu["router"], cpu["relay"])
    added_p50 = added_ms(latencies, "router", 50)
    added_p99 = added_ms(latencies, "router", 99)
    largest = max(resident)
    resident_mb = resident[largest] / 1e6
    return Report(
        name="router-cost",
        setting=_setting(sizes, len(against_relay)),
        tables=(_cpu_table(costs), _latency_table(latencies), _memory_table(sizes, resident)),
        goals=(
            Goal(
                "CPU per streamed chunk, router ÷ bare asyncio relay",
                median(against_relay),
                "<=",
                _CPU_GOAL,
                " ×",
            ),
            Goal(
                f"added to a short request at {sizes.rate:g}/s, p50",
                median(added_p50),
                "<=",
                _ADDED_P50_MS,
                " ms",
            ),
            Goal(
                f"added to a short request at {sizes.rate:g}/s, p99",
                median(added_p99),
                "<=",
                _ADDED_P99_MS,
                " ms",
            ),
            Goal(
                f"resident memory of a router that knows {sizes.num_known_engines} engines of "
                f"{largest * _STRIDE:,} cached tokens each",
                resident_mb,
                "<=",
                _RESIDENT_MB,
                " MB",
            ),
        ),
        notes=_notes(costs, latencies, added_p50, added_p99),
        figures={
            **{f"cpu_us_per_chunk_{name.replace(' ', '_')}": median(v) for name, v in cpu.items()},
            "added_p50_ms": median(added_p50),
            "added_p99_ms": median(added_p99),
            "resident_mb": resident_mb,
        },
    )


def _setting(sizes: Sizes, repeats: int) -> str:
    return (
        f"{sizes.num_streams} streams of {sizes.chunks_per_stream:,} events, one every "
        f"{1000 * sizes.gap_s:g} ms each, from a stand-in engine in its own process; then chat "
        f"requests that are not streamed, Poisson at {sizes.rate:g}/s for {sizes.latency_s:g} s "
        f"per route; {repeats} repeats, routes in turn"
    )


def _cpu_table(costs: dict[str, list[ChunkCost]]) -> Table:
    baseline = [cost.cpu_us for cost in costs["relay"]]
    rows = []
    for name, runs in costs.items():
        cpu = [cost.cpu_us for cost in runs]
        rows.append(
            (
                name,
                Spread.of(cpu).text(1),
                Spread.of(paired_ratios(cpu, baseline)).text(),
                median(cost.chunks_per_s for cost in runs),
                median(cost.events_per_read for cost in runs),
            )
        )
    columns = ("route", "CPU µs per chunk", "÷ relay", "chunks/s", "events per read at the client")
    return Table("CPU of the process in the middle: median (least–greatest)", columns, tuple(rows))


def _latency_table(latencies: dict[str, list[Latency]]) -> Table:
    rows = tuple(
        (
            name,
            median(latency.percentile(50) for latency in runs),
            median(latency.percentile(99) for latency in runs),
            Spread.of(added_ms(latencies, name, 50)).text(),
            Spread.of(added_ms(latencies, name, 99)).text(),
            median(latency.cpu_us for latency in runs),
        )
        for name, runs in latencies.items()
    )
    columns = ("route", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "CPU µs per request")
    return Table("Short requests, not streamed: median (least–greatest)", columns, rows)


def _memory_table(sizes: Sizes, resident: dict[int, int]) -> Table:
    rows = tuple(
        (count, count * _STRIDE, count * sizes.num_known_engines, num_bytes / 1e6)
        for count, num_bytes in sorted(resident.items())
    )
    columns = ("hashes per engine", "cached tokens per engine", "hashes known", "resident MB")
    title = f"A router that knows {sizes.num_known_engines} engines, all holding different work"
    return Table(title, columns, rows)


def _notes(
    costs: dict[str, list[ChunkCost]],
    latencies: dict[str, list[Latency]],
    added_p50: list[float],
    added_p99: list[float],
) -> tuple[str, ...]:
    streaming = max(cost.generator_cpu_share for runs in costs.values() for cost in runs)
    short = max(latency.generator_cpu_share for runs in latencies.values() for latency in runs)
    return (
        "relay: bare asyncio protocols on uvloop, bytes in, bytes out; on streams: the same with "
        "asyncio's readers and writers",
        f"added p50 {Spread.of(added_p50).text()} ms, p99 {Spread.of(added_p99).text()} ms",
        f"load generator: {100 * streaming:.0f} % of one core while streaming, {100 * short:.0f} % "
        "with short requests",
    )
