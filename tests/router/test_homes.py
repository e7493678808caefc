"""Which engines are home to what is asked again: shares of the uses to come."""

import dataclasses

import pytest

from kvoy_router.fleet_testing import MODEL, Fleet, prompt_hashes
from kvoy_router.homes import EXPECTED_USES, MEMORY_USES, MOST_WEIGHT, Homes


def homes_of(*names: str) -> Homes:
    homes = Homes()
    for name in names:
        homes.know(name)
    return homes


def test_all_are_average_before_anything_was_counted() -> None:
    homes = homes_of("a", "b")

    assert (homes.share("a"), homes.share("b"), homes.share("unknown")) == (1.0, 1.0, 1.0)


def test_a_new_home_counts_as_much_as_the_uses_that_are_expected_of_it() -> None:
    by_home, by_uses = homes_of("a", "b"), homes_of("a", "b")
    by_home.count("a", is_new=True)
    for _ in range(int(EXPECTED_USES)):
        by_uses.count("a", is_new=False)

    assert by_home.share("a") == pytest.approx(by_uses.share("a"), rel=0.02)
    assert by_home.share("a") > 1.0 > by_home.share("b")
    assert by_home.share("a") + by_home.share("b") == pytest.approx(2.0)


def test_little_evidence_says_little() -> None:
    homes = homes_of("a", "b")
    homes.count("a", is_new=False)
    assert homes.share("a") < 1.1

    for _ in range(int(MEMORY_USES)):
        homes.count("a", is_new=False)
    assert homes.share("a") > 1.5


def test_what_is_not_used_any_more_fades() -> None:
    homes = homes_of("a", "b")
    for _ in range(20):
        homes.count("a", is_new=True)
    for _ in range(int(6 * MEMORY_USES)):
        homes.count("b", is_new=False)

    assert homes.share("a") < 0.3


def test_a_new_engine_counts_as_an_average_one_and_one_that_left_for_nothing() -> None:
    homes = homes_of("a", "b")
    homes.count("a", is_new=True)
    homes.know("c")
    assert homes.share("c") == pytest.approx(1.0)

    homes.forget("a")
    homes.count("a", is_new=True)
    homes.take_back("a")

    assert homes.share("a") == 1.0
    assert homes.share("b") + homes.share("c") == pytest.approx(2.0)


def test_shares_do_not_change_when_the_sums_are_scaled_down() -> None:
    homes = homes_of("a", "b")
    shares = []
    for number in range(60 * int(MEMORY_USES)):
        homes.count("a" if number % 3 else "b", is_new=False)
        shares.append(homes.share("a"))

    assert homes._weight < MOST_WEIGHT
    assert all(1.2 < share < 1.45 for share in shares[-1000:])


def test_new_prompts_go_where_least_is_at_home_and_old_ones_stay() -> None:
    fleet = Fleet(4)
    homes = fleet.pool.catalogue.named(MODEL).homes
    for name, uses in (("e0", 60), ("e1", 60), ("e2", 60), ("e3", 20)):
        fleet.report(name, running=10, running_tokens=40_000)
        for _ in range(uses):
            homes.count(name, is_new=False)
    old = prompt_hashes(4000, "old")
    fleet.sync("e0", old)

    for number in range(10):
        new = fleet.pool.pick(fleet.request(prompt_hashes(4000, number)), fleet.now_s)
        new.lease.release(fleet.now_s)
        assert new.endpoint.id == "e3"
        again = fleet.pool.pick(fleet.request(old), fleet.now_s)
        again.lease.release(fleet.now_s)
        assert again.endpoint.id == "e0"


def test_a_new_prompt_that_is_not_computed_finds_no_home() -> None:
    fleet = Fleet(2)
    homes = fleet.pool.catalogue.named(MODEL).homes

    decision = fleet.pool.pick(fleet.request(prompt_hashes(4000, "a")), fleet.now_s)
    assert homes.share(decision.endpoint.id) > 1.0
    decision.lease.release(fleet.now_s)

    assert homes.share(decision.endpoint.id) == pytest.approx(1.0, abs=0.01)


def test_a_new_process_at_an_old_address_is_an_average_engine() -> None:
    fleet = Fleet(2)
    homes = fleet.pool.catalogue.named(MODEL).homes
    for _ in range(50):
        homes.count("e0", is_new=False)
    assert homes.share("e0") > 1.1

    again = dataclasses.replace(fleet.info, epoch=b"second")
    fleet.pool.on_describe("e0", again, fleet.now_s)

    assert homes.share("e0") == pytest.approx(1.0)
