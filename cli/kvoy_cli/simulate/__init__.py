"""`kvoy simulate`: a fleet in virtual time, its policies compared, and the goals it has to reach.

The simulation itself is `kvoy_simulate`; here are arguments, tables and plots.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run `kvoy simulate` with its arguments; returns the exit status."""
    from kvoy_cli.simulate.command import main as command_main

    return command_main(argv)
