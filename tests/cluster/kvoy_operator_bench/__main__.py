"""`make bench-operator`: the operator with a thousand services on a real API server.

Everything runs on loopback and ends with this process; each stage has a deadline.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvoy_cli.bench.machine import read_machine
from kvoy_cli.bench.report import print_machine, print_report, wide_console
from kvoy_operator_bench.bench import Options, run


def main(arguments: Sequence[str] | None = None) -> int:
    """1 with --check where a goal is missed."""
    given = _parser().parse_args(arguments)
    # As Ctrl-C does: what has been started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = wide_console()
    print_machine(console, read_machine())
    options = Options(
        given.services, given.namespaces, given.added, given.steady_s, given.operator_log
    )
    report = run(options, lambda text: console.print(f"  {text}", highlight=False))
    print_report(console, report)
    return 1 if given.check and report.missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-operator", description=__doc__)
    parser.add_argument("--services", type=int, default=1000, metavar="N")
    parser.add_argument("--namespaces", type=int, default=10, metavar="N", help="they are spread")
    parser.add_argument("--steady-s", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--added", type=int, default=10, metavar="N", help="one by one, afterwards")
    parser.add_argument("--operator-log", type=Path, metavar="FILE", help="where to keep its log")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
