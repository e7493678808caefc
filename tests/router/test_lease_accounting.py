"""Every request is counted exactly once: in the engine's numbers or in the router's reservation."""

import dataclasses
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy_router.endpoint import Endpoint, LoadView
from kvoy_router.fleet_testing import IDLE, MODEL, STRIDE, Fleet, prompt_hashes
from kvoy_router.lease import Lease
from kvoy_router.occupancy import occupancies


def requests_seen(endpoint: Endpoint) -> float:
    return occupancies([endpoint], [True])[0].num_requests


def test_a_request_moves_from_the_reservation_into_the_engines_numbers() -> None:
    fleet = Fleet(1)
    endpoint = fleet.pool.endpoints[0]
    request = fleet.request(prompt_hashes(6400, "a"))
    lease = fleet.pool.pick(request, fleet.now_s).lease
    before = occupancies([endpoint], [True])[0]
    assert (before.num_requests, before.queued_tokens) == (1, 6400)

    fleet.report("e0", waiting=1, queued_prefill_tokens=6400, admitted_through=lease.number)
    after = occupancies([endpoint], [True])[0]
    assert (after.num_requests, after.queued_tokens) == (1, 6400)

    lease.release(fleet.now_s)
    ended = occupancies([endpoint], [True])[0]
    assert (ended.num_requests, ended.queued_tokens) == (0, 0)


def test_a_prompt_that_is_computed_is_queued_no_more_however_old_the_report_is() -> None:
    fleet = Fleet(1)
    endpoint = fleet.pool.endpoints[0]
    first, second = (
        fleet.pool.pick(fleet.request(prompt_hashes(6400, name)), fleet.now_s).lease
        for name in "ab"
    )
    fleet.report("e0", waiting=2, queued_prefill_tokens=12_800, admitted_through=second.number)

    first.on_first_token(fleet.now_s)
    computed = occupancies([endpoint], [True])[0]
    first.release(fleet.now_s)
    ended = occupancies([endpoint], [True])[0]
    fleet.report("e0", waiting=1, queued_prefill_tokens=6400, admitted_through=second.number)
    reported = occupancies([endpoint], [True])[0]

    assert [o.queued_tokens for o in (computed, ended, reported)] == [6400, 6400, 6400]
    assert [o.num_requests for o in (computed, ended, reported)] == [2, 1, 1]
    fleet.pool.check_integrity()


def test_a_first_token_after_a_restart_changes_nothing_of_the_new_engine() -> None:
    fleet = Fleet(1)
    endpoint = fleet.pool.endpoints[0]
    lease = fleet.pool.pick(fleet.request(prompt_hashes(6400, "a")), fleet.now_s).lease
    endpoint.restart()
    fleet.report("e0", waiting=1, queued_prefill_tokens=6400)

    lease.on_first_token(fleet.now_s)

    assert occupancies([endpoint], [True])[0].queued_tokens == 6400


def test_a_number_beyond_the_watermark_settles_its_own_lease_only() -> None:
    fleet = Fleet(1)
    endpoint = fleet.pool.endpoints[0]
    hashes = prompt_hashes(640, "a")
    leases = [fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease for _ in range(4)]

    fleet.report("e0", running=2, admitted_through=1, admitted_beyond=(3,))

    assert [lease.is_settled for lease in leases] == [True, False, True, False]
    assert requests_seen(endpoint) == 4


def test_two_router_replicas_see_each_other_through_the_engines_reports() -> None:
    ours, theirs = Fleet(2), Fleet(2)
    hashes = prompt_hashes(6400, "a")
    for _ in range(5):
        theirs.pool.pick(theirs.request(hashes), theirs.now_s, exclude=frozenset({"e1"}))

    # The engine admits the other router's five requests; ours has sent none, so it settles none.
    load = dataclasses.replace(IDLE, running=5, running_tokens=32_000)
    ours.report("e0", load, admitted_through=0)
    theirs.report("e0", load, admitted_through=5)

    for fleet in (ours, theirs):
        assert requests_seen(fleet.pool.endpoints[0]) == 5
        assert fleet.pool.pick(fleet.request(prompt_hashes(640, "b")), 0.0).endpoint.id == "e1"


