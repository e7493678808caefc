"""Figures of the benchmarks: percentiles, outcomes, goals, and how a knee is found."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvoy_cli.bench.goals import Goal, Relation, number
from kvoy_cli.bench.knee import climb
from kvoy_cli.bench.machine import read_machine
from kvoy_cli.bench.outcome import Outcome, summarise
from kvoy_cli.bench.report import Report, Table, to_json
from kvoy_cli.bench.stats import Spread, median, paired_ratios, percentile, ratio


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
        ([1.0, math.inf], 100, math.inf),
        ([1.0, 1.0, math.inf], 50, 1.0),
        ([math.inf, math.inf], 50, math.inf),
    ],
)
def test_a_percentile_interpolates_between_order_statistics(
    values: list[float], q: float, expected: float
) -> None:
    assert percentile(values, q) == pytest.approx(expected)


def test_figures_of_nothing_are_not_numbers() -> None:
    assert math.isnan(median([]))
    assert math.isnan(ratio(1.0, 0.0))
    assert math.isnan(Spread.of([]).median)


def test_ratios_are_taken_repeat_by_repeat() -> None:
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="longer"):
        paired_ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("figure", "relation", "bound", "is_met"),
    [
        (1.5, "<=", 1.5, True),
        (1.51, "<=", 1.5, False),
        (0.95, ">=", 0.95, True),
        (0.0, "==", 0.0, True),
        (1.0, "==", 0.0, False),
        (math.nan, "<=", 1.0, False),
        (math.nan, ">=", 1.0, False),
        (math.inf, "<=", 1.0, False),
    ],
)
def test_a_goal_is_met_only_by_a_figure_within_its_bound(
    figure: float, relation: Relation, bound: float, is_met: bool
) -> None:
    assert Goal("g", figure, relation, bound).is_met is is_met


def test_a_missed_goal_says_what_was_measured_and_asked() -> None:
    text = Goal("gap ratio", 3.25, "<=", 3.0, " ×").text()

    assert text == "gap ratio: 3.250 × (goal <= 3 ×) MISSED"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234567.0, "1,234,567"), (0.04567, "0.04567"), (123.456, "123.5")],
)
def test_numbers_are_rounded_to_four_digits_for_people(value: float, text: str) -> None:
    assert number(value) == text


def _outcome(due_s: float, arrivals: list[float], tokens: int = 0) -> Outcome:
    outcome = Outcome(due_s=due_s, sent_s=due_s, status=200, arrivals=arrivals)
    outcome.completion_tokens = tokens
    outcome.end_s = arrivals[-1] if arrivals else math.nan
    return outcome


def test_an_unanswered_request_counts_as_one_that_never_answered() -> None:
    answered = [_outcome(0.1 * i, [0.1 * i + 0.5], 1) for i in range(8)]
    cut = [Outcome(due_s=0.9, is_cut=True), Outcome(due_s=0.95, is_cut=True)]

    figures = summarise([*answered, *cut], 0.0, 1.0)

    assert figures.ttft_p50_s == pytest.approx(0.5)
    assert figures.ttft_p90_s == math.inf
    assert (figures.num_ok, figures.num_cut) == (8, 2)


def test_tokens_count_in_the_window_in_which_they_arrive() -> None:
    outcome = _outcome(0.0, [0.5, 1.5, 2.5, 3.5], tokens=8)

    assert outcome.tokens_between(1.0, 3.0) == 4.0
    assert outcome.gaps_between(1.0, 3.0) == [1.0, 1.0]
    assert outcome.tpot_s == pytest.approx(3.0 / 7)


def test_ttft_counts_from_the_schedule_so_that_a_late_generator_shows() -> None:
    outcome = Outcome(due_s=1.0, sent_s=1.4, arrivals=[1.5])

    assert outcome.ttft_s == pytest.approx(0.5)


@pytest.mark.parametrize(("start", "expected"), [(1.0, 5.0), (8.0, 5.0), (5.0, 5.0)])
async def test_the_ladder_closes_in_on_the_knee_from_either_side(
    start: float, expected: float
) -> None:
    async def figure(rate: float) -> float:
        return 0.5 if rate <= 5.0 else 4.0

    ladder = await climb(figure, 2.0, start, 1.5, num_refinements=6, max_rungs=30)

    assert ladder.knee <= expected
    assert ladder.knee == pytest.approx(expected, rel=0.05)


async def test_a_rung_above_a_failed_one_is_not_the_knee() -> None:
    """Noise may let a higher rate pass; the knee lies below the lowest rate that failed."""
    figures = iter([1.0, 9.0, 1.0])

    async def figure(rate: float) -> float:
        return next(figures)

    ladder = await climb(figure, 2.0, 4.0, 2.0, num_refinements=1)

    assert [rung.rate for rung in ladder.rungs] == [4.0, 8.0, 6.0]
    assert ladder.knee == 6.0


def test_json_says_null_where_nothing_was_measured() -> None:
    report = Report(
        name="b",
        setting="s",
        tables=(Table("t", ("a", "b"), (("x", math.inf),)),),
        goals=(Goal("g", math.nan, "<=", 1.0),),
    )

    value = msgspec.json.decode(to_json(read_machine(), [report]))

    (bench,) = value["benches"]
    assert bench["goals"] == [
        {"name": "g", "figure": None, "relation": "<=", "bound": 1.0, "unit": "", "met": False}
    ]
    assert bench["tables"][0]["rows"] == [["x", None]]
    assert value["machine"]["cores"] >= 1


def test_a_table_refuses_rows_of_another_width() -> None:
    with pytest.raises(ValueError, match="1 cells in 2"):
        Table("t", ("a", "b"), (("x",),))
