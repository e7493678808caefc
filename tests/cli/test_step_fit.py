"""A step law is found again from times that it made."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvoy_cli.bench.step_fit import (
    MAX_PREFILL_TOKENS_PER_S,
    Observation,
    StepLaw,
    fit,
    fit_sum,
    windows,
)
from kvoy_engine.step_log import LoggedStep
from kvoy_engine.timing_model import TimingModel

TRUTH = StepLaw(TimingModel(0.014, 1600.0, 55e-9, 0.0005), overhead_s=0.003)


def observations(truth: StepLaw, noise: float = 0.0) -> list[Observation]:
    random = Random(3)
    shapes = [Observation(1.0, 1, n, n, 1, requests=1) for n in (32, 64, 256, 512)]
    shapes += [
        Observation(1.0, 1, 0, users * length, users)
        for users, length in ((1, 50), (1, 40_000), (4, 500), (8, 50), (8, 30_000))
    ]
    return [
        Observation(
            truth.seconds(o) * (1 + random.uniform(-noise, noise)),
            *(o.steps, o.prefill_tokens, o.context_tokens, o.rows, o.requests),
        )
        for o in shapes
    ]


def test_exact_times_give_the_law_that_made_them() -> None:
    law = fit(observations(TRUTH))

    assert law.timing.base_s == pytest.approx(TRUTH.timing.base_s)
    assert law.timing.prefill_tokens_per_s == pytest.approx(TRUTH.timing.prefill_tokens_per_s)
    assert law.timing.context_token_s == pytest.approx(TRUTH.timing.context_token_s)
    assert law.timing.row_s == pytest.approx(TRUTH.timing.row_s)
    assert law.overhead_s == pytest.approx(TRUTH.overhead_s)


def test_noisy_times_are_predicted_about_as_well_as_they_were_measured() -> None:
    noisy = observations(TRUTH, noise=0.05)

    law = fit(noisy)

    for observation in observations(TRUTH):
        assert law.seconds(observation) == pytest.approx(observation.seconds, rel=0.06)


def test_no_part_of_a_step_gives_time_back() -> None:
    base = TimingModel(0.01, 1000.0, 0.0, 0.0)
    times = [
        Observation(0.011, 1, 0, 100, 1),
        Observation(0.010, 1, 0, 100_000, 1),
        Observation(0.010, 1, 0, 200, 8),
        Observation(0.11, 1, 100, 100, 1),
    ]

    law = fit(times)

    assert law.timing.context_token_s == 0.0
    assert law.timing.row_s == 0.0
    assert law.timing.base_s == pytest.approx(base.base_s, rel=0.1)
    assert law.timing.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.1)


def test_without_prefills_prefill_takes_no_time_of_its_own() -> None:
    law = fit([Observation(0.02, 1, 0, 0, 1), Observation(0.03, 1, 0, 0, 2)])

    assert law.timing.prefill_tokens_per_s == MAX_PREFILL_TOKENS_PER_S


def test_measurements_that_tell_nothing_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="do not tell the parts of a step apart"):
        fit([Observation(0.02, 1, 0, 0, 1), Observation(0.02, 1, 0, 0, 1)])
    with pytest.raises(ValueError, match="above 0 seconds"):
        fit([Observation(0.0, 1)])


def steps_of(timing: TimingModel, pauses_s: tuple[float, ...]) -> list[LoggedStep]:
    """Steps of all kinds, one after the other, with these pauses behind them in turn."""
    random, now_s, steps = Random(5), 10.0, []
    for number in range(400):
        rows = random.randint(1, 8)
        prefill = random.choice((0, 0, 0, random.randint(2, 300)))
        context = prefill + rows * random.randint(10, 5000)
        duration_s = (
            timing.base_s
            + prefill / timing.prefill_tokens_per_s
            + context * timing.context_token_s
            + rows * timing.row_s
        )
        steps.append(LoggedStep(now_s, now_s + duration_s, rows, prefill, context))
        now_s += duration_s + pauses_s[number % len(pauses_s)]
    return steps


def test_the_law_of_logged_steps_is_found_again() -> None:
    timing = TimingModel(0.014, 1600.0, 1e-6, 0.0005)

    law = fit(windows(steps_of(timing, (0.0,)))).timing

    assert law.base_s == pytest.approx(timing.base_s)
    assert law.prefill_tokens_per_s == pytest.approx(timing.prefill_tokens_per_s)
    assert law.context_token_s == pytest.approx(timing.context_token_s)
    assert law.row_s == pytest.approx(timing.row_s)


def test_pauses_of_an_idle_engine_are_no_part_of_a_step() -> None:
    timing = TimingModel(0.014, 1600.0, 1e-6, 0.0005)
    steps = steps_of(timing, (0.001, 0.001, 5.0))

    observations = windows(steps)

    assert sum(o.steps for o in observations) == len(steps)
    assert all(o.seconds < 1.5 for o in observations)
    assert fit(observations).timing.base_s == pytest.approx(timing.base_s + 2 / 3 * 0.001, rel=0.05)


def test_errors_are_relative_to_what_was_measured() -> None:
    law = StepLaw(TimingModel(0.01, 1000.0, 0.0, 0.0), 0.0)

    assert law.errors([Observation(0.02, 1), Observation(0.01, 1)]) == pytest.approx([-0.5, 0.0])


def test_steps_that_were_held_up_count_in_the_sum() -> None:
    calm = windows(steps_of(TimingModel(0.014, 1600.0, 1e-6, 0.0005), (0.0,)))
    held_up = [
        replace(o, seconds=o.seconds * (6 if number % 10 == 0 else 1))
        for number, o in enumerate(calm)
    ]

    law = fit_sum(held_up)

    assert sum(map(law.seconds, held_up)) == pytest.approx(sum(o.seconds for o in held_up))
    assert sum(map(fit(held_up).seconds, held_up)) < 0.9 * sum(o.seconds for o in held_up)
