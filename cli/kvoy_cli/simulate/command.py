"""The composition root of `kvoy simulate`: arguments in, simulations run, tables out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from kvoy_cli.errors import CommandError
from kvoy_cli.simulate import report
from kvoy_cli.simulate.config import (
    CompareConfig,
    GoalsConfig,
    LadderConfig,
    RunConfig,
    ScaleConfig,
    TraceConfig,
    num_processes,
)
from kvoy_contract.settings import read_settings
from kvoy_simulate.baselines import policy_maker
from kvoy_simulate.goals import Case, Goal, Verdict, judge, rows, seeds_of
from kvoy_simulate.goals_table import all_goals
from kvoy_simulate.measures import Measures
from kvoy_simulate.runs import (
    Figures,
    Job,
    execute_all,
    figures_of,
    find_knee,
    scenario_of,
    simulate,
)
from kvoy_simulate.scenario_file import find_scenario, shipped_scenarios
from kvoy_simulate.trace import Generated, generate, write_trace

_SMOKE_SHARE = 0.1

_USAGE = """usage: kvoy simulate COMMAND ...

A fleet of engines and routers in virtual time: the code that serves, on a clock that does not wait.

commands:
  run SCENARIO      one policy; tables, JSON, plots
  compare SCENARIO  several policies that meet the same requests, with intervals
  ladder SCENARIO   the highest rate with a TTFT p90 of at most a second
  goals             the table of what the router has to reach; --check exits 1 where one is missed
  scale             what a virtual second of 1,000 engines costs this machine
  trace FILE        write a made-up trace in the Mooncake format
  list              the shipped scenarios

`kvoy simulate COMMAND --help` has a command's options; docs/simulate.md the format of scenarios."""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    command = _COMMANDS.get(argv[0])
    if command is None:
        raise CommandError(f"no command {argv[0]!r}; there are {', '.join(_COMMANDS)}")
    try:
        return command(list(argv[1:]))
    except ValueError as error:
        # Scenario, trace, rate or policy: what the user named, in words for the user.
        raise CommandError(str(error)) from error


def _run(argv: list[str]) -> int:
    config = read_settings(RunConfig, "kvoy simulate run", "One policy in one scenario.", argv)
    case = Case(config.scenario, config.policy, rate=config.rate, trace=config.trace)
    scenario = scenario_of(case)
    policy_maker(config.policy)
    seeds = range(config.seed, config.seed + config.seeds)
    if config.plots is None:
        figures = _figures([case], seeds, config.processes, say=not config.json)[case]
    else:
        from kvoy_cli.simulate.plots import write_plots

        outcomes = [simulate(scenario, config.policy, seed) for seed in seeds]
        figures = [figures_of(outcome) for outcome in outcomes]
        files = write_plots(outcomes[0], Path(config.plots))
        Console(stderr=True).print(f"wrote {', '.join(map(str, files))}", highlight=False)
    if config.json:
        report.print_json({"case": case.label, "seeds": list(seeds), "figures": figures})
    else:
        title = f"{scenario.summary}\n{case.label}, {_seeds_text(seeds)}"
        report.console().print(report.run_table(title, figures))
    return 0


def _compare(argv: list[str]) -> int:
    config = read_settings(
        CompareConfig, "kvoy simulate compare", "Policies that meet the same requests.", argv
    )
    cases = [
        Case(config.scenario, policy, rate=config.rate, trace=config.trace)
        for policy in config.policy_names
    ]
    for case in cases:
        policy_maker(case.policy)
    scenario = scenario_of(cases[0])
    seeds = range(config.seed, config.seed + config.seeds)
    figures = _figures(cases, seeds, config.processes, say=not config.json)
    by_policy = {case.policy: figures[case] for case in cases}
    if config.json:
        report.print_json(
            {"scenario": config.scenario, "rate": config.rate, "seeds": list(seeds),
             "figures": by_policy}
        )  # fmt: skip
    else:
        title = (
            f"{scenario.summary}, {_seeds_text(seeds)}\n"
            "ratios: geometric mean over seeds (95 % interval, Student's t of paired log ratios)"
        )
        report.console().print(report.compare_table(title, by_policy))
    return 0


def _ladder(argv: list[str]) -> int:
    config = read_settings(
        LadderConfig, "kvoy simulate ladder", "The knee of a scenario under rising load.", argv
    )
    scenario = find_scenario(config.scenario)
    policy_maker(config.policy)
    progress = Console(stderr=True)

    def say(rate: float, measures: Measures) -> None:
        progress.print(
            f"  {rate:g}/s: TTFT p90 {report.number(measures.ttft_p90_s)} s, "
            f"{report.number(measures.output_tokens_per_s)} output tokens/s",
            style="dim",
            highlight=False,
        )

    ladder = find_knee(
        scenario,
        config.policy,
        config.seed,
        first_rate=config.first_rate,
        tolerance=config.tolerance,
        on_rung=say,
    )
    if config.json:
        report.print_json({"knee": ladder.knee, "bound_s": ladder.bound, "rungs": ladder.rungs})
    else:
        title = f"{scenario.summary}, {config.policy}: knee {report.number(ladder.knee)}/s"
        report.console().print(report.ladder_table(title, ladder))
    return 0


