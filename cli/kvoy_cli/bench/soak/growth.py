"""How a soak's memory is shown and judged. Pure."""

from __future__ import annotations

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.report import Table
from kvoy_cli.bench.soak.memory import Growth

_FLAT = 0.05


def growth_table(growth: Growth) -> Table:
    megabytes = (
        growth.first_bytes,
        growth.last_bytes,
        growth.least_bytes,
        growth.greatest_bytes,
        growth.bytes_per_hour,
    )
    return Table(
        f"The router's resident memory after the warm-up, MB; {growth.num_samples} samples",
        ("first tenth", "last tenth", "least", "greatest", "slope per hour", "spread %"),
        ((*(size / 1e6 for size in megabytes), 100 * growth.spread),),
    )


def growth_goal(growth: Growth) -> Goal:
    return Goal(
        "resident memory after the warm-up, greatest less least",
        100 * growth.spread,
        "<=",
        100 * _FLAT,
        " %",
    )
