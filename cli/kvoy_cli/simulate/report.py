"""Tables and JSON of simulations. Nothing here measures anything."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvoy_simulate.goals import Goal, Verdict
from kvoy_simulate.intervals import Interval, mean_interval, ratio_interval
from kvoy_simulate.ladder import Ladder

_FILE_WIDTH = 140

FIGURES = {
    "output_tokens_per_s": "output tokens/s",
    "input_tokens_per_s": "input tokens/s",
    "completed_per_s": "requests/s completed",
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p90_s": "TTFT p90, s",
    "ttft_p99_s": "TTFT p99, s",
    "tpot_p50_s": "time per output token p50, s",
    "tpot_p90_s": "time per output token p90, s",
    "hit_rate": "prompt tokens found in caches",
    "imbalance": "busiest engine ÷ mean",
    "requests": "requests measured",
    "lost": "requests lost",
    "open_at_end": "still open at the end",
    "retries": "retries",
    "resumes": "streams resumed",
}
"""What is shown of a run, in this order, and its name for people."""

SeedFigures = Sequence[Mapping[str, float]]
"""One mapping per seed."""


def console() -> Console:
    """A terminal's own width; enough for every table where the output goes to a file."""
    made = Console()
    return made if made.is_terminal else Console(width=_FILE_WIDTH)


def number(value: float) -> str:
    """Four significant digits, thousands apart, no exponent for what people read."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never" if value > 0 else "-never"
    if value == int(value) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    digits = min(max(0, 3 - math.floor(math.log10(abs(value)))), 6)
    return f"{value:,.{digits}f}"


def with_interval(interval: Interval) -> str:
    """`1.23 (1.20 to 1.26)`; without bounds where one seed tells none."""
    if math.isnan(interval.low) or math.isnan(interval.high):
        return number(interval.value)
    return f"{number(interval.value)} ({number(interval.low)} to {number(interval.high)})"


def run_table(title: str, figures: SeedFigures) -> Table:
    table = _table(title, "", "measured" if len(figures) == 1 else "mean (95 % interval)")
    for name, words in _shown(figures[0]).items():
        interval = mean_interval([run[name] for run in figures])
        table.add_row(words, with_interval(interval))
    return table


def compare_table(title: str, by_policy: Mapping[str, SeedFigures]) -> Table:
    """The first policy's figures, and every other's as a ratio to the first one's."""
    first, *others = by_policy
    table = _table(title, "", first, *(f"{name} ÷ {first}" for name in others))
    for name, words in _shown(by_policy[first][0]).items():
        base = [run[name] for run in by_policy[first]]
        cells = [with_interval(mean_interval(base))]
        for other in others:
            values = [run[name] for run in by_policy[other]]
            cells.append(with_interval(ratio_interval(values, base)))
        table.add_row(words, *cells)
    return table


def _shown(figures: Mapping[str, float]) -> dict[str, str]:
    """Name and words of every figure; those of tenants have their words as name."""
    return {**FIGURES, **{name: name for name in figures if name not in FIGURES}}


def ladder_table(title: str, ladder: Ladder) -> Table:
    table = _table(title, "requests/s", "TTFT p90, s", "")
    for rung in sorted(ladder.rungs, key=lambda rung: rung.rate):
        verdict = "within" if rung.is_within(ladder.bound) else "beyond"
        table.add_row(number(rung.rate), number(rung.figure), verdict)
    return table


def goals_table(verdicts: Sequence[Verdict]) -> Table:
    table = _table("Goals", "row", "claim", "goal", "measured (95 % interval)", "seeds", "")
    latest = ""
    for verdict in verdicts:
        goal = verdict.goal
        style = "green" if verdict.is_met else "bold red"
        table.add_row(
            goal.row if goal.row != latest else "",
            goal.claim,
            _bound_text(goal),
            with_interval(verdict.measured),
            str(verdict.num_seeds),
            f"[{style}]{_verdict_word(verdict)}[/{style}]",
        )
        latest = goal.row
    return table


def verdict_text(verdict: Verdict) -> str:
    """One line: what was asked, what was measured, against whom."""
    goal = verdict.goal
    times = " ×" if goal.against else ""
    against = f" of {verdict.best_other}" if verdict.best_other else ""
    bound = "" if goal.bound is None else f" (goal {_bound_text(goal)})"
    return (
        f"{_verdict_word(verdict)}: {goal.row}, {goal.claim}: "
        f"{with_interval(verdict.measured)}{times}{against}{bound}"
    )


def _bound_text(goal: Goal) -> str:
    if goal.bound is None:
        return "-"
    return f"{goal.relation} {number(goal.bound)}{' ×' if goal.against else ''}"


def _verdict_word(verdict: Verdict) -> str:
    if verdict.goal.bound is None:
        return "told"
    return "met" if verdict.is_met else "MISSED"


def verdict_value(verdict: Verdict) -> dict[str, Any]:
    """For JSON."""
    goal = verdict.goal
    return {
        "row": goal.row,
        "claim": goal.claim,
        "figure": goal.figure,
        "ours": goal.ours.label,
        "against": verdict.best_other or None,
        "relation": goal.relation,
        "bound": goal.bound,
        "measured": interval_value(verdict.measured),
        "seeds": verdict.num_seeds,
        "met": None if goal.bound is None else verdict.is_met,
    }


def interval_value(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def print_json(value: Any) -> None:
    """Indented; a figure that was not measured or never came is null."""
    encoded = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(encoded.decode() + "\n")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="")
    for index, column in enumerate(columns):
        is_number = index > 0 and column != "claim"
        table.add_column(column, justify="right" if is_number else "left")
    return table
