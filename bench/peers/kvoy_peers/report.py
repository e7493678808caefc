"""The tables of the comparison. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoy_cli.bench.report import Cell, Report, Table
from kvoy_cli.bench.stats import Spread, median, paired_ratios
from kvoy_peers.figures import Placement, RequestCost, RouteCosts, TurnCost, added_ms
from kvoy_peers.goals import cost_goals, placement_goals, turn_added_ms
from kvoy_peers.names import DIRECT, RELAY


@dataclass(frozen=True, slots=True)
class Row:
    """One route or absent peer of the first table."""

    name: str
    version: str
    policy: str
    state: str
    """`measured`, or why it is not."""


def build_report(
    setting: str,
    rows: Sequence[Row],
    costs: Mapping[str, RouteCosts],
    placements: Mapping[str, Mapping[str, Placement]],
    load_average: tuple[float, float],
) -> Report:
    """`load_average`: the machine's, over a minute, before and after."""
    tables = [_peers_table(rows)]
    goals = []
    if costs:
        tables += [_stream_table(costs), _request_table(costs), _turn_table(costs)]
        goals += cost_goals(costs)
    tables += [_placement_table(mix, by_route) for mix, by_route in placements.items()]
    goals += placement_goals(placements)
    before, after = load_average
    return Report(
        name="peers",
        setting=setting,
        tables=tuple(tables),
        goals=tuple(goals),
        notes=(
            f"load average of the machine: {before:.1f} before, {after:.1f} after",
            "CPU is that of the process in the middle with its children, all threads; requests per "
            "core are requests per second of that CPU",
            "added: the route's percentile less that of going to an engine directly in the same "
            "repeat; medians of the repeats",
        ),
        figures=_figures(costs, placements),
    )


def _peers_table(rows: Sequence[Row]) -> Table:
    columns = ("route", "version", "policy", "state")
    return Table("Who", columns, tuple((r.name, r.version, r.policy, r.state) for r in rows))


def _stream_table(costs: Mapping[str, RouteCosts]) -> Table:
    baseline = [cost.cpu_us for cost in costs[RELAY].streams]
    rows: list[tuple[Cell, ...]] = []
    for name, runs in costs.items():
        if name == DIRECT:
            continue
        cpu = [cost.cpu_us for cost in runs.streams]
        rows.append(
            (
                name,
                Spread.of(cpu).text(1),
                Spread.of(paired_ratios(cpu, baseline)).text(),
                median(cost.events_per_read for cost in runs.streams),
                sum(cost.num_failed for cost in runs.streams),
                median(runs.resident_mb),
            )
        )
    columns = (
        "route",
        "CPU µs per chunk",
        "÷ relay",
        "events per read at the client",
        "failed",
        "RSS MB",
    )
    return Table("Streams: median (least–greatest)", columns, tuple(rows))


def _request_table(costs: Mapping[str, RouteCosts]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for concurrency in sorted({c for runs in costs.values() for c in runs.requests}):
        direct = costs[DIRECT].requests[concurrency]
        for name, runs in costs.items():
            measured = runs.requests[concurrency]
            rows.append((concurrency, name, *_request_cells(measured, direct)))
    columns = (
        "users",
        "route",
        "requests/s",
        "per core",
        "CPU µs",
        "p50 ms",
        "p99 ms",
        "added p50 ms",
        "added p99 ms",
        "failed",
    )
    return Table("Short requests, closed loop: medians", columns, tuple(rows))


def _request_cells(
    measured: Sequence[RequestCost], direct: Sequence[RequestCost]
) -> tuple[Cell, ...]:
    return (
        median(cost.requests_per_s for cost in measured),
        median(cost.requests_per_core_s for cost in measured),
        median(cost.cpu_us for cost in measured),
        median(cost.p50_ms for cost in measured),
        median(cost.p99_ms for cost in measured),
        added_ms([c.p50_ms for c in measured], [c.p50_ms for c in direct]),
        added_ms([c.p99_ms for c in measured], [c.p99_ms for c in direct]),
        sum(cost.num_failed for cost in measured),
    )


def _turn_table(costs: Mapping[str, RouteCosts]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for tokens in sorted({t for runs in costs.values() for t in runs.turns}):
        for name, runs in costs.items():
            turns = runs.turns[tokens]
            rows.append((tokens, name, *_turn_cells(costs, name, tokens, turns)))
    columns = (
        "history",
        "route",
        "p50 ms",
        "added p50 ms",
        "added p99 ms",
        "32 users: requests/s",
        "CPU µs",
        "failed",
        "tokens counted",
    )
    title = "The next turn of a known conversation, by tokens of its history: medians"
    return Table(title, columns, tuple(rows))


def _turn_cells(
    costs: Mapping[str, RouteCosts], name: str, tokens: int, turns: Sequence[TurnCost]
) -> tuple[Cell, ...]:
    counted = median(turn.prompt_tokens for turn in turns)
    return (
        median(turn.alone.p50_ms for turn in turns),
        turn_added_ms(costs, name, tokens),
        turn_added_ms(costs, name, tokens, lambda cost: cost.p99_ms),
        median(turn.together.requests_per_s for turn in turns),
        median(turn.together.cpu_us for turn in turns),
        sum(turn.alone.num_failed + turn.together.num_failed for turn in turns),
        counted if counted > 1 else math.nan,
    )


def _placement_table(mix: str, by_route: Mapping[str, Placement]) -> Table:
    rows = tuple(
        (
            name,
            placement.ttft_p50_s,
            placement.ttft_p90_s,
            placement.tokens_per_s,
            placement.goodput,
            placement.spread,
            placement.hit_rate,
            placement.score,
            placement.num_requests,
            placement.num_failed,
        )
        for name, placement in by_route.items()
    )
    columns = (
        "route",
        "TTFT p50 s",
        "p90 s",
        "tokens/s",
        "goodput/s",
        "spread",
        "hit rate",
        "hit ÷ spread",
        "requests",
        "failed",
    )
    return Table(mix, columns, rows)


def _figures(
    costs: Mapping[str, RouteCosts], placements: Mapping[str, Mapping[str, Placement]]
) -> dict[str, float]:
    """Every single figure, named by part, route and what it is."""
    figures: dict[str, float] = {}
    for name, runs in costs.items():
        figures[f"chunk_cpu_us.{name}"] = median(cost.cpu_us for cost in runs.streams)
        figures[f"resident_mb.{name}"] = median(runs.resident_mb)
        for users, measured in runs.requests.items():
            figures[f"requests_per_s.{users}.{name}"] = median(c.requests_per_s for c in measured)
            figures[f"request_cpu_us.{users}.{name}"] = median(c.cpu_us for c in measured)
        for tokens, turns in runs.turns.items():
            figures[f"turn_added_p50_ms.{tokens}.{name}"] = turn_added_ms(costs, name, tokens)
            figures[f"turn_cpu_us.{tokens}.{name}"] = median(t.together.cpu_us for t in turns)
    for mix, by_route in placements.items():
        for name, placement in by_route.items():
            figures[f"hit_rate.{mix}.{name}"] = placement.hit_rate
            figures[f"spread.{mix}.{name}"] = placement.spread
    return figures
