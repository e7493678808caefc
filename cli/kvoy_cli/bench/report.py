"""What a benchmark hands back, as a table for people and as JSON.

Benchmarks build a `Report`; the command prints it. Nothing here measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

from kvoy_cli.bench.goals import Goal, number
from kvoy_cli.bench.machine import Machine

Cell = str | float | int
_FILE_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers are right-aligned and rounded for people; JSON keeps them as measured."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(row)} cells in {len(self.columns)}")


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's outcome."""

    name: str
    setting: str
    """What ran, in one sentence: model, engines, threads, sizes, repeats."""
    tables: tuple[Table, ...]
    goals: tuple[Goal, ...]
    notes: tuple[str, ...] = ()
    """How to read the figures, and what may distort them (the load generator's own CPU)."""
    figures: dict[str, float] = field(default_factory=dict)
    """Every named single figure, also those without a goal."""
    wall_s: float = math.nan

    @property
    def missed(self) -> tuple[Goal, ...]:
        return tuple(goal for goal in self.goals if not goal.is_met)


def to_json(machine: Machine, reports: Sequence[Report]) -> bytes:
    """One JSON object, indented; a figure that was not measured or never came is null."""
    value: dict[str, Any] = {
        "machine": machine,
        "benches": [
            {**msgspec.to_builtins(report), "goals": [_goal_dict(g) for g in report.goals]}
            for report in reports
        ],
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _goal_dict(goal: Goal) -> dict[str, Any]:
    return {**msgspec.to_builtins(goal), "met": goal.is_met}


def wide_console() -> Console:
    """A terminal's own width; enough for every table where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def print_report(console: Console, report: Report) -> None:
    console.print()
    console.rule(f"[bold]{report.name}", align="left")
    console.print(report.setting, highlight=False)
    for table in report.tables:
        console.print()
        console.print(_rich_table(table))
    if report.goals:
        console.print()
        console.print(_goal_table(report.goals))
    for note in report.notes:
        console.print(f"· {note}", style="dim", highlight=False)
    console.print(f"· took {report.wall_s:.0f} s", style="dim", highlight=False)


def print_machine(console: Console, machine: Machine) -> None:
    for line in machine.lines():
        console.print(line, highlight=False)


def _rich_table(table: Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left", title_style="")
    for index, column in enumerate(table.columns):
        is_text = any(isinstance(row[index], str) for row in table.rows)
        rich.add_column(column, justify="left" if is_text else "right")
    for row in table.rows:
        rich.add_row(*(cell if isinstance(cell, str) else number(float(cell)) for cell in row))
    return rich


def _goal_table(goals: Sequence[Goal]) -> RichTable:
    rich = RichTable(title="Goals", title_justify="left", title_style="")
    for column in ("goal", "measured", "asked", ""):
        rich.add_column(column, justify="left" if column in ("goal", "") else "right")
    for goal in goals:
        style = "green" if goal.is_met else "bold red"
        asked = f"{goal.relation} {number(goal.bound)}{goal.unit}"
        rich.add_row(
            goal.name, f"{number(goal.figure)}{goal.unit}", asked, f"[{style}]{goal.verdict}"
        )
    return rich
