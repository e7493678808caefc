"""Figures of outcomes that are made by hand, so that each can be worked out on paper."""

from __future__ import annotations

import math
from array import array

import pytest

from kvoy_simulate.measures import generated_until, measure, output_rate
from kvoy_simulate.outcome import NEVER, EngineSeries, Outcome, RequestColumns, Status


def series(tokens: list[int], loads: list[int], name: str = "engine-0") -> EngineSeries:
    """Samples at 0, 10, 20, ... seconds."""
    return EngineSeries(
        name=name,
        group="engine",
        started_s=0.0,
        total_blocks=100,
        block_size=16,
        times_s=array("d", [10.0 * i for i in range(len(tokens))]),
        running=array("q", loads),
        waiting=array("q", [0] * len(loads)),
        generated_tokens=array("q", tokens),
    )


def add(
    rows: RequestColumns,
    arrival_s: float,
    first_s: float,
    end_s: float,
    status: Status = Status.OK,
    *,
    cached: int = 0,
    output: int = 11,
) -> None:
    rows.arrival_s.append(arrival_s)
    rows.first_token_s.append(first_s)
    rows.end_s.append(end_s)
    rows.status.append(status)
    rows.prompt_tokens.append(100)
    rows.cached_tokens.append(cached)
    rows.output_tokens.append(output)
    rows.retries.append(1 if status == Status.REFUSED else 0)
    rows.resumes.append(0)


def outcome(rows: RequestColumns, *engines: EngineSeries) -> Outcome:
    return Outcome(
        policy="p",
        seed=0,
        duration_s=30.0,
        warmup_s=10.0,
        ended_s=40.0,
        requests=rows,
        engines=engines,
        names=(),
        counters={},
    )


def test_latencies_are_those_of_requests_that_arrived_in_the_measured_time() -> None:
    rows = RequestColumns()
    add(rows, 5.0, 9.0, 10.0)  # before
    add(rows, 10.0, 11.0, 12.0, cached=60)
    add(rows, 20.0, 23.0, 33.0, cached=20)
    add(rows, 31.0, 39.0, 40.0)  # after

    figures = measure(outcome(rows, series([0, 0, 0, 0], [0, 0, 0, 0])))

    assert figures.requests == 2
    assert figures.ttft_mean_s == 2.0
    assert figures.ttft_p90_s == pytest.approx(2.8)
    assert figures.hit_rate == 80 / 200
    assert figures.input_tokens_per_s == 200 / 20
    # Two ended within: the one from before, 0.1 s per token, and the second.
    assert figures.completed_per_s == 2 / 20
    assert figures.tpot_p50_s == pytest.approx(0.1)


def test_who_still_waits_at_the_end_counts_as_having_waited_until_then() -> None:
    rows = RequestColumns()
    add(rows, 12.0, NEVER, NEVER, Status.UNFINISHED)
    add(rows, 13.0, NEVER, 14.5, Status.REFUSED)

    figures = measure(outcome(rows, series([0], [0])))

    assert figures.ttft_mean_s == (28.0 + 1.5) / 2
    assert (figures.lost, figures.open_at_end, figures.retries) == (1, 1, 1)


@pytest.mark.parametrize(
    ("status", "lost"),
    [(Status.OK, 0), (Status.REFUSED, 1), (Status.BROKEN, 1), (Status.CUT, 1),
     (Status.UNFINISHED, 0)],
)  # fmt: skip
def test_lost_is_what_a_client_saw_fail(status: Status, lost: int) -> None:
    rows = RequestColumns()
    add(rows, 1.0, 2.0, 3.0, status)

    assert measure(outcome(rows, series([0], [0]))).lost == lost


def test_throughput_is_what_engines_generated_in_the_measured_time() -> None:
    rows = RequestColumns()
    add(rows, 12.0, 13.0, 14.0)
    restarted = series([0, 100], [1, 1], "engine-1")
    restarted.times_s = array("d", [15.0, 25.0])

    figures = measure(outcome(rows, series([0, 100, 300, 700], [1, 1, 1, 1]), restarted))

    assert figures.output_tokens_per_s == (600 + 100) / 20


def test_generated_tokens_are_linear_between_samples() -> None:
    engine = series([0, 100, 300], [0, 0, 0])

    assert [generated_until(engine, at) for at in (-1.0, 0.0, 5.0, 12.5, 99.0)] == [
        0.0, 0.0, 50.0, 150.0, 300.0,
    ]  # fmt: skip
    assert output_rate(outcome(RequestColumns(), engine), 5.0, 15.0) == 15.0


def test_imbalance_is_the_greatest_load_over_the_mean() -> None:
    rows = RequestColumns()
    add(rows, 12.0, 13.0, 14.0)
    one, other = series([0] * 4, [9, 3, 2, 9]), series([0] * 4, [0, 1, 2, 0], "engine-1")

    figures = measure(outcome(rows, one, other))

    assert figures.imbalance == pytest.approx((3 / 2 + 1.0) / 2)


def test_nothing_measured_is_not_a_number() -> None:
    figures = measure(outcome(RequestColumns(), series([0], [0])))

    assert figures.requests == 0
    assert math.isnan(figures.ttft_p90_s)
    assert math.isnan(figures.hit_rate)
    assert math.isnan(figures.imbalance)
