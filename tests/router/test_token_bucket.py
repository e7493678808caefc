from __future__ import annotations

from random import Random

import pytest

from kvoy_router.token_bucket import TokenBucket


@pytest.mark.parametrize("seed", range(20))
def test_over_any_time_no_more_is_let_through_than_the_bucket_and_what_drips_in(seed: int) -> None:
    random = Random(seed)
    per_minute = random.choice((6, 600, 60_000))
    bucket = TokenBucket(per_minute, 0.0)
    now_s = taken = 0.0
    for _ in range(2_000):
        now_s += random.expovariate(per_minute / 10)
        if bucket.wait_s(now_s) == 0.0:
            bucket.take(1.0, now_s)
            taken += 1.0
        assert taken <= per_minute + now_s * per_minute / 60 + 1e-6


def test_after_the_wait_that_it_tells_the_amount_is_there() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(75, 0.0)

    wait_s = bucket.wait_s(0.0, 10)

    assert wait_s == pytest.approx(25.0)
    assert bucket.wait_s(wait_s + 1e-6, 10) == 0.0


def test_more_than_it_ever_holds_is_given_when_it_is_full() -> None:
    bucket = TokenBucket(60, 0.0)

    assert bucket.wait_s(0.0, 1_000) == 0.0


def test_it_never_holds_more_than_a_minute_and_a_clock_that_stands_gives_nothing() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(-100, 0.0)
    bucket.take(60, 3600.0)

    assert bucket.wait_s(3600.0) > 0.0
