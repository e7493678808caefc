"""The composition root of `kvoy bench soak`."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.event_loop import run
from kvoy_cli.bench.machine import read_machine
from kvoy_cli.bench.processes import BenchError
from kvoy_cli.bench.report import Report, print_machine, print_report, to_json, wide_console
from kvoy_cli.bench.soak import prompts, streams
from kvoy_cli.bench.soak.config import SoakConfig
from kvoy_contract.settings import read_settings

_DESCRIPTION = (
    "A router under load for long, on loopback: no chunk may be lost, repeated or altered, and its "
    "memory must stay flat once it is warm. Everything that it starts ends with it."
)
_RUNS = {"streams": streams.run, "prompts": prompts.run}


def main(argv: Sequence[str]) -> int:
    # gRPC's handlers around fork() only warn here: a child replaces itself at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    config = read_settings(SoakConfig, "kvoy bench soak", _DESCRIPTION, list(argv))
    try:
        with tempfile.TemporaryDirectory(prefix="kvoy-soak-") as temporary:
            return _soak(config, Path(config.logs or temporary))
    except KeyboardInterrupt:
        return 130


def _soak(config: SoakConfig, logs: Path) -> int:
    logs.mkdir(parents=True, exist_ok=True)
    progress = Console(stderr=True)
    context = BenchContext(
        model=config.model,
        repeats=1,
        logs=logs,
        say=lambda text: progress.print(f"  {text}", style="dim", highlight=False),
        secret=secrets.token_hex(16),
    )
    begin_s = time.perf_counter()
    try:
        report = run(_RUNS[config.name](config, context))
    except (BenchError, OSError) as error:
        progress.print(f"soak {config.name} failed: {error}", markup=False, highlight=False)
        return 1
    return _tell(config, replace(report, wall_s=time.perf_counter() - begin_s), progress)


def _tell(config: SoakConfig, report: Report, progress: Console) -> int:
    machine = read_machine()
    as_json = to_json(machine, [report])
    if config.output is not None:
        Path(config.output).write_bytes(as_json + b"\n")
    if config.json:
        sys.stdout.write(as_json.decode() + "\n")
    else:
        console = wide_console()
        print_machine(console, machine)
        print_report(console, report)
    if not config.check or not report.missed:
        return 0
    for goal in report.missed:
        progress.print(f"missed: {goal.text()}", markup=False, highlight=False)
    return 1
