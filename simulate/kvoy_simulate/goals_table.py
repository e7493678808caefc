"""The goals themselves. See `goals` for what a goal is, docs/simulate.md for the workloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvoy_simulate.goals import KNEE, OTHERS_TTFT_P90, OURS, RECOVERY, Case, Goal, Relation

THROUGHPUT = "output_tokens_per_s"
TTFT_MEAN, TTFT_P50, TTFT_P90, TTFT_P99 = (
    f"ttft_{name}_s" for name in ("mean", "p50", "p90", "p99")
)

PARTITION_SEEDS = {20.0: 10}
"""By rate. At 20/s all engines fill up within the measured time; which of them does so first, and
when, is chance, and a single seed's ratio says nothing."""
PARTITION_RATES = (13.0, 15.0, 20.0, 30.0, 60.0)
OTHERS_RATES = (8.0, 13.0, 15.0, 20.0, 60.0)
FAR_BELOW = 0.5
"""What "far below" means for a 90th percentile."""
FAR_BELOW_RATES = (15.0, 20.0)
"""Past 13/s, where others queue and a good policy hardly does. At 60/s three quarters of what is
asked cannot be served by any policy, and all waits are cut by the end of the simulation."""
OTHERS = (
    "random",
    "least-load",
    "session-hash",
    "prefix-only",
    "approximate-prefix",
    "holder-18s",
)


def all_goals() -> tuple[Goal, ...]:
    return (
        *_against_round_robin(),
        *_against_partition(),
        *_against_others(),
        *_conversations(),
        *_code_generation(),
        *_without_reuse(),
        *_hot_spot(),
        *_mixed_hardware(),
        *_disturbed(),
        *_replicas(),
        *_greedy_tenant(),
    )


def _against_round_robin() -> Iterator[Goal]:
    row, shared = "shared-prefix, round-robin", Case("shared-prefix")
    knee = replace(shared, finds_knee=True)
    yield Goal(row, "knee", KNEE, knee, (_by("round-robin", knee),), ">=", 1.9)
    at_60, at_13 = replace(shared, rate=60.0), replace(shared, rate=13.0)
    yield Goal(
        row, "throughput at 60/s", THROUGHPUT, at_60, (_by("round-robin", at_60),), ">=", 1.9
    )
    yield Goal(row, "TTFT p90 at 13/s", TTFT_P90, at_13, (_by("round-robin", at_13),), "<=", 0.01)


def _against_partition() -> Iterator[Goal]:
    row = "shared-prefix, partition"
    for rate in PARTITION_RATES:
        ours = Case("shared-prefix", rate=rate)
        other = (_by("partition", ours),)
        seeds = PARTITION_SEEDS.get(rate, 1)
        yield Goal(row, f"throughput at {rate:g}/s", THROUGHPUT, ours, other, ">=", 0.97, seeds)
        yield Goal(row, f"TTFT p90 at {rate:g}/s", TTFT_P90, ours, other, "<=", 1.15, seeds)


def _against_others() -> Iterator[Goal]:
    for policy in OTHERS:
        row = f"shared-prefix, {policy}"
        for rate in OTHERS_RATES:
            ours = Case("shared-prefix", rate=rate)
            other = (_by(policy, ours),)
            bound = FAR_BELOW if rate in FAR_BELOW_RATES else 1.05
            yield Goal(row, f"TTFT p90 at {rate:g}/s", TTFT_P90, ours, other, "<=", bound)
            yield Goal(row, f"throughput at {rate:g}/s", THROUGHPUT, ours, other, ">=", 0.98)


def _conversations() -> Iterator[Goal]:
    for scenario in ("conversations", "agents", "trace"):
        ours = Case(scenario)
        others = tuple(_by(policy, ours) for policy in ("sticky", "least-load"))
        yield Goal(scenario, "TTFT mean", TTFT_MEAN, ours, others, "<=", 1.0)
        yield Goal(scenario, "TTFT p90", TTFT_P90, ours, others, "<=", 1.0)
        yield Goal(scenario, "throughput", THROUGHPUT, ours, others, ">=", 0.98)


def _code_generation() -> Iterator[Goal]:
    ours = Case("code-generation")
    other = (_by("round-robin", ours),)
    yield Goal("code generation", "input tokens/s", "input_tokens_per_s", ours, other, ">=", 2.5)


def _without_reuse() -> Iterator[Goal]:
    for scenario in ("no-reuse", "short-prompts", "reasoning"):
        ours = Case(scenario)
        others = tuple(_by(policy, ours) for policy in ("round-robin", "least-load", "random"))
        yield Goal(scenario, "throughput", THROUGHPUT, ours, others, ">=", 0.98)
        yield Goal(scenario, "TTFT p50", TTFT_P50, ours, others, "<=", 1.02)
        yield Goal(scenario, "TTFT p99", TTFT_P99, ours, others, "<=", 1.02)


def _hot_spot() -> Iterator[Goal]:
    """All requests are alike, so giving each engine every eighth is perfect balance."""
    ours = Case("hot-spot")
    other = (_by("round-robin", ours),)
    yield Goal("hot spot", "max/mean running", "imbalance", ours, (), "<=", 1.2)
    yield Goal("hot spot", "throughput", THROUGHPUT, ours, other, ">=", 0.95)


def _mixed_hardware() -> Iterator[Goal]:
    ours = Case("mixed-hardware")
    yield Goal("speeds 1:2:4", "TTFT p99", TTFT_P99, ours, (_by("least-load", ours),), "<=", 0.7)


def _disturbed() -> Iterator[Goal]:
    for scenario in ("engine-restart", "telemetry-loss", "router-restart"):
        ours = Case(scenario, finds_recovery=True)
        yield Goal(scenario, "back within 5 %, s", RECOVERY, ours, (), "<=", 10.0)
        yield Goal(scenario, "requests lost", "lost", ours, (), "<=", 0.0)


def _replicas() -> Iterator[Goal]:
    ours, one = Case("shared-prefix", rate=13.0, routers=4), Case("shared-prefix", rate=13.0)
    yield Goal("4 routers", "throughput at 13/s", THROUGHPUT, ours, (one,), ">=", 0.95)
    yield Goal("4 routers", "TTFT p90 at 13/s", TTFT_P90, ours, (one,), "<=", 1.05)


def _greedy_tenant() -> Iterator[Goal]:
    """The same requests of four tenants, beside a fifth one that asks as much as each of them, or
    ten times as much: in a fleet that is half loaded without it, and in one near its knee. And what
    that costs, beside a fleet that serves whoever comes first."""
    for row, ending in (("greedy tenant", ""), ("greedy tenant, loaded", "-loaded")):
        ours, fair = Case(f"greedy-tenant{ending}"), Case(f"fair-tenants{ending}")
        unfair = replace(ours, has_flow=False)
        claims: tuple[tuple[str, str, Case, Case, Relation, float | None], ...] = (
            ("TTFT p90 of the others", OTHERS_TTFT_P90, ours, fair, "<=", 1.1),
            ("the same, first come first served", OTHERS_TTFT_P90, unfair, fair, "<=", None),
            ("throughput of that", THROUGHPUT, ours, unfair, ">=", None),
        )
        for claim, figure, case, other, relation, bound in claims:
            yield Goal(row, claim, figure, case, (other,), relation, bound)


def _by(policy: str, case: Case) -> Case:
    assert case.policy == OURS
    return replace(case, policy=policy)
