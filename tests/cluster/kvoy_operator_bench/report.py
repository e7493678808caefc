"""The outcome as tables and goals; the goals are Kvoy's own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.stats import percentile
from kvoy_operator_bench.audit import WRITES, Call, num_writes
from kvoy_operator_bench.stages import Stage

_MAX_RSS_MB = 300
_MAX_CPU_PERCENT = 5
_MAX_RECONCILE_P99_S = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    num_services: int
    num_namespaces: int
    operator_user: str
    start_rss_mb: float
    """When it leads and there is nothing yet."""
    creation: Stage
    settle_times_s: Sequence[float]
    """From each creation until its status was settled, all being created at once."""
    children: Mapping[str, int]
    """Objects by plural kind."""
    steady: Stage
    added_s: Sequence[float]
    """As `settle_times_s`, of services that were added one by one."""
    restart: Stage
    """Of a second operator that finds everything there."""
    deletion: Stage
    num_log_lines: int
    num_complaints: int
    """Of them of level warning or worse."""


def report_of(outcome: Outcome, wall_s: float) -> Report:
    return Report(
        name="operator",
        setting=(
            f"{outcome.num_services} LLMServices (6 of 10 plain, 2 with prefill, 2 behind a shared "
            f"LLMRouter) in {outcome.num_namespaces} namespaces; etcd, kube-apiserver, "
            "kube-controller-manager and one operator on loopback, pods declared ready as they "
            f"appear; steady for {outcome.steady.wall_s:.0f} s"
        ),
        tables=(
            _stages(outcome),
            _times(outcome),
            _children(outcome),
            _calls("Calls of the operator while all were created", outcome, outcome.creation),
            _calls("Calls of the operator in the steady state", outcome, outcome.steady),
        ),
        goals=_goals(outcome),
        notes=(
            "memory and CPU are those of the operator's process; MB are millions of bytes",
            "the first reconciles share the machine with the API server, etcd, the controllers and "
            "the benchmark; reconcile times are the operator's own histogram",
            "every resource is looked at again every 8 minutes without a cause: a shorter steady "
            "state shows less CPU",
            f"the operator wrote {outcome.num_log_lines} log lines, {outcome.num_complaints} of "
            "them warnings or worse",
        ),
        figures=_figures(outcome),
        wall_s=wall_s,
    )


def _goals(outcome: Outcome) -> tuple[Goal, ...]:
    steady = outcome.steady
    reconciles = outcome.creation.reconciles
    max_rss_mb = max(stage.usage.max_rss_mb for _, stage in _named_stages(outcome))
    return (
        Goal("writes of the operator, steady", _own_writes(outcome, steady), "==", 0),
        Goal("writes of anybody, steady", num_writes(steady.calls), "==", 0),
        Goal("operator's memory, at most", max_rss_mb, "<=", _MAX_RSS_MB, " MB"),
        Goal("operator's CPU, steady", steady.usage.cpu_percent, "<=", _MAX_CPU_PERCENT, " %"),
        Goal("reconcile p99", reconciles.quantile_s(0.99), "<=", _MAX_RECONCILE_P99_S, " s"),
    )


def _figures(outcome: Outcome) -> dict[str, float]:
    return {
        "created_and_settled_s": outcome.creation.wall_s,
        "restarted_s": outcome.restart.wall_s,
        "deleted_s": outcome.deletion.wall_s,
        "reconcile_p50_s": outcome.creation.reconciles.quantile_s(0.5),
        "reconcile_p99_s": outcome.creation.reconciles.quantile_s(0.99),
        "steady_rss_mb": outcome.steady.usage.rss_mb[-1],
        "steady_cpu_percent": outcome.steady.usage.cpu_percent,
        "steady_reconciles": outcome.steady.reconciles.count,
        "complaints": outcome.num_complaints,
    }


def _named_stages(outcome: Outcome) -> tuple[tuple[str, Stage], ...]:
    return (
        ("create", outcome.creation),
        ("steady", outcome.steady),
        ("restart", outcome.restart),
        ("delete", outcome.deletion),
    )


def _stages(outcome: Outcome) -> Table:
    rows = [("start", math.nan, math.nan, outcome.start_rss_mb, *(math.nan,) * 5)]
    for name, stage in _named_stages(outcome):
        usage, reconciles = stage.usage, stage.reconciles
        rows.append(
            (
                name,
                stage.wall_s,
                usage.max_rss_mb,
                usage.rss_mb[-1],
                usage.cpu_s,
                reconciles.count,
                reconciles.quantile_s(0.5),
                reconciles.quantile_s(0.99),
                _own_writes(outcome, stage),
            )
        )
    columns = ("stage", "s", "max RSS MB", "RSS MB at its end", "CPU s", "reconciles", "p50 s")
    return Table("Stages", (*columns, "p99 s", "writes"), tuple(rows))


def _times(outcome: Outcome) -> Table:
    rows = (
        ("all at once", *_percentiles(outcome.settle_times_s)),
        ("one by one beside them", *_percentiles(outcome.added_s)),
    )
    return Table("From creation to a settled status, s", ("created", "p50", "p99", "max"), rows)


def _percentiles(times_s: Sequence[float]) -> tuple[float, float, float]:
    return percentile(times_s, 50), percentile(times_s, 99), percentile(times_s, 100)


def _children(outcome: Outcome) -> Table:
    rows = [(kind, count) for kind, count in outcome.children.items() if count]
    return Table(
        "Objects made", ("kind", "count"), (*rows, ("all", sum(outcome.children.values())))
    )


def _calls(title: str, outcome: Outcome, stage: Stage) -> Table:
    totals: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for call, count in stage.calls.items():
        if call.user == outcome.operator_user:
            totals[call.verb, call.resource] += count
            failed[call.verb, call.resource] += count if _is_failure(call) else 0
    rows = [(verb, resource, n, failed[verb, resource]) for (verb, resource), n in totals.items()]
    rows.sort(key=lambda row: -row[2])
    return Table(title, ("verb", "resource", "calls", "refused"), tuple(rows))


def _is_failure(call: Call) -> bool:
    """Looking for what is not there yet is none."""
    return call.code >= 400 and (call.verb in WRITES or call.code != 404)


def _own_writes(outcome: Outcome, stage: Stage) -> int:
    return num_writes(stage.calls, outcome.operator_user)