def test_settled_through_is_the_last_number_before_the_oldest_open_lease() -> None:
    fleet = Fleet(1)
    hashes = prompt_hashes(640, "a")
    first, second, third = (
        fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease for _ in range(3)
    )
    assert [lease.settled_through for lease in (first, second, third)] == [0, 0, 0]

    second.release(fleet.now_s)
    assert fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease.settled_through == 0
    first.release(fleet.now_s)
    assert fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease.settled_through == 2


def test_numbers_go_on_when_an_engine_is_removed_and_added_again() -> None:
    fleet = Fleet(1)
    hashes = prompt_hashes(640, "a")
    old = fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease
    fleet.pool.remove_endpoint("e0")
    endpoint = fleet.add("e0")
    new = fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease
    assert (old.number, new.number, new.settled_through) == (1, 2, 1)

    old.release(fleet.now_s)
    assert endpoint.ledger.in_flight == 1
    new.release(fleet.now_s)
    assert (endpoint.ledger.in_flight, old.ledger.in_flight) == (0, 0)


def test_leases_on_an_earlier_epoch_are_in_flight_but_no_load() -> None:
    fleet = Fleet(1)
    endpoint = fleet.pool.endpoints[0]
    hashes = prompt_hashes(640, "a")
    old = fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease
    fleet.pool.on_describe("e0", dataclasses.replace(fleet.info, epoch=b"second"), fleet.now_s)
    fleet.report("e0", IDLE)

    assert (endpoint.ledger.in_flight, requests_seen(endpoint)) == (1, 0)
    old.release(fleet.now_s)
    assert (endpoint.ledger.in_flight, requests_seen(endpoint)) == (0, 0)


def test_releasing_twice_gives_back_once() -> None:
    fleet = Fleet(1)
    lease = fleet.pool.pick(fleet.request(prompt_hashes(640, "a")), fleet.now_s).lease
    lease.release(fleet.now_s)
    lease.release(fleet.now_s)
    lease.on_first_token(fleet.now_s)

    assert fleet.pool.endpoints[0].ledger.in_flight == 0


def test_an_engine_that_does_not_settle_by_number_settles_by_time() -> None:
    fleet = Fleet(1)
    fleet.pool.on_describe(
        "e0", dataclasses.replace(fleet.info, settles_by_number=False), fleet.now_s
    )
    endpoint = fleet.pool.endpoints[0]
    fleet.pool.pick(fleet.request(prompt_hashes(640, "a")), fleet.now_s)

    fleet.now_s += 0.1
    fleet.report("e0")
    assert requests_seen(endpoint) == 1
    fleet.now_s += 1.0
    fleet.report("e0", running=1)
    assert requests_seen(endpoint) == 1


