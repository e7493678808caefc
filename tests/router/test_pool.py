import dataclasses
import gc
import tracemalloc
from random import Random

import pytest

from kvoy_contract.blocks import BlockHash
from kvoy_contract.errors import ContextLengthExceeded, ModelNotFound, Unavailable
from kvoy_router.endpoint import EngineInfo, Knowledge
from kvoy_router.fleet_testing import IDLE, MODEL, STRIDE, Fleet, prompt_hashes
from kvoy_router.policies import make_policy
from kvoy_router.pool import Pool, PoolConfig
from kvoy_router.request import InferenceRequest


def held(fleet: Fleet, name: str) -> int:
    endpoint = fleet.pool.endpoint(name)
    assert endpoint is not None
    return fleet.pool.index.num_held(endpoint.slot)


def request_for(model: str) -> InferenceRequest:
    return InferenceRequest("r", model, 100)


# Models


def test_a_declared_model_without_engines_is_unavailable_and_an_unknown_one_not_found() -> None:
    pool = Pool("router")
    pool.declare_model("m1")

    with pytest.raises(Unavailable) as unavailable:
        pool.pick(request_for("m1"), 0.0)
    with pytest.raises(ModelNotFound):
        pool.pick(request_for("nope"), 0.0)
    assert unavailable.value.retry_after_s
    assert pool.models() == ["m1"]


def test_before_any_engine_has_told_its_model_every_model_is_unavailable() -> None:
    pool = Pool("router")
    pool.add_endpoint("e0")

    with pytest.raises(Unavailable):
        pool.pick(request_for("anything"), 0.0)


def test_a_model_whose_last_engine_went_is_unavailable_and_no_longer_listed() -> None:
    fleet = Fleet(1)
    fleet.pool.remove_endpoint("e0")

    with pytest.raises(Unavailable):
        fleet.pool.pick(request_for(MODEL), fleet.now_s)
    assert fleet.pool.models() == []


def test_each_model_has_its_own_engines_and_aliases() -> None:
    pool = Pool("router")
    for address, model in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        pool.add_endpoint(address)
        info = EngineInfo(epoch=b"1", served_model=model, aliases=(f"{model}-alias",))
        pool.on_describe(address, info, 0.0)

    assert pool.models() == ["a", "a-alias", "b", "b-alias"]
    for _ in range(20):
        assert pool.pick(request_for("b"), 0.0).endpoint.id == "b0"
        assert pool.pick(request_for("a-alias"), 0.0).endpoint.id in ("a0", "a1")


def test_an_engine_that_serves_another_model_now_moves() -> None:
    fleet = Fleet(1)
    info = EngineInfo(epoch=b"2", served_model="other")
    fleet.pool.on_describe("e0", info, fleet.now_s)

    assert fleet.pool.models() == ["other"]


# Who may serve


def test_engines_that_drain_or_are_not_ready_or_were_tried_get_nothing() -> None:
    fleet = Fleet(5)
    fleet.report("e0", draining=True)
    fleet.report("e1", ready=False)
    fleet.pool.set_draining("e2", True)

    decision = fleet.pool.pick(
        fleet.request(prompt_hashes(640, "a")), fleet.now_s, exclude=frozenset({"e3"})
    )
    assert decision.endpoint.id == "e4"
    assert dict(decision.rejected) == {
        "e0": "draining",
        "e1": "not ready",
        "e2": "draining",
        "e3": "excluded",
    }
    with pytest.raises(Unavailable):
        fleet.pool.pick(request_for(MODEL), fleet.now_s, exclude=frozenset({"e3", "e4"}))


def test_a_prompt_goes_where_it_fits_and_is_refused_where_it_fits_nowhere() -> None:
    fleet = Fleet(2)
    for name, limit in (("e0", 1000), ("e1", 8000)):
        info = dataclasses.replace(fleet.info, max_model_len=limit)
        fleet.pool.on_describe(name, info, fleet.now_s)
    long = prompt_hashes(4096, "a")

    for _ in range(10):
        assert fleet.pool.pick(fleet.request(long), fleet.now_s).endpoint.id == "e1"
        short = fleet.request(long[:10], max_tokens=2000)
        assert fleet.pool.pick(short, fleet.now_s).endpoint.id == "e1"
    with pytest.raises(ContextLengthExceeded):
        fleet.pool.pick(fleet.request((), num_tokens=8000), fleet.now_s)


# Telemetry


