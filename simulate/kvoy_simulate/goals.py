"""What the router has to reach in virtual time: a table of goals over cases, as data.

A case is a scenario under a policy, with what is changed in it. A goal compares one figure of our
case with the same figure of another, over paired seeds, or with a bound alone. All goals take the
shipped scenarios and the router's default configuration. `runs` executes cases; nothing here does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvoy_simulate.intervals import Interval, mean, mean_interval, ratio_interval

OURS = "kv-aware"
KNEE = "knee"
"""Highest rate with a 90th percentile of TTFT of at most one second."""
RECOVERY = "recovery_s"
"""Seconds after the end of an event until throughput stays within 5 % of an undisturbed run's."""

GREEDY = "greedy"
"""The tenant that asks too much, where a scenario has one."""
OTHERS_TTFT_P90 = "others_ttft_p90_s"
"""Of the requests of all tenants but that one."""


Relation = Literal["<=", ">="]


@dataclass(frozen=True, slots=True)
class Case:
    scenario: str
    policy: str = OURS
    rate: float | None = None
    """Instead of the scenario's own."""
    routers: int | None = None
    finds_knee: bool = False
    """A ladder of runs instead of one."""
    finds_recovery: bool = False
    """Also a run without the scenario's events."""
    has_flow: bool = True
    """Whether the routers have the scenario's flow control, or none at all."""
    trace: str | None = None
    """A trace file instead of the scenario's workload."""
    time_share: float = 1.0
    """Of the scenario's warm-up and duration; below 1 to see that something runs at all."""

    @property
    def label(self) -> str:
        parts = [self.scenario, self.policy]
        if self.rate is not None:
            parts.append(f"{self.rate:g}/s")
        if self.routers is not None:
            parts.append(f"{self.routers} routers")
        if self.finds_knee:
            parts.append("knee")
        if not self.has_flow:
            parts.append("without flow control")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Goal:
    row: str
    """The row of the table that it belongs to."""
    claim: str
    figure: str
    ours: Case
    against: tuple[Case, ...]
    """Ours is divided by the best of these; empty: ours alone is compared."""
    relation: Relation
    bound: float | None
    """None: the figure is told, and no goal."""
    least_seeds: int = 1
    """For a figure that differs much between seeds: never judged by fewer."""

    @property
    def cases(self) -> tuple[Case, ...]:
        return (self.ours, *self.against)


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: Goal
    measured: Interval
    best_other: str
    """Label of the case that ours was divided by."""
    num_seeds: int

    @property
    def is_met(self) -> bool:
        """By the estimate itself; the interval tells how sure it is. NaN meets nothing."""
        value, bound = self.measured.value, self.goal.bound
        if bound is None:
            return True
        return value <= bound if self.goal.relation == "<=" else value >= bound


Figures = Mapping[str, float]
"""One run's figures by name."""


def judge(goal: Goal, figures: Callable[[Case], Sequence[Figures]]) -> Verdict:
    """`figures` has one entry per seed, the same seeds for every case."""
    ours = [run[goal.figure] for run in figures(goal.ours)]
    if not goal.against:
        return Verdict(goal, mean_interval(ours), "", len(ours))
    others = {case: [run[goal.figure] for run in figures(case)] for case in goal.against}
    is_less_better = goal.relation == "<="
    best = min(others, key=lambda case: _order(mean(others[case]), is_less_better))
    return Verdict(goal, ratio_interval(ours, others[best]), best.label, len(ours))


def _order(value: float, is_less_better: bool) -> float:
    if math.isnan(value):
        return math.inf
    return value if is_less_better else -value


def seeds_of(goal: Goal, num_seeds: int) -> range:
    return range(max(num_seeds, goal.least_seeds))


def rows(goals: Sequence[Goal]) -> list[str]:
    return list(dict.fromkeys(goal.row for goal in goals))


def cases_of(goals: Sequence[Goal]) -> list[Case]:
    """Each once, in order of first use."""
    return list(dict.fromkeys(case for goal in goals for case in goal.cases))


def recovery_s(
    disturbed: Sequence[float], undisturbed: Sequence[float], event_end_s: float, window_s: int = 5
) -> float:
    """Both are output tokens of each whole second of the measured run. The first second after the
    event from which on every window of `window_s` is within 5 % below; infinite: never."""
    begin = math.ceil(event_end_s)
    last = min(len(disturbed), len(undisturbed)) - window_s
    starts = range(begin, last + 1)
    short = [
        start
        for start in starts
        if math.fsum(disturbed[start : start + window_s])
        < 0.95 * math.fsum(undisturbed[start : start + window_s])
    ]
    if not starts or (short and short[-1] == starts[-1]):
        return math.inf
    return float(short[-1] + 1 - begin) if short else 0.0
