"""`kvoy bench reports`: what a router spends on the load reports of a fleet, and what it asks for.

Stand-in engines report at several paces to a router that does nothing else; the CPU of its process
is what reports cost, over gRPC and into its books. Then they would report ten times as often as the
router's budget allows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.processes import BenchError, cpu_seconds
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.router_cost import fake_engines
from kvoy_cli.bench.soak.watch import read_gauges
from kvoy_cli.bench.stack import Router, router, settle
from kvoy_cli.bench.stats import Spread, median, ratio

_COUNTER = "kvoy_router_load_reports_total"
_HTTP_TIMEOUT_S = 10.0
_BUDGET_SLACK = 1.1
_CORE_GOAL = 0.3
"""Of one core, at the default budget: the rest is for requests."""


@dataclass(frozen=True, slots=True)
class Sizes:
    num_engines: int = 100
    intervals_s: tuple[float, ...] = (0.5, 0.1, 0.05)
    """The last one is what the default budget allows so many engines."""
    budget_per_s: float = 500.0
    for_s: float = 4.0


@dataclass(frozen=True, slots=True)
class ReportCost:
    per_s: float
    cores: float

    @property
    def us(self) -> float:
        return 1e6 * ratio(self.cores, self.per_s)


_SMOKE = Sizes(num_engines=3, intervals_s=(0.1,), budget_per_s=10.0, for_s=0.5)


async def run(context: BenchContext) -> Report:
    sizes = _SMOKE if context.is_smoke else Sizes()
    costs = {}
    for interval_s in sizes.intervals_s:
        context.say(f"{sizes.num_engines} engines that report every {1000 * interval_s:g} ms")
        costs[interval_s] = await _measure(context, sizes, interval_s)
    wanted_s = sizes.num_engines / sizes.budget_per_s / 10
    context.say(f"the same every {1000 * wanted_s:g} ms, and a budget of a tenth of that")
    budget = ("--max-reports-per-s", str(sizes.budget_per_s))
    bounded = await _measure(context, sizes, wanted_s, *budget)
    return build_report(sizes, costs, bounded)


async def _measure(
    context: BenchContext, sizes: Sizes, interval_s: float, *flags: str
) -> list[ReportCost]:
    engines = ("--count", str(sizes.num_engines), "--report-s", str(interval_s))
    async with (
        fake_engines(context, *engines) as entries,
        router(entries, "kv-aware", context, *flags) as front,
    ):
        await settle(min(3.0, sizes.for_s))
        return [await _measure_once(front, sizes.for_s) for _ in range(context.repeats)]


async def _measure_once(front: Router, for_s: float) -> ReportCost:
    reports, cpu_s = await _num_reports(front), cpu_seconds(front.child.pid)
    begin_s = time.monotonic()
    await settle(for_s)
    seconds = time.monotonic() - begin_s
    cpu_s = cpu_seconds(front.child.pid) - cpu_s
    return ReportCost((await _num_reports(front) - reports) / seconds, cpu_s / seconds)


async def _num_reports(front: Router) -> float:
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
        answer = await client.get(f"{front.url}/metrics")
    if answer.status_code != 200:
        raise BenchError(f"{front.url}/metrics answered {answer.status_code}")
    return read_gauges(answer.text)[_COUNTER]


def build_report(
    sizes: Sizes, costs: dict[float, list[ReportCost]], bounded: list[ReportCost]
) -> Report:
    busiest = costs[sizes.intervals_s[-1]]
    rows = [(f"every {1000 * interval_s:g} ms", runs) for interval_s, runs in costs.items()]
    rows.append((f"a budget of {sizes.budget_per_s:g}/s", bounded))
    per_s = median(cost.per_s for cost in bounded)
    return Report(
        name="reports",
        setting=f"{sizes.num_engines} stand-in engines in one process, {len(busiest)} repeats",
        tables=(
            Table(
                "The router's CPU, with nothing else to do",
                ("reports", "reports/s", "cores", "µs per report"),
                tuple(
                    (
                        name,
                        median(cost.per_s for cost in runs),
                        median(cost.cores for cost in runs),
                        Spread.of([cost.us for cost in runs]).text(0),
                    )
                    for name, runs in rows
                ),
            ),
        ),
        goals=(
            Goal(
                f"reports/s with a budget of {sizes.budget_per_s:g}",
                per_s,
                "<=",
                _BUDGET_SLACK * sizes.budget_per_s,
                "/s",
            ),
            Goal(
                f"cores for {median(cost.per_s for cost in busiest):,.0f} reports/s",
                median(cost.cores for cost in busiest),
                "<=",
                _CORE_GOAL,
            ),
        ),
        figures={
            "us_per_report": median(cost.us for cost in busiest),
            "bounded_reports_per_s": per_s,
        },
    )
