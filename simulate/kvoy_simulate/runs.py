"""Executes cases: one simulation or a ladder of them per case and seed, in several processes.

Every run makes its scenario, workload and policies anew from (case, seed), so results do not depend
on which process did what, or when.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from msgspec import structs

from kvoy_simulate.baselines import policy_maker
from kvoy_simulate.fleet import run
from kvoy_simulate.goals import GREEDY, KNEE, OTHERS_TTFT_P90, RECOVERY, Case, recovery_s
from kvoy_simulate.intervals import percentile
from kvoy_simulate.ladder import Ladder, climb
from kvoy_simulate.measures import Measures, measure, output_rate, tenant_waits
from kvoy_simulate.outcome import Outcome
from kvoy_simulate.scenario import (
    EngineDies,
    Event,
    RouterRestarts,
    ScaleDown,
    ScaleUp,
)
from kvoy_simulate.scenario_file import ScenarioFile, find_scenario
from kvoy_simulate.trace import Trace

KNEE_TTFT_P90_S = 1.0
KNEE_TOLERANCE = 0.5
"""Requests per second between the two rates around the knee."""
KNEE_FIRST_RATE = 8.0


@dataclass(frozen=True, slots=True)
class Job:
    case: Case
    seed: int


Figures = dict[str, float]


def simulate(scenario: ScenarioFile, policy: str, seed: int) -> Outcome:
    """Raises ValueError for an unknown policy."""
    return run(scenario.scenario(), policy=policy_maker(policy), seed=seed)


def execute(job: Job) -> Figures:
    """The figures of `Measures`, and those that the case asks for besides."""
    try:
        return _execute(job)
    except Exception as error:
        error.add_note(f"in {job.case.label}, seed {job.seed}")
        raise


def _execute(job: Job) -> Figures:
    case = job.case
    scenario = scenario_of(case)
    if case.finds_knee:
        return {KNEE: find_knee(scenario, case.policy, job.seed).knee}
    outcome = simulate(scenario, case.policy, job.seed)
    figures = figures_of(outcome)
    if case.finds_recovery:
        undisturbed = dataclasses.replace(scenario, events=())
        other = simulate(undisturbed, case.policy, job.seed)
        figures[RECOVERY] = recovery_s(
            output_rates(outcome), output_rates(other), max(map(event_end_s, scenario.events))
        )
    return figures


def scenario_of(case: Case) -> ScenarioFile:
    """Raises ScenarioError, and ValueError when the case's rate does not fit its workload."""
    scenario = find_scenario(case.scenario)
    if case.trace is not None:
        scenario = dataclasses.replace(scenario, workload=Trace(file=case.trace))
    if not case.has_flow:
        scenario = dataclasses.replace(scenario, flow=None)
    if case.routers is not None:
        scenario = dataclasses.replace(scenario, routers=case.routers)
    if case.rate is not None:
        scenario = scenario.at_rate(case.rate)
    share = case.time_share
    if share != 1.0:
        scenario = dataclasses.replace(
            scenario,
            warmup_s=scenario.warmup_s * share,
            duration_s=scenario.duration_s * share,
            drain_s=scenario.drain_s * share,
        )
    return scenario


def find_knee(
    scenario: ScenarioFile,
    policy: str,
    seed: int,
    *,
    first_rate: float = KNEE_FIRST_RATE,
    tolerance: float = KNEE_TOLERANCE,
    on_rung: Callable[[float, Measures], None] = lambda rate, measures: None,
) -> Ladder:
    """The highest rate with a TTFT p90 of at most a second. Raises ValueError for a workload
    without a rate."""

    def ttft_p90_s(rate: float) -> float:
        measures = measure(simulate(scenario.at_rate(rate), policy, seed))
        on_rung(rate, measures)
        return measures.ttft_p90_s

    return climb(ttft_p90_s, bound=KNEE_TTFT_P90_S, first_rate=first_rate, tolerance=tolerance)


def execute_all(
    jobs: Sequence[Job],
    *,
    num_processes: int,
    on_done: Callable[[Job, Figures], None] = lambda job, figures: None,
) -> Mapping[Job, Figures]:
    """`on_done` is called in the caller's process as results come, in any order. An exception of a
    job is raised here, and the jobs that run beside it end with it."""
    done: dict[Job, Figures] = {}
    if num_processes == 1:
        for job in jobs:
            done[job] = execute(job)
            on_done(job, done[job])
        return done
    context = multiprocessing.get_context("spawn")
    earlier = multiprocessing.active_children()
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_log_errors_only
    ) as executor:
        futures: dict[Future[Figures], Job] = {executor.submit(execute, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                job = futures[future]
                done[job] = future.result()
                on_done(job, done[job])
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()).difference(earlier):
                process.terminate()  # a run takes minutes, and nobody waits for it any more
            raise
    return done


def _log_errors_only() -> None:
    """What a router warns of is what the scenario makes happen."""
    logging.getLogger("kvoy_router").setLevel(logging.ERROR)


def figures_of(outcome: Outcome) -> Figures:
    """Those of `Measures`, and each tenant's TTFT where there are several; beside a greedy one also
    that of all others."""
    figures = {name: float(value) for name, value in structs.asdict(measure(outcome)).items()}
    waits_s = tenant_waits(outcome)
    if len(waits_s) > 1:
        for tenant in sorted(waits_s):
            for q in (50, 90):
                figures[f"TTFT p{q} of {tenant}, s"] = percentile(waits_s[tenant], q)
    if GREEDY in waits_s:
        others = [wait_s for tenant in waits_s if tenant != GREEDY for wait_s in waits_s[tenant]]
        figures[OTHERS_TTFT_P90] = percentile(others, 90)
    return figures


def output_rates(outcome: Outcome) -> list[float]:
    """Output tokens of each whole second."""
    return [output_rate(outcome, second, second + 1) for second in range(int(outcome.duration_s))]


def event_end_s(event: Event) -> float:
    """When what it disturbs is there again; what never comes back counts from its beginning."""
    match event:
        case EngineDies():
            return event.at_s + (event.restart_after_s or 0.0)
        case RouterRestarts():
            return event.at_s + (event.down_s if event.is_killed else 0.0)
        case ScaleUp():
            return event.at_s + event.load_s
        case ScaleDown():
            return event.at_s
        case _:
            return event.at_s + event.for_s
