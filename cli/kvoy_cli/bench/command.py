"""The composition root of `kvoy bench`: arguments in, benchmarks run one by one, reports out."""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvoy_cli.bench.config import MIN_REPEATS, NAMES, BenchConfig
from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.machine import Machine, read_machine
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Report, print_machine, print_report, to_json, wide_console
from kvoy_contract.settings import read_settings

_DESCRIPTION = (
    "Benchmarks of Kvoy on this machine. Each starts engines and routers of its own on free "
    "loopback ports, compares with a named baseline in the same run, and ends them. `kvoy bench "
    "run` puts load on an endpoint that runs already; `kvoy bench soak` lets a router run for long."
)

Bench = Callable[[BenchContext], Awaitable[Report]]


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "run":
        from kvoy_cli.bench.run_load import main as run_main

        return run_main(argv[1:])
    if argv and argv[0] == "soak":
        from kvoy_cli.bench.soak.command import main as soak_main

        return soak_main(argv[1:])
    # gRPC's handlers around fork() only warn here: a child replaces itself at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    config = read_settings(BenchConfig, "kvoy bench", _DESCRIPTION, list(argv))
    names = NAMES if config.name == "all" else (config.name,)
    try:
        with tempfile.TemporaryDirectory(prefix="kvoy-bench-") as temporary:
            return _run_all(config, names, Path(config.logs or temporary))
    except KeyboardInterrupt:
        return 130


def _run_all(config: BenchConfig, names: Sequence[str], logs: Path) -> int:
    logs.mkdir(parents=True, exist_ok=True)
    console = wide_console()
    machine = read_machine()
    progress = Console(stderr=True)
    if not config.json:
        print_machine(console, machine)
    if config.repeats < MIN_REPEATS and not config.smoke:
        progress.print(f"fewer than {MIN_REPEATS} repeats: figures are not medians of enough runs")
    context = BenchContext(
        model=config.model,
        repeats=config.repeats,
        logs=logs,
        say=lambda text: progress.print(f"  {text}", style="dim", highlight=False),
        secret=secrets.token_hex(16),
        is_smoke=config.smoke,
    )
    reports: list[Report] = []
    failed: list[str] = []
    for name in names:
        progress.print(f"[bold]{name}[/bold]")
        try:
            report = run(_timed(load_bench(name), context, config.limit))
        except (BenchError, TimeoutError, OSError) as error:
            reason = str(error) or f"not done within {config.limit:.0f} s"
            progress.print(f"{name} failed: {reason}", style="red", markup=False, highlight=False)
            failed.append(name)
            continue
        reports.append(report)
        if not config.json:
            print_report(console, report)
        _write(config, machine, reports)
    if config.json:
        sys.stdout.write(to_json(machine, reports).decode() + "\n")
    return _verdict(config, reports, failed, progress)


def load_bench(name: str) -> Bench:
    """The `run` of the module that is called like the benchmark; imported only when asked for."""
    module = importlib.import_module(f"kvoy_cli.bench.{name.replace('-', '_')}")
    bench: Bench = module.run
    return bench


async def _timed(bench: Bench, context: BenchContext, limit_s: float) -> Report:
    start_s = time.perf_counter()
    async with asyncio.timeout(limit_s):
        report = await bench(context)
    return replace(report, wall_s=time.perf_counter() - start_s)


def _write(config: BenchConfig, machine: Machine, reports: Sequence[Report]) -> None:
    if config.output is not None:
        Path(config.output).write_bytes(to_json(machine, reports) + b"\n")


def _verdict(
    config: BenchConfig, reports: Sequence[Report], failed: Sequence[str], progress: Console
) -> int:
    """1 where a benchmark could not run or, with --check, where a goal is missed."""
    missed = [(report.name, goal) for report in reports for goal in report.missed]
    if config.check:
        for name, goal in missed:
            progress.print(f"missed: {name}: {goal.text()}", markup=False, highlight=False)
    if failed:
        progress.print(f"could not run: {', '.join(failed)}", markup=False, highlight=False)
    return 1 if failed or (config.check and missed) else 0
