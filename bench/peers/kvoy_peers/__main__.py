"""The composition root of `make bench-peers`: settings in, everything started and measured, the
report out."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
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
from kvoy_contract.settings import read_settings
from kvoy_peers.comparison import compare
from kvoy_peers.config import PeersConfig

_DESCRIPTION = (
    "Kvoy's router, a bare relay and the field's routers, with the same traffic on the same "
    "engines, on loopback. Each peer is installed in an environment of its own."
)


def main(argv: Sequence[str] | None = None) -> int:
    """1 where it cannot run or, with --check, where a goal is missed."""
    # gRPC's handlers around fork() only warn here: a child replaces itself at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # As Ctrl-C does: what has been started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = list(sys.argv[1:] if argv is None else argv)
    config = read_settings(PeersConfig, "make bench-peers", _DESCRIPTION, arguments)
    progress = Console(stderr=True)
    try:
        with tempfile.TemporaryDirectory(prefix="kvoy-peers-") as temporary:
            report = _run(config, Path(config.logs or temporary), progress)
    except KeyboardInterrupt:
        return 130
    except (BenchError, TimeoutError, OSError) as error:
        reason = str(error) or f"not done within {config.limit:.0f} s"
        progress.print(f"failed: {reason}", style="red", markup=False, highlight=False)
        return 1
    _show(config, report)
    for goal in report.missed if config.check else ():
        progress.print(f"missed: {goal.text()}", markup=False, highlight=False)
    return 1 if config.check and report.missed else 0


def _run(config: PeersConfig, logs: Path, progress: Console) -> Report:
    logs.mkdir(parents=True, exist_ok=True)
    context = BenchContext(
        model=config.model,
        repeats=config.repeats,
        logs=logs,
        say=lambda text: progress.print(f"  {text}", style="dim", highlight=False),
        secret=secrets.token_hex(16),
        is_smoke=config.smoke,
    )
    return run(_limited(config, context))


async def _limited(config: PeersConfig, context: BenchContext) -> Report:
    start_s = time.perf_counter()
    async with asyncio.timeout(config.limit):
        report = await compare(config, context)
    return replace(report, wall_s=time.perf_counter() - start_s)


def _show(config: PeersConfig, report: Report) -> None:
    machine = read_machine()
    json = to_json(machine, [report])
    if config.output is not None:
        Path(config.output).write_bytes(json + b"\n")
    if config.json:
        sys.stdout.write(json.decode() + "\n")
        return
    console = wide_console()
    print_machine(console, machine)
    print_report(console, report)


if __name__ == "__main__":
    sys.exit(main())
