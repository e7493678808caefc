"""What is chosen from a fleet that is too large to weigh every engine of."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from kvoy_contract.blocks import BlockHash
from kvoy_contract.errors import ContextLengthExceeded, Unavailable
from kvoy_router.cost import estimate
from kvoy_router.decision import Decision
from kvoy_router.endpoint import LoadView, Origin
from kvoy_router.fleet_testing import IDLE, MODEL, STRIDE, TOTAL_BLOCKS, Fleet, prompt_hashes
from kvoy_router.lineup import EXACT_FLEET
from kvoy_router.occupancy import measured
from kvoy_router.policies import POLICIES, TIE_S
from kvoy_router.pool import Pool
from kvoy_router.prefix_index import keys_of
from kvoy_router.request import InferenceRequest
from kvoy_router.split import Service

LARGE = EXACT_FLEET + 56


def new_hashes(random: Random, count: int) -> list[BlockHash]:
    return [BlockHash(random.randbytes(16)) for _ in range(count)]


def some_load(random: Random, busy: float, speed: int) -> LoadView:
    waiting = int(random.random() ** 4 * 30 * busy)
    used = random.random() * busy
    free = (1.0 - used) * random.random()
    return dataclasses.replace(
        IDLE,
        running=int(random.randrange(1, 200) * busy),
        waiting=waiting,
        queued_prefill_tokens=waiting * random.randrange(100, 6000),
        running_tokens=int(used * TOTAL_BLOCKS * 16),
        free_blocks=int(free * TOTAL_BLOCKS),
        evictable_blocks=int((1.0 - used - free) * TOTAL_BLOCKS),
        step_time_s=(0.014 + 0.016 * used) / speed * random.uniform(1.0, 1.02),
        prefill_tokens_per_s=10_000.0 * speed * random.uniform(1.0, 1.02),
    )


def random_fleet(random: Random, prefixes: Sequence[Sequence[BlockHash]]) -> Fleet:
    """Engines of one or several speeds, from idle to full, that hold parts of some prefixes."""
    fleet = Fleet(LARGE, seed=random.randrange(1000))
    busy, speeds = random.random(), random.choice([(1,), (1, 2, 4)])
    for name in list(fleet.loads):
        fleet.report(name, some_load(random, busy, random.choice(speeds)))
        for prefix in random.sample(prefixes, random.choice([0, 2, 6])):
            fleet.store(name, prefix[: random.randrange(1, len(prefix) + 1)])
    return fleet


def costs(pool: Pool, request: InferenceRequest) -> dict[str, float]:
    """What every engine would cost, each one weighed."""
    depths = pool.index.match(keys_of(request.hashes), pool.assumed.sets)
    known = {endpoint: measured(endpoint) for endpoint in pool.endpoints}
    counts = sorted(o.num_requests for o in known.values() if o)
    mean_requests = sum(counts[:-1]) / (len(counts) - 1)
    traffic = pool.traffic(request)
    is_new = 2 * STRIDE * max(depths.values(), default=0) < request.num_prompt_tokens
    share = pool.catalogue.named(request.model).homes.share
    return {
        endpoint.id: estimate(
            request.num_prompt_tokens,
            depths.get(endpoint.slot, 0) * STRIDE,
            occupancy,
            traffic,
            mean_requests,
            share(endpoint.id) if is_new else 1.0,
        ).total_s
        for endpoint, occupancy in known.items()
        if occupancy is not None
    }


@pytest.mark.slow
def test_the_shortlist_costs_hardly_more_than_a_look_at_every_engine() -> None:
    random = Random(4)
    ratios = []
    for _ in range(8):
        prefixes = [new_hashes(random, random.choice([5, 30, 94])) for _ in range(40)]
        fleet = random_fleet(random, prefixes)
        for _ in range(25):
            prefix = random.choice(prefixes)[: random.randrange(1, 95)]
            tail = new_hashes(random, random.choice([1, 5, 20, 100]))
            max_tokens = random.choice([10, 100, 1000])
            request = fleet.request([*prefix, *tail], max_tokens=max_tokens)
            by_engine = costs(fleet.pool, request)
            decision = fleet.pool.pick(request, fleet.now_s)
            paid = by_engine[decision.endpoint.id] - TIE_S
            ratios.append(paid / min(by_engine.values()))
            assert len(decision.candidates) < LARGE / 2
            fleet.pool.check_integrity()

    ratios.sort()
    assert sum(ratios) / len(ratios) < 1.03
    assert ratios[len(ratios) * 95 // 100] < 1.2
    assert ratios[-1] < 2.0


def test_a_deep_holder_is_found_among_many_and_left_when_it_is_loaded() -> None:
    fleet = Fleet(LARGE)
    hashes = prompt_hashes(6400, "a")
    fleet.store("e77", hashes)
    assert fleet.pool.pick(fleet.request(hashes), fleet.now_s).endpoint.id == "e77"

    fleet.report("e77", running=200, waiting=100, queued_prefill_tokens=400_000)
    assert fleet.pool.pick(fleet.request(hashes), fleet.now_s).endpoint.id != "e77"


def test_many_holders_of_one_prefix_share_its_traffic() -> None:
    fleet = Fleet(LARGE)
    shared = prompt_hashes(3200, "system")
    for name in fleet.loads:
        fleet.sync(name, shared)
    for _ in range(4 * LARGE):
        fleet.pool.pick(fleet.request(shared, max_tokens=500), fleet.now_s)

    in_flight = [endpoint.ledger.in_flight for endpoint in fleet.pool.endpoints]
    assert max(in_flight) <= 6
    assert min(in_flight) >= 2
    fleet.pool.check_integrity()


def test_an_idle_fleet_is_used_as_a_whole() -> None:
    fleet = Fleet(LARGE)
    chosen: Counter[str] = Counter()
    for number in range(4 * LARGE):
        hashes = prompt_hashes(640, number)
        decision = fleet.pool.pick(fleet.request(hashes), fleet.now_s)
        decision.lease.release(fleet.now_s)
        chosen[decision.endpoint.id] += 1

    assert len(chosen) > LARGE / 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_of_a_large_fleet_nobody_gets_a_request_who_may_not_serve(policy: str) -> None:
    random = Random(6)
    fleet = Fleet(LARGE, policy)
    names = list(fleet.loads)
    for step in range(150):
        fleet.now_s += 0.2
        name = random.choice(names)
        action = random.random()
        if action < 0.2:
            fleet.pool.set_draining(name, random.random() < 0.5)
        elif action < 0.4:
            fleet.report(name, ready=random.random() < 0.5)
        elif action < 0.5:
            fleet.pool.on_lost(name, fleet.now_s)
        elif action < 0.6:
            fleet.sync(name)
        elif action < 0.7:
            fleet.pool.remove_endpoint(name)
            fleet.add(name, load=random.choice([None, IDLE]))
        for other in random.sample(names, 20):
            fleet.report(other)
        exclude = frozenset(random.sample(names, 3))
        request = fleet.request(prompt_hashes(640, step % 7))
        endpoint = fleet.pool.pick(request, fleet.now_s, exclude).endpoint

        assert endpoint.id not in exclude
        assert not endpoint.is_draining
        assert endpoint.load is None or endpoint.load.ready
        assert endpoint.is_fresh(fleet.now_s, 5.0)
        fleet.pool.check_integrity()


def test_a_large_silent_fleet_still_serves_and_an_unready_one_does_not() -> None:
    fleet = Fleet(LARGE)
    request = fleet.request(prompt_hashes(640, "a"))
    fleet.pool.pick(request, fleet.now_s)
    fleet.now_s += 60.0
    chosen = {fleet.pool.pick(request, fleet.now_s).endpoint.id for _ in range(60)}
    assert len(chosen) > 5

    for name in fleet.loads:
        fleet.report(name, ready=False)
    with pytest.raises(Unavailable):
        fleet.pool.pick(request, fleet.now_s)


def test_in_a_large_fleet_a_prompt_goes_where_it_fits() -> None:
    fleet = Fleet(LARGE)
    for name in fleet.loads:
        limit = 50_000 if name in ("e3", "e99") else 4_000
        info = dataclasses.replace(fleet.info, max_model_len=limit)
        fleet.pool.on_describe(name, info, fleet.now_s)

    def engine(prompt_tokens: int, max_tokens: int) -> str:
        request = fleet.request((), prompt_tokens, max_tokens)
        return fleet.pool.pick(request, fleet.now_s).endpoint.id

    assert {engine(9_000, 10) for _ in range(10)} == {"e3", "e99"}
    assert {engine(1_000, 9_000) for _ in range(10)} == {"e3", "e99"}
    assert len({engine(1_000, 60_000) for _ in range(20)}) > 2  # fits nowhere: all may cut it short
    with pytest.raises(ContextLengthExceeded):
        engine(50_000, 10)


def test_new_engines_of_a_large_fleet_are_neither_starved_nor_flooded() -> None:
    fleet = Fleet(LARGE)
    for name in list(fleet.loads):
        fleet.report(name, running=10, running_tokens=10_000)
    for number in range(4):
        fleet.add(f"new{number}", load=None)
    chosen: Counter[str] = Counter()
    for number in range(4 * LARGE):
        decision = fleet.pool.pick(fleet.request(prompt_hashes(500, number)), fleet.now_s)
        chosen[decision.endpoint.id] += 1

    new = [chosen[f"new{number}"] for number in range(4)]
    assert min(new) > 0
    assert max(new) <= 4 * 3


def test_round_robin_and_least_load_are_exact_in_a_large_fleet() -> None:
    fleet = Fleet(LARGE, "round-robin")
    turns = [fleet.pool.pick(fleet.request(()), fleet.now_s) for _ in range(2 * LARGE)]
    ids = [decision.endpoint.id for decision in turns]
    assert ids[:LARGE] == ids[LARGE:]
    assert len(set(ids)) == LARGE

    fleet = Fleet(LARGE, "least-load")
    for _ in range(3 * LARGE):
        fleet.pool.pick(fleet.request(()), fleet.now_s)
    assert {endpoint.ledger.in_flight for endpoint in fleet.pool.endpoints} == {3}


def test_services_of_one_name_share_a_large_fleet_by_weight() -> None:
    fleet = Fleet(0)
    fleet.pool.set_services(
        [Service(name="a", model=MODEL, weight=3), Service(name="b", model=MODEL, weight=1)]
    )
    for number in range(LARGE):
        service = "ab"[number % 2]
        fleet.pool.add_endpoint(f"e{number}", origin=Origin(service=service))
        fleet.add(f"e{number}")

    def pick(number: int) -> Decision:
        request = fleet.request(prompt_hashes(64, number))
        request = msgspec.structs.replace(request, affinity=str(number).encode())
        return fleet.pool.pick(request, fleet.now_s)

    services = Counter(pick(number).endpoint.origin.service for number in range(400))
    assert 0.65 < services["a"] / 400 < 0.85


def test_the_same_seed_makes_the_same_decisions_in_a_large_fleet() -> None:
    def run() -> list[str]:
        fleet = Fleet(LARGE, seed=3)
        chosen = []
        for number in range(60):
            fleet.report(f"e{number}", running=number)
            request = fleet.request(prompt_hashes(640, number % 9))
            chosen.append(fleet.pool.pick(request, fleet.now_s).endpoint.id)
        return chosen

    assert run() == run()
