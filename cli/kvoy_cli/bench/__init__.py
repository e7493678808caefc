"""`kvoy bench`: named benchmarks with goals, and a load generator for any OpenAI endpoint.

Each benchmark starts what it needs, measures ratios within one run against a named baseline, and
says on which machine. Nothing here is imported by a serving process.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run `kvoy bench` with its arguments; returns the exit status."""
    from kvoy_cli.bench.command import main as command_main

    return command_main(argv)
