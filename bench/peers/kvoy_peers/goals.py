"""The goals of the comparison, from figures that were measured in one run. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.stats import median, paired_ratios, ratio
from kvoy_peers.figures import (
    Placement,
    RequestCost,
    RouteCosts,
    TurnCost,
    added_ms,
    best_of,
)
from kvoy_peers.names import DIRECT, ENVOY, KVOY, RELAY, VLLM_ROUTER

CHUNK_BOUND = 1.15
TURN_LATENCY_BOUNDS = {32: 2.0, 8_000: 4.0, 100_000: 12.0}
"""Time added to a next turn, in those of Envoy, by tokens of history."""
TURN_CPU_BOUNDS = {32: 3.6, 8_000: 11.0, 100_000: 19.0}
_ONE_BY_ONE = 1.5
"""Events per read, up to which a stream counts as passed on event by event."""
_COMPARED_AT = 32
"""Concurrency."""


def cost_goals(costs: Mapping[str, RouteCosts]) -> list[Goal]:
    return [
        *_chunk_goals(costs),
        _ceiling_goal(costs),
        *_turn_latency_goals(costs),
        *_turn_cpu_goals(costs),
    ]


def placement_goals(placements: Mapping[str, Mapping[str, Placement]]) -> list[Goal]:
    """`placements` by mix and route. No route may have a better hit rate and spread together."""
    goals = []
    for mix, by_route in placements.items():
        scores = {name: placement.score for name, placement in by_route.items()}
        rival, best = best_of(scores, KVOY)
        goals.append(
            Goal(
                f"{mix}: hit rate and spread together, Kvoy ÷ the best other ({rival or 'none'})",
                ratio(scores.get(KVOY, math.nan), best),
                ">=",
                1.0,
                " ×",
            )
        )
    return goals


def _chunk_goals(costs: Mapping[str, RouteCosts]) -> list[Goal]:
    cpu = {name: [cost.cpu_us for cost in runs.streams] for name, runs in costs.items()}
    against_relay = paired_ratios(cpu[KVOY], cpu[RELAY])
    # Whoever gathers events before it passes them on saves what is measured here.
    one_by_one = {
        name
        for name, runs in costs.items()
        if median(cost.events_per_read for cost in runs.streams) <= _ONE_BY_ONE
    }
    peers = {n: -median(v) for n, v in cpu.items() if n in one_by_one - {DIRECT, RELAY}}
    rival, negated = best_of(peers, KVOY)
    return [
        Goal(
            "CPU per streamed chunk, Kvoy ÷ bare asyncio relay",
            median(against_relay),
            "<=",
            CHUNK_BOUND,
            " ×",
        ),
        Goal(
            f"CPU per streamed chunk, Kvoy ÷ the cheapest peer ({rival or 'none'})",
            ratio(median(cpu[KVOY]), -negated),
            "<=",
            1.0,
            " ×",
        ),
    ]


def _ceiling_goal(costs: Mapping[str, RouteCosts]) -> Goal:
    def per_core(name: str) -> float:
        runs = costs[name].requests.get(_COMPARED_AT, []) if name in costs else []
        return median(run.requests_per_core_s for run in runs)

    return Goal(
        f"requests per second of CPU at concurrency {_COMPARED_AT}, Kvoy ÷ vllm-router",
        ratio(per_core(KVOY), per_core(VLLM_ROUTER)),
        ">=",
        1.0,
        " ×",
    )


def _turn_latency_goals(costs: Mapping[str, RouteCosts]) -> list[Goal]:
    return [
        Goal(
            f"time added to the next turn after {tokens:,} tokens, Kvoy ÷ Envoy round robin",
            ratio(turn_added_ms(costs, KVOY, tokens), turn_added_ms(costs, ENVOY, tokens)),
            "<=",
            bound,
            " ×",
        )
        for tokens, bound in TURN_LATENCY_BOUNDS.items()
        if tokens in costs[KVOY].turns
    ]


def _turn_cpu_goals(costs: Mapping[str, RouteCosts]) -> list[Goal]:
    def cpu_us(name: str, tokens: int) -> float:
        return median(turn.together.cpu_us for turn in _turns(costs, name, tokens))

    return [
        Goal(
            f"CPU of the next turn after {tokens:,} tokens at concurrency {_COMPARED_AT}, "
            "Kvoy ÷ Envoy round robin",
            ratio(cpu_us(KVOY, tokens), cpu_us(ENVOY, tokens)),
            "<=",
            bound,
            " ×",
        )
        for tokens, bound in TURN_CPU_BOUNDS.items()
        if tokens in costs[KVOY].turns
    ]


def turn_added_ms(
    costs: Mapping[str, RouteCosts],
    name: str,
    tokens: int,
    figure: Callable[[RequestCost], float] = lambda cost: cost.p50_ms,
) -> float:
    """Added to going to an engine directly."""
    through = [figure(turn.alone) for turn in _turns(costs, name, tokens)]
    directly = [figure(turn.alone) for turn in _turns(costs, DIRECT, tokens)]
    return added_ms(through, directly) if len(through) == len(directly) else math.nan


def _turns(costs: Mapping[str, RouteCosts], name: str, tokens: int) -> Sequence[TurnCost]:
    return costs[name].turns.get(tokens, []) if name in costs else []
