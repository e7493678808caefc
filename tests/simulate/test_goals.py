"""The table of goals: what it asks, and how a figure is judged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvoy_router.flow_ticket import FlowLimits
from kvoy_simulate.baselines import EVERY_POLICY
from kvoy_simulate.goals import Case, Goal, cases_of, judge, recovery_s, rows, seeds_of
from kvoy_simulate.goals_table import all_goals
from kvoy_simulate.measures import NAMES
from kvoy_simulate.runs import scenario_of
from kvoy_simulate.scenario_file import Mix, find_scenario, shipped_scenarios

OURS, A, B = Case("s"), Case("s", "a"), Case("s", "b")


def verdict_of(goal: Goal, figures: dict[Case, list[float]]) -> tuple[float, bool, str]:
    verdict = judge(goal, lambda case: [{"f": value} for value in figures[case]])
    return verdict.measured.value, verdict.is_met, verdict.best_other


def test_ours_is_compared_with_the_best_of_the_others() -> None:
    figures = {OURS: [2.0, 4.0], A: [1.0, 2.0], B: [4.0, 8.0]}

    less = verdict_of(Goal("r", "c", "f", OURS, (A, B), "<=", 1.9), figures)
    more = verdict_of(Goal("r", "c", "f", OURS, (A, B), ">=", 0.4), figures)

    assert (less[0], more[0]) == pytest.approx((2.0, 0.5))
    assert less[1:] == (False, "s a")
    assert more[1:] == (True, "s b")


def test_without_others_ours_is_compared_with_the_bound() -> None:
    goal = Goal("r", "c", "f", OURS, (), "<=", 0.0)

    assert verdict_of(goal, {OURS: [0.0, 0.0]}) == (0.0, True, "")
    assert verdict_of(goal, {OURS: [0.0, 1.0]}) == (0.5, False, "")


@pytest.mark.parametrize("relation", ["<=", ">="])
def test_what_was_not_measured_meets_nothing(relation: str) -> None:
    goal = Goal("r", "c", "f", OURS, (A,), relation, 1.0)  # type: ignore[arg-type]

    assert not verdict_of(goal, {OURS: [math.nan], A: [1.0]})[1]


def test_a_case_is_run_once_for_all_goals_that_need_it() -> None:
    goals = [Goal(row, "c", "f", OURS, (A,), "<=", 1.0) for row in ("one", "two")]

    assert cases_of(goals) == [OURS, A]
    assert rows(goals) == ["one", "two"]


def test_the_table_names_scenarios_policies_and_figures_that_exist() -> None:
    figures = {*NAMES, "knee", "recovery_s", "others_ttft_p90_s"}

    for goal in all_goals():
        assert goal.figure in figures
        for case in goal.cases:
            assert case.scenario in shipped_scenarios()
            assert case.policy in EVERY_POLICY
            assert (goal.figure == "knee") == case.finds_knee
            assert goal.figure != "recovery_s" or case.finds_recovery
        assert goal.ours.policy == "kv-aware"
        if not goal.row.startswith("greedy tenant"):
            assert all(replace(c, policy="kv-aware", routers=None) ==
                       replace(goal.ours, routers=None) for c in goal.against)  # fmt: skip


def test_recovery_is_counted_from_the_events_end_to_the_last_short_window() -> None:
    undisturbed = [100.0] * 60

    def disturbed(*dips: range) -> list[float]:
        return [0.0 if any(i in dip for dip in dips) else 100.0 for i in range(60)]

    assert recovery_s(disturbed(range(20, 30)), undisturbed, 30.0) == 0.0
    assert recovery_s(disturbed(range(20, 33)), undisturbed, 30.0) == 3.0
    assert recovery_s(disturbed(range(20, 30), range(40, 41)), undisturbed, 30.0) == 11.0
    assert recovery_s([96.0] * 60, undisturbed, 30.0) == 0.0
    assert recovery_s(disturbed(range(20, 60)), undisturbed, 30.0) == math.inf


def test_ours_has_to_be_far_below_the_others_only_where_a_good_policy_does_not_queue() -> None:
    bounds = {
        (goal.ours.rate, goal.bound)
        for goal in all_goals()
        if goal.row == "shared-prefix, least-load" and goal.figure == "ttft_p90_s"
    }

    assert bounds == {(8.0, 1.05), (13.0, 1.05), (15.0, 0.5), (20.0, 0.5), (60.0, 1.05)}


@pytest.mark.parametrize(("ending", "share"), [("", 5.0), ("-loaded", 7.0)])
def test_the_greedy_tenant_is_the_only_difference_between_the_two_scenarios_of_its_rows(
    ending: str, share: float
) -> None:
    greedy, fair = (find_scenario(f"{name}{ending}") for name in ("greedy-tenant", "fair-tenants"))
    assert isinstance(greedy.workload, Mix)
    assert isinstance(fair.workload, Mix)
    asks = greedy.workload.parts["greedy"], fair.workload.parts["greedy"]

    assert [part.arrivals.rate for part in asks] == [10 * share, share]  # type: ignore[union-attr]
    others = [{k: v for k, v in s.workload.parts.items() if k != "greedy"} for s in (greedy, fair)]  # type: ignore[union-attr]
    assert others[0] == others[1]
    assert replace(greedy, workload=fair.workload, summary=fair.summary) == fair


def test_every_scenario_of_the_table_has_the_flow_control_of_a_router_by_default() -> None:
    for goal in all_goals():
        for case in goal.cases:
            assert scenario_of(case).flow == (FlowLimits() if case.has_flow else None)
        assert goal.bound is None or all(case.has_flow for case in goal.cases)


def test_a_figure_without_a_goal_is_told_and_never_missed() -> None:
    assert verdict_of(Goal("r", "c", "f", OURS, (A,), "<=", None), {OURS: [9.0], A: [1.0]})[1]


def test_a_noisy_figure_is_judged_by_more_seeds() -> None:
    goal = Goal("r", "c", "f", OURS, (A,), "<=", 1.0, least_seeds=10)

    assert [len(seeds_of(goal, asked)) for asked in (1, 3, 12)] == [10, 10, 12]