def test_a_new_epoch_forgets_everything() -> None:
    fleet = Fleet(1)
    fleet.sync("e0", prompt_hashes(640, "a"))
    fleet.pool.on_describe("e0", dataclasses.replace(fleet.info, epoch=b"second"), fleet.now_s)

    endpoint = fleet.pool.endpoints[0]
    assert held(fleet, "e0") == 0
    assert (endpoint.load, endpoint.knowledge) == (None, Knowledge.NEW)


def test_a_lost_stream_means_unknown_and_a_snapshot_makes_known_again() -> None:
    fleet = Fleet(1)
    hashes = prompt_hashes(640, "a")
    fleet.sync("e0", hashes)
    endpoint = fleet.pool.endpoints[0]

    fleet.pool.on_lost("e0", fleet.now_s)
    assert (held(fleet, "e0"), endpoint.load) == (0, None)
    assert endpoint.to_dict(fleet.now_s, 0)["knowledge"] == "lost"
    assert endpoint.to_dict(fleet.now_s, 0)["free_blocks"] is None

    fleet.pool.on_snapshot_begin("e0", fleet.now_s)
    assert endpoint.knowledge is Knowledge.SYNCING
    fleet.pool.on_snapshot_chunk("e0", hashes[:4], fleet.now_s)
    fleet.pool.on_snapshot_chunk("e0", b"".join(hashes[4:]), fleet.now_s)
    fleet.pool.on_snapshot_end("e0", fleet.now_s)
    assert (held(fleet, "e0"), endpoint.knowledge) == (10, Knowledge.EXACT)


def test_block_events_apply_in_order_and_repeat_harmlessly() -> None:
    fleet = Fleet(1)
    one, two = prompt_hashes(640, "a"), prompt_hashes(640, "b")
    fleet.sync("e0", one)

    fleet.pool.on_blocks("e0", one[5:], two, False, fleet.now_s)
    fleet.pool.on_blocks("e0", one[5:], two, False, fleet.now_s)
    assert held(fleet, "e0") == 15
    fleet.pool.on_blocks("e0", (), one[:2], True, fleet.now_s)
    assert held(fleet, "e0") == 2
    fleet.pool.check_integrity()


def test_events_of_a_removed_engine_are_ignored() -> None:
    fleet = Fleet(2)
    fleet.pool.remove_endpoint("e0")
    fleet.report("e0")
    fleet.sync("e0", prompt_hashes(640, "a"))
    fleet.pool.on_lost("e0", fleet.now_s)
    fleet.pool.remove_endpoint("e0")

    assert [endpoint.id for endpoint in fleet.pool.endpoints] == ["e1"]


def test_blocks_are_assumed_until_telemetry_speaks_of_them_or_the_request_fails() -> None:
    fleet = Fleet(1)
    hashes = prompt_hashes(640, "a")

    lease = fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease
    assert len(fleet.pool.assumed) == 10
    fleet.store("e0", hashes[:6])
    assert len(fleet.pool.assumed) == 4
    fleet.pool.on_blocks("e0", hashes[4:], (), False, fleet.now_s)
    assert len(fleet.pool.assumed) == 0

    again = fleet.pool.pick(fleet.request(hashes), fleet.now_s)
    assert again.cached_tokens == 4 * STRIDE
    again.lease.release(fleet.now_s)
    lease.release(fleet.now_s)
    assert len(fleet.pool.assumed) == 0


def test_a_computed_prompt_stays_assumed_for_the_time_that_telemetry_may_take() -> None:
    fleet = Fleet(1)
    hashes = prompt_hashes(640, "a")
    lease = fleet.pool.pick(fleet.request(hashes), fleet.now_s).lease
    lease.on_first_token(fleet.now_s)
    lease.release(fleet.now_s)

    assert fleet.pool.pick(fleet.request(hashes), fleet.now_s + 1).cached_tokens == 640
    assert fleet.pool.pick(fleet.request(hashes), fleet.now_s + 5).cached_tokens == 0


