import pytest

from kvoy_router.step_law import StepLaw


def test_two_distant_reports_give_base_and_slope() -> None:
    law = StepLaw()
    law.learn(0.0145, 8_000)
    law.learn(0.036, 400_000)

    step_s, slope = law.at(200_000, 0.02, 300_000)
    assert slope == pytest.approx(55e-9, rel=0.01)
    assert step_s == pytest.approx(0.0145 + 192_000 * 55e-9, rel=0.01)


def test_before_that_a_full_cache_is_taken_to_double_a_step() -> None:
    law = StepLaw()
    assert law.at(0, 0.02, 0) == (0.02, 0.0)
    law.learn(0.01, 0)
    law.learn(0.01, 500)

    assert law.at(100_000, 0.02, 100_000) == pytest.approx((0.02, 1e-7))


def test_an_engine_that_has_measured_nothing_teaches_nothing() -> None:
    law = StepLaw()
    law.learn(0.0, 100_000)

    assert law.at(100_000, 0.02, 0) == (0.02, 0.0)


def test_an_engine_that_is_being_flooded_does_not_look_faster_for_it() -> None:
    law = StepLaw()
    for context in range(10_000, 400_000, 1_000):
        law.learn(0.014 + 55e-9 * context, context)
    for context in range(400_000, 600_000, 10_000):
        law.learn(0.014 + 55e-9 * 400_000, context)

    step_s, slope = law.at(600_000, 0.02, 300_000)
    assert slope == pytest.approx(55e-9, rel=0.02)
    assert step_s == pytest.approx(0.014 + 55e-9 * 600_000, rel=0.25)


def test_an_engine_that_slows_down_is_seen_at_once() -> None:
    law = StepLaw()
    for context in range(10_000, 200_000, 1_000):
        law.learn(0.014 + 55e-9 * context, context)
    for number in range(12):
        law.learn(0.1 + number * 1e-6, 200_000)

    assert law.at(200_000, 0.02, 300_000)[0] == pytest.approx(0.1, rel=0.1)


def test_noise_at_one_context_makes_no_slope() -> None:
    law = StepLaw()
    for number in range(500):
        law.learn(0.02 + (0.003 if number % 2 else 0.0), 50_000 + 100 * (number % 3))

    assert law.at(50_000, 0.02, 300_000)[1] == pytest.approx(0.02 / 300_000, rel=0.05)
