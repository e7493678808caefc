"""What the default policy does, seen through the pool."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from kvoy_contract.blocks import BlockHash
from kvoy_router.endpoint import Knowledge, LoadView
from kvoy_router.fleet_testing import IDLE, STRIDE, TOTAL_BLOCKS, Fleet, prompt_hashes

BUSY = dataclasses.replace(
    IDLE,
    running=20,
    running_tokens=80_000,
    free_blocks=TOTAL_BLOCKS // 4,
    evictable_blocks=TOTAL_BLOCKS // 4,
    step_time_s=0.03,
)


def choices(
    fleet: Fleet, hashes: Sequence[BlockHash], count: int = 30, max_tokens: int = 100
) -> Counter[str]:
    """Where `count` equal requests would go, each alone."""
    chosen: Counter[str] = Counter()
    for _ in range(count):
        request = fleet.request(hashes, max_tokens=max_tokens)
        decision = fleet.pool.pick(request, fleet.now_s)
        decision.lease.release(fleet.now_s)
        chosen[decision.endpoint.id] += 1
    return chosen


@pytest.mark.parametrize("load", [IDLE, BUSY])
def test_with_equal_memory_and_queue_the_held_prefix_decides(load: LoadView) -> None:
    fleet = Fleet(2)
    hashes = prompt_hashes(4000, "a")
    for name in ("e0", "e1"):
        fleet.report(name, load)
    for holder in ("e0", "e1"):
        other = "e1" if holder == "e0" else "e0"
        fleet.sync(holder, hashes)
        fleet.sync(other)

        assert choices(fleet, hashes) == {holder: 30}


def test_with_equal_prefix_and_queue_the_free_memory_decides() -> None:
    hashes = prompt_hashes(4000, "a")
    for roomy, full in (("e0", "e1"), ("e1", "e0")):
        fleet = Fleet(2)
        fleet.report(roomy, BUSY, free_blocks=TOTAL_BLOCKS // 2, evictable_blocks=0)
        fleet.report(full, BUSY, free_blocks=TOTAL_BLOCKS // 10, evictable_blocks=0)

        assert choices(fleet, hashes) == {roomy: 30}


def test_with_equal_prefix_and_memory_the_queue_decides() -> None:
    fleet = Fleet(2)
    hashes = prompt_hashes(4000, "a")
    for free, queued in (("e0", "e1"), ("e1", "e0")):
        fleet.report(free, BUSY)
        fleet.report(queued, BUSY, waiting=4, queued_prefill_tokens=8000)

        assert choices(fleet, hashes) == {free: 30}


def test_engines_of_equal_cost_take_turns_from_a_random_first_one() -> None:
    firsts = set()
    for seed in range(20):
        fleet = Fleet(4, seed=seed)
        picks = [
            fleet.pool.pick(fleet.request(prompt_hashes(1000, number)), fleet.now_s)
            for number in range(4)
        ]
        firsts.add(picks[0].endpoint.id)
        assert len({decision.endpoint.id for decision in picks}) == 4

    assert len(firsts) == 4


def test_equal_costs_spread_evenly() -> None:
    fleet = Fleet(4)

    chosen = choices(fleet, prompt_hashes(1000, "a"), 400)

    assert set(chosen.values()) == {100}


def test_a_measured_difference_within_noise_is_no_difference() -> None:
    fleet = Fleet(2)
    fleet.report("e0", prefill_tokens_per_s=10_050.0, step_time_s=0.0201)

    assert min(choices(fleet, prompt_hashes(1000, "a"), 200).values()) > 60


def test_a_faster_engine_gets_more() -> None:
    fleet = Fleet(2)
    fleet.report("e0", prefill_tokens_per_s=40_000.0, step_time_s=0.005)
    chosen: Counter[str] = Counter()
    for number in range(50):
        decision = fleet.pool.pick(fleet.request(prompt_hashes(2000, number)), fleet.now_s)
        chosen[decision.endpoint.id] += 1

    assert chosen["e0"] > 1.5 * chosen["e1"] > 0


def test_a_burst_of_one_cold_prompt_neither_piles_up_nor_spreads_everywhere() -> None:
    fleet = Fleet(8)
    hashes = prompt_hashes(8000, "a")
    chosen: Counter[str] = Counter()
    for _ in range(32):
        decision = fleet.pool.pick(fleet.request(hashes, max_tokens=250), fleet.now_s)
        chosen[decision.endpoint.id] += 1

    assert 2 <= len(chosen) <= 6
    assert max(chosen.values()) < 24


def test_the_second_of_two_equal_prompts_follows_the_first_before_telemetry_speaks() -> None:
    fleet = Fleet(4)
    hashes = prompt_hashes(4000, "a")
    first = fleet.pool.pick(fleet.request(hashes), fleet.now_s)
    first.lease.on_first_token(fleet.now_s + 0.5)

    second = fleet.pool.pick(fleet.request(hashes), fleet.now_s + 0.6)

    assert second.endpoint is first.endpoint
    assert second.cached_tokens == len(hashes) * STRIDE


def test_a_hot_prefix_spreads_when_its_holder_is_loaded() -> None:
    fleet = Fleet(4)
    small = dataclasses.replace(fleet.info, max_num_seqs=8)
    for name in ("e0", "e1", "e2", "e3"):
        fleet.pool.on_describe(name, small, fleet.now_s)
    shared = prompt_hashes(3000, "system")
    fleet.sync("e0", shared)
    chosen: Counter[str] = Counter()
    for number in range(200):
        hashes = prompt_hashes(3200, "system", number, shared_tokens=3008)
        decision = fleet.pool.pick(fleet.request(hashes), fleet.now_s)
        chosen[decision.endpoint.id] += 1
        in_flight = [endpoint.ledger.in_flight for endpoint in fleet.pool.endpoints]
        if number > 40:
            assert max(in_flight) <= 2 * sum(in_flight) / 4

    assert len(chosen) == 4


def test_many_users_of_one_prefix_end_up_balanced_once_all_hold_it() -> None:
    fleet = Fleet(8)
    shared = prompt_hashes(6000, "system")
    for name in fleet.loads:
        fleet.sync(name, shared)
    for _ in range(160):
        fleet.pool.pick(fleet.request(shared, max_tokens=500), fleet.now_s)

    in_flight = [endpoint.ledger.in_flight for endpoint in fleet.pool.endpoints]
    assert max(in_flight) <= 1.2 * sum(in_flight) / 8


def test_a_queue_on_all_engines_moves_nobody_from_its_prefix_but_a_queue_on_one_does() -> None:
    fleet = Fleet(4)
    hashes = prompt_hashes(6000, "a")
    fleet.sync("e0", hashes)
    full = dataclasses.replace(
        BUSY,
        running=200,
        waiting=200,
        running_tokens=1_000_000,
        free_blocks=0,
        evictable_blocks=500,
    )
    for name in fleet.loads:
        fleet.report(name, full)
    fleet.report("e0", full, waiting=220)
    assert choices(fleet, hashes, max_tokens=1000) == {"e0": 30}

    for name in ("e1", "e2", "e3"):
        fleet.report(name, BUSY)
    assert choices(fleet, hashes, max_tokens=1000)["e0"] == 0


def test_a_new_engine_without_telemetry_is_neither_starved_nor_flooded() -> None:
    fleet = Fleet(3)
    for name in ("e0", "e1", "e2"):
        fleet.report(name, running=10, running_tokens=10_000)
    fleet.add("new", load=None)
    chosen: Counter[str] = Counter()
    for number in range(200):
        hashes = prompt_hashes(500, number)
        decision = fleet.pool.pick(fleet.request(hashes), fleet.now_s)
        chosen[decision.endpoint.id] += 1

    assert 0 < chosen["new"] <= 200 / 4 * 1.3


def test_a_fleet_of_new_engines_shares_by_what_the_router_has_sent() -> None:
    fleet = Fleet(0)
    for number in range(4):
        fleet.add(f"e{number}", load=None)
    for number in range(40):
        fleet.pool.pick(fleet.request(prompt_hashes(500, number)), fleet.now_s)

    assert [e.ledger.in_flight for e in fleet.pool.endpoints] == [10] * 4


def test_an_engine_with_lost_or_stale_telemetry_is_routed_around_but_better_than_none() -> None:
    fleet = Fleet(3)
    hashes = prompt_hashes(1000, "a")
    fleet.pool.on_lost("e0", fleet.now_s)
    fleet.now_s += 10.0
    fleet.report("e2")

    decision = fleet.pool.pick(fleet.request(hashes), fleet.now_s)
    decision.lease.release(fleet.now_s)
    assert decision.endpoint.id == "e2"
    assert dict(decision.rejected) == {"e0": "telemetry lost", "e1": "telemetry stale"}

    fleet.now_s += 10.0
    assert set(choices(fleet, hashes)) == {"e0", "e1", "e2"}
    assert fleet.pool.endpoints[0].knowledge is Knowledge.LOST


def test_random_traffic_keeps_the_pool_consistent() -> None:
    random = Random(5)
    fleet = Fleet(4, seed=5)
    leases = []
    for number in range(500):
        fleet.now_s += 0.01
        hashes = prompt_hashes(640, random.randrange(20))
        leases.append(fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease)
        if random.random() < 0.5:
            fleet.store(f"e{random.randrange(4)}", hashes)
        if random.random() < 0.8:
            leases.pop(random.randrange(len(leases))).release(fleet.now_s)
        if number % 10 == 0:
            for name in fleet.loads:
                fleet.report(name)
    for lease in leases:
        lease.release(fleet.now_s)
    fleet.now_s += 10.0
    fleet.report("e0")

    assert len(fleet.pool.assumed) == 0
    fleet.pool.check_integrity()