@pytest.mark.slow
def test_the_index_stays_bounded_under_unique_prompts_and_engine_churn() -> None:
    random = Random(1)
    fleet = Fleet(4, config=PoolConfig(max_index_entries=6_400))
    head = prompt_hashes(16 * STRIDE, "head")

    def some_prompts(count: int) -> None:
        for _ in range(count):
            tail = [BlockHash(random.randbytes(16)) for _ in range(16)]
            decision = fleet.pool.pick(fleet.request(head + tail), fleet.now_s)
            fleet.store(decision.endpoint.id, head + tail)
            decision.lease.release(fleet.now_s)

    some_prompts(600)
    gc.collect()
    tracemalloc.start()
    for round_number in range(10):
        some_prompts(60)
        fleet.pool.remove_endpoint(f"e{round_number % 4}")
        fleet.add(f"e{round_number % 4}")
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert len(fleet.pool.index) <= 6_400
    assert grown < 2_000_000
    decision = fleet.pool.pick(fleet.request(head), fleet.now_s)
    assert decision.best_cached_tokens == 16 * STRIDE
    for name in list(fleet.loads):
        fleet.pool.remove_endpoint(name)
    while fleet.pool.index.sweep():
        pass
    assert len(fleet.pool.index) == 0


# Policies


def test_round_robin_takes_turns_and_a_new_engine_gets_the_next_one() -> None:
    fleet = Fleet(3, "round-robin")
    order = [fleet.pool.pick(request_for(MODEL), fleet.now_s).endpoint.id for _ in range(9)]
    assert order[:3] == order[3:6] == order[6:]
    assert sorted(order[:3]) == ["e0", "e1", "e2"]

    fleet.add("e3")
    assert fleet.pool.pick(request_for(MODEL), fleet.now_s).endpoint.id == "e3"


def test_least_load_counts_what_was_just_sent() -> None:
    fleet = Fleet(3, "least-load")
    fleet.report("e0", running=5)
    order = [fleet.pool.pick(request_for(MODEL), fleet.now_s).endpoint.id for _ in range(10)]

    assert (order.count("e0"), order.count("e1"), order.count("e2")) == (0, 5, 5)


def test_random_uses_every_engine() -> None:
    fleet = Fleet(3, "random")

    assert {fleet.pool.pick(request_for(MODEL), 0.0).endpoint.id for _ in range(50)} == {
        "e0",
        "e1",
        "e2",
    }


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'best'"):
        make_policy("best", Random())


def test_the_same_seed_makes_the_same_decisions() -> None:
    def run() -> list[str]:
        fleet = Fleet(5, seed=3)
        return [fleet.pool.pick(request_for(MODEL), 0.0).endpoint.id for _ in range(30)]

    assert run() == run()


# Reasons


def test_a_decision_tells_how_every_engine_looked() -> None:
    fleet = Fleet(2)
    hashes = prompt_hashes(640, "a")
    fleet.sync("e0", hashes)
    fleet.add("e2").is_draining = True
    decision = fleet.pool.pick(fleet.request(hashes), fleet.now_s)

    told = decision.to_dict()
    assert (told["endpoint"], told["cached_tokens"], told["policy"]) == ("e0", 640, "kv-aware")
    assert [c["endpoint_id"] for c in told["candidates"]] == ["e0", "e1"]
    for candidate in told["candidates"]:
        terms = {key: value for key, value in candidate["cost"].items() if key != "total_s"}
        assert candidate["score"] == pytest.approx(sum(terms.values()))
    assert told["rejected"] == [{"endpoint": "e2", "reason": "draining"}]
    assert "e0 cached=640" in decision.reason
    assert "e2 draining" in decision.reason


def test_every_engine_can_be_described_with_what_is_not_known_as_none() -> None:
    fleet = Fleet(1)
    fleet.report("e0", IDLE, running=3)
    fleet.pool.add_endpoint("e1", "e1:9000")
    fleet.now_s += 2.0

    known, unknown = fleet.pool.describe_endpoints(fleet.now_s)
    assert (known["running"], known["report_age_s"], known["epoch"]) == (3, 2.0, b"first".hex())
    assert (unknown["running"], unknown["model"], unknown["knowledge"]) == (None, None, "new")


def test_how_most_engines_tokenise_follows_every_change() -> None:
    fleet = Fleet(3)
    pool = fleet.pool

    def describe(name: str, digest: str) -> None:
        pool.on_describe(name, dataclasses.replace(fleet.info, tokenizer_digest=digest), 0.0)

    def usual() -> str:
        info = pool.usual_info(MODEL)
        assert info is not None
        return info.tokenizer_digest

    assert usual() == fleet.info.tokenizer_digest
    describe("e0", "new")
    assert usual() == fleet.info.tokenizer_digest
    describe("e1", "new")
    assert usual() == "new"
    pool.remove_endpoint("e0")
    pool.remove_endpoint("e1")
    assert usual() == fleet.info.tokenizer_digest
    fleet.add("e3")
    fleet.add("e4")
    describe("e3", "newer")
    describe("e4", "newer")
    assert usual() == "newer"