class Engine:
    """What one engine would report: requests arrive late, out of order, or never."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.on_the_way: list[Lease] = []
        self.live: list[Lease] = []
        self.admitted: set[int] = set()
        self.settled_through = 0

    def admit(self, lease: Lease) -> None:
        self.on_the_way.remove(lease)
        self.admitted.add(lease.number)
        self.settled_through = max(self.settled_through, lease.settled_through)
        if lease.is_open:
            self.live.append(lease)

    def report(self) -> LoadView:
        self.live = [lease for lease in self.live if lease.is_open]
        through = self.settled_through
        while through + 1 in self.admitted:
            through += 1
        beyond = tuple(sorted(number for number in self.admitted if number > through))
        return dataclasses.replace(
            IDLE, running=len(self.live), admitted_through=through, admitted_beyond=beyond
        )


ACTIONS = ("pick",) * 4 + ("admit",) * 4 + ("end",) * 3 + ("lose", "report", "report", "first")
FLAPS = ("restart", "lost", "remove")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(ACTIONS + FLAPS), min_size=50, max_size=200),
    st.randoms(use_true_random=False),
)
def test_accounts_are_exact_at_every_step_and_zero_at_the_end(
    actions: list[str], random: Random
) -> None:
    fleet = Fleet(3)
    engines = {name: Engine() for name in ("e0", "e1", "e2")}
    everyone: list[Lease] = []
    retired: set[Endpoint] = set()
    epochs = 0
    for action in actions:
        fleet.now_s += 0.01
        name = random.choice(list(engines))
        engine = engines[name]
        if action == "pick":
            request = fleet.request(prompt_hashes(random.choice((64, 640)), random.randrange(5)))
            lease = fleet.pool.pick(request, fleet.now_s).lease
            everyone.append(lease)
            engines[lease.endpoint.id].on_the_way.append(lease)
        elif action == "admit" and engine.on_the_way:
            engine.admit(random.choice(engine.on_the_way))
        elif action == "lose" and engine.on_the_way:
            lost = random.choice(engine.on_the_way)
            engine.on_the_way.remove(lost)
            lost.release(fleet.now_s)
        elif action == "end" and everyone:
            random.choice(everyone).release(fleet.now_s)
        elif action == "first" and everyone:
            random.choice(everyone).on_first_token(fleet.now_s)
        elif action == "report":
            fleet.report(name, engine.report())
        elif action == "restart":
            epochs += 1
            engine.restart()
            info = dataclasses.replace(fleet.info, epoch=str(epochs).encode())
            fleet.pool.on_describe(name, info, fleet.now_s)
        elif action == "lost":
            fleet.pool.on_lost(name, fleet.now_s)
            fleet.sync(name)
        elif action == "remove":
            endpoint = fleet.pool.endpoint(name)
            assert endpoint is not None
            retired.add(endpoint)
            fleet.pool.remove_endpoint(name)
            fleet.add(name, load=engine.report())
            fleet.pool.on_describe(name, fleet.info, fleet.now_s)
        fleet.pool.check_integrity()
        for endpoint in [*fleet.pool.endpoints, *retired]:
            ledger = endpoint.ledger
            open_leases = [lease for lease in everyone if lease.is_open and lease.ledger is ledger]
            assert ledger.in_flight == len(open_leases)
            assert 0 <= ledger.unsettled <= ledger.in_flight

    for lease in everyone:
        lease.release(fleet.now_s)
    fleet.now_s += 60.0
    for name, engine in engines.items():
        fleet.report(name, engine.report())
    for endpoint in [*fleet.pool.endpoints, *retired]:
        ledger = endpoint.ledger
        assert (ledger.in_flight, ledger.unsettled) == (0, 0)
        assert (ledger.unsettled_prefill_tokens, ledger.unsettled_context_tokens) == (0, 0)
    assert [requests_seen(endpoint) for endpoint in fleet.pool.endpoints] == [0, 0, 0]
    assert len(fleet.pool.assumed) == 0


def test_after_a_storm_of_cancels_errors_and_flaps_equal_engines_share_evenly() -> None:
    random = Random(1)
    fleet = Fleet(3)
    leases = []
    for number in range(500):
        lease = fleet.pool.pick(fleet.request(prompt_hashes(64, number)), fleet.now_s).lease
        if number % 3:
            lease.release(fleet.now_s)
        else:
            leases.append(lease)
        if number % 50 == 0:
            fleet.pool.remove_endpoint("e1")
            fleet.add("e1")
    for lease in random.sample(leases, len(leases)):
        lease.release(fleet.now_s)
    for name in fleet.loads:
        fleet.report(name, IDLE)

    chosen = {"e0": 0, "e1": 0, "e2": 0}
    for number in range(200):
        decision = fleet.pool.pick(fleet.request(prompt_hashes(64, "after", number)), fleet.now_s)
        chosen[decision.endpoint.id] += 1

    assert max(chosen.values()) - min(chosen.values()) <= 4
    assert decision.model == MODEL
    assert decision.cached_tokens % STRIDE == 0
