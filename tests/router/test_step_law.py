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