def _goals(argv: list[str]) -> int:
    config = read_settings(
        GoalsConfig, "kvoy simulate goals", "What the router has to reach in virtual time.", argv
    )
    goals = [goal for goal in all_goals() if config.only is None or config.only in goal.row]
    if not goals:
        names = ", ".join(rows(all_goals()))
        raise CommandError(f"--only: no row contains {config.only!r}; there are {names}")
    if config.smoke:
        goals = [_shortened(goal) for goal in goals]
    verdicts = _judged(goals, config.seeds, config.processes, say=not config.json)
    if config.json:
        report.print_json([report.verdict_value(verdict) for verdict in verdicts])
    else:
        report.console().print(report.goals_table(verdicts))
    return 1 if config.check and not all(verdict.is_met for verdict in verdicts) else 0


def _judged(
    goals: Sequence[Goal], num_seeds: int, processes: int | None, *, say: bool
) -> list[Verdict]:
    """In the goals' order; each is said as soon as its last run is done."""
    jobs_of = {
        goal: [Job(case, seed) for case in goal.cases for seed in seeds_of(goal, num_seeds)]
        for goal in goals
    }
    jobs = list(dict.fromkeys(job for goal in goals for job in jobs_of[goal]))
    done: dict[Job, Figures] = {}
    verdicts: dict[Goal, Verdict] = {}
    progress = Console(stderr=True)

    def figures_for(goal: Goal, case: Case) -> list[Figures]:
        return [done[Job(case, seed)] for seed in seeds_of(goal, num_seeds)]

    def on_done(job: Job, figures: Figures) -> None:
        done[job] = figures
        if say:
            text = f"  {len(done)}/{len(jobs)} {job.case.label}, seed {job.seed}"
            progress.print(text, style="dim", highlight=False)
        for goal in goals:
            if goal not in verdicts and all(other in done for other in jobs_of[goal]):
                verdicts[goal] = judge(goal, partial(figures_for, goal))
                if say:
                    progress.print(
                        report.verdict_text(verdicts[goal]), highlight=False, soft_wrap=True
                    )

    execute_all(jobs, num_processes=num_processes(processes, len(jobs)), on_done=on_done)
    return [verdicts[goal] for goal in goals]


def _shortened(goal: Goal) -> Goal:
    def shorten(case: Case) -> Case:
        return dataclasses.replace(case, time_share=_SMOKE_SHARE)

    return dataclasses.replace(
        goal, ours=shorten(goal.ours), against=tuple(map(shorten, goal.against))
    )


def _scale(argv: list[str]) -> int:
    from kvoy_simulate import scale

    config = read_settings(
        ScaleConfig, "kvoy simulate scale", "What a virtual second of a large fleet costs.", argv
    )
    measured = scale.measure(
        config.engines,
        config.rate,
        warmup_s=config.warmup,
        for_s=config.duration,
        kv_tokens=config.kv_tokens,
    )
    if config.json:
        report.print_json(measured)
    else:
        print(scale.report(measured))
    return 0


def _trace(argv: list[str]) -> int:
    config = read_settings(
        TraceConfig, "kvoy simulate trace", "Write a made-up trace in the Mooncake format.", argv
    )
    description = Generated(rate=config.rate, duration_s=config.duration)
    path = Path(config.output)
    num_written = write_trace(path, generate(description, config.seed))
    print(f"{path}: {num_written:,} requests")
    return 0


def _list(argv: list[str]) -> int:
    if argv:
        raise CommandError("list takes no arguments")
    shipped = shipped_scenarios()
    width = max(map(len, shipped))
    for name in shipped:
        print(f"{name:{width}}  {find_scenario(name).summary}")
    return 0


def _figures(
    cases: Sequence[Case], seeds: Sequence[int], processes: int | None, *, say: bool
) -> Mapping[Case, list[Figures]]:
    """Of each case one entry per seed, in the seeds' order."""
    jobs = [Job(case, seed) for seed in seeds for case in cases]
    progress = Console(stderr=True)
    num_done = 0

    def on_done(job: Job, figures: Figures) -> None:
        nonlocal num_done
        num_done += 1
        if say:
            text = f"  {num_done}/{len(jobs)} {job.case.label}, seed {job.seed}"
            progress.print(text, style="dim", highlight=False)

    done = execute_all(jobs, num_processes=num_processes(processes, len(jobs)), on_done=on_done)
    return {case: [dict(done[Job(case, seed)]) for seed in seeds] for case in cases}


def _seeds_text(seeds: range) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "compare": _compare,
    "ladder": _ladder,
    "goals": _goals,
    "scale": _scale,
    "trace": _trace,
    "list": _list,
}
