"""Several services that serve one model name: shares by weight, sticky by conversation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest

from kvoy_contract.errors import ModelNotFound, Unavailable
from kvoy_contract.openai import parse_chat, parse_completion
from kvoy_router.affinity import affinity_of
from kvoy_router.endpoint import EngineInfo, Origin
from kvoy_router.fleet_testing import IDLE, MODEL
from kvoy_router.pool import Pool
from kvoy_router.request import InferenceRequest
from kvoy_router.split import Service, order

NOW_S = 100.0


def affinities(count: int, seed: int = 0) -> list[bytes]:
    random = Random(seed)
    return [random.randbytes(16) for _ in range(count)]


def shares(weights: Mapping[str, int], keys: list[bytes]) -> dict[str, float]:
    counts = Counter(order(weights, weights, key)[0] for key in keys)
    return {name: counts[name] / len(keys) for name in weights}


@pytest.mark.parametrize(
    "weights",
    [{"a": 100, "b": 100}, {"a": 95, "b": 5}, {"a": 1, "b": 1000}, {"a": 10, "b": 20, "c": 70}],
)
def test_traffic_is_shared_by_weight(weights: dict[str, int]) -> None:
    total = sum(weights.values())

    for name, share in shares(weights, affinities(20_000)).items():
        expected = weights[name] / total
        # Four standard deviations of a binomial share.
        assert abs(share - expected) <= 4 * (expected * (1 - expected) / 20_000) ** 0.5


def test_a_change_of_weights_moves_only_the_share_that_has_to_move() -> None:
    keys = affinities(20_000)
    before = [order({"a": 90, "b": 10}, "ab", key)[0] for key in keys]
    after = [order({"a": 80, "b": 20}, "ab", key)[0] for key in keys]

    moves = Counter(zip(before, after, strict=True))

    assert moves["b", "a"] == 0
    # From 10 to 20 weight beside 90 and 80 is 10 points of the traffic.
    assert 0.09 < moves["a", "b"] / len(keys) < 0.11


def test_the_share_of_a_service_that_cannot_serve_goes_to_the_others_by_their_weights() -> None:
    weights = {"a": 50, "b": 40, "c": 10}
    keys = [key for key in affinities(40_000) if order(weights, weights, key)[0] == "a"]

    counts = Counter(order(weights, "bc", key)[0] for key in keys)

    assert 0.78 < counts["b"] / len(keys) < 0.82
    assert all(order(weights, "bc", key)[0] == order(weights, "abc", key)[1] for key in keys)


def test_a_service_of_weight_zero_comes_last() -> None:
    weights = {"a": 0, "b": 1, "c": 1000}

    assert {order(weights, weights, key)[2] for key in affinities(1000)} == {"a"}
    assert order(weights, ["a"], b"") == ["a"]


def chat(*messages: tuple[str, str], salt: str | None = None) -> bytes:
    body = {"model": "m", "messages": [{"role": r, "content": c} for r, c in messages]}
    if salt is not None:
        body["cache_salt"] = salt
    return affinity_of(parse_chat(encode(body)))


def encode(body: object) -> bytes:
    return json.dumps(body).encode()


def test_a_conversation_keeps_its_affinity_from_turn_to_turn() -> None:
    first = chat(("system", "be brief"), ("user", "hi"))
    second = chat(("system", "be brief"), ("user", "hi"), ("assistant", "yes?"), ("user", "why"))

    assert first == second


@pytest.mark.parametrize(
    "other",
    [
        chat(("system", "be brief"), ("user", "ho")),
        chat(("system", "be long"), ("user", "hi")),
        chat(("user", "be brief"), ("user", "hi")),
        chat(("system", "be brief"), ("user", "hi"), salt="tenant"),
    ],
)
def test_conversations_that_begin_otherwise_have_another_affinity(other: bytes) -> None:
    assert other != chat(("system", "be brief"), ("user", "hi"))


def test_two_long_beginnings_are_told_apart_by_their_length() -> None:
    assert chat(("user", "x" * 5000)) != chat(("user", "x" * 5001))


def test_parts_of_a_message_count_like_its_text_does() -> None:
    def parts(*texts: str) -> bytes:
        content = [{"type": "text", "text": text} for text in texts]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        return affinity_of(parse_chat(encode(body)))

    assert parts("a", "b") == parts("a", "b") != parts("a", "c")


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3], ["hello", "other"], [[1, 2, 3], [4]]])
def test_a_plain_prompt_has_an_affinity(prompt: object) -> None:
    def affinity(prompt: object) -> bytes:
        return affinity_of(parse_completion(encode({"model": "m", "prompt": prompt})))

    assert affinity(prompt) == affinity(prompt) != affinity("something else")


def info(model: str = MODEL, *, epoch: bytes = b"first", identity: str = "") -> EngineInfo:
    return EngineInfo(epoch=epoch, served_model=model, model_identity=identity)


def add(pool: Pool, address: str, service: str, model: str = MODEL) -> None:
    pool.add_endpoint(address, origin=Origin(service=service))
    pool.on_describe(address, info(model), NOW_S)
    pool.on_snapshot_begin(address, NOW_S)
    pool.on_snapshot_end(address, NOW_S)
    pool.on_load(address, IDLE, NOW_S)


def request(affinity: bytes, model: str = MODEL) -> InferenceRequest:
    return InferenceRequest("r", model, 100, affinity=affinity)


def services(**weights: int) -> list[Service]:
    return [Service(name=name, model=MODEL, weight=weight) for name, weight in weights.items()]


@pytest.fixture
def pool() -> Pool:
    """Two engines of `stable`, one of `canary`."""
    pool = Pool("router", random=Random(0))
    pool.set_services(services(stable=90, canary=10))
    add(pool, "s0", "stable")
    add(pool, "s1", "stable")
    add(pool, "c0", "canary")
    return pool


def picked(pool: Pool, affinity: bytes) -> str:
    decision = pool.pick(request(affinity), NOW_S)
    decision.lease.release(NOW_S)
    return decision.endpoint.origin.service


def test_a_pool_shares_traffic_by_weight_and_not_by_the_number_of_engines(pool: Pool) -> None:
    counts = Counter(picked(pool, key) for key in affinities(4000))

    assert 0.08 < counts["canary"] / 4000 < 0.12


def test_a_conversation_stays_with_its_service_while_its_engines_are_busy(pool: Pool) -> None:
    key = next(key for key in affinities(100) if picked(pool, key) == "canary")

    leases = [pool.pick(request(key), NOW_S) for _ in range(50)]

    assert {decision.endpoint.id for decision in leases} == {"c0"}
    assert ("s0", "the share of service canary") in leases[0].rejected


def test_a_service_without_an_available_engine_passes_its_share_on(pool: Pool) -> None:
    key = next(key for key in affinities(100) if picked(pool, key) == "canary")

    pool.set_draining("c0", True)
    assert picked(pool, key) == "stable"
    pool.set_draining("c0", False)
    assert picked(pool, key) == "canary"
    pool.on_lost("c0", NOW_S)
    assert picked(pool, key) == "stable"


def test_a_retry_stays_within_the_service_while_it_has_another_engine(pool: Pool) -> None:
    key = next(key for key in affinities(100) if picked(pool, key) == "stable")

    first = pool.pick(request(key), NOW_S)
    second = pool.pick(request(key), NOW_S, frozenset({first.endpoint.id}))
    third = pool.pick(request(key), NOW_S, frozenset({"s0", "s1"}))

    assert {first.endpoint.id, second.endpoint.id} == {"s0", "s1"}
    assert third.endpoint.id == "c0"


def test_a_service_of_weight_zero_serves_only_while_nobody_else_can(pool: Pool) -> None:
    pool.set_services(services(stable=90, canary=0))
    assert {picked(pool, key) for key in affinities(200)} == {"stable"}

    pool.set_draining("s0", True)
    pool.set_draining("s1", True)
    assert picked(pool, b"any") == "canary"


def test_the_service_that_a_prompt_is_encoded_for_is_the_one_that_gets_it(pool: Pool) -> None:
    assert pool.is_shared(MODEL)
    for key in affinities(200):
        assert pool.first_service(MODEL, key) == picked(pool, key)


def test_a_decision_names_its_service(pool: Pool) -> None:
    decision = pool.pick(request(b"any"), NOW_S)

    assert decision.to_dict()["service"] == decision.endpoint.origin.service


def test_every_model_of_the_fleet_is_listed_before_an_engine_serves_it() -> None:
    pool = Pool("router")
    pool.set_services([Service(name="a", model="m-a"), Service(name="b", model="m-b")])

    assert pool.models() == ["m-a", "m-b"]
    with pytest.raises(Unavailable):
        pool.pick(request(b"", "m-a"), NOW_S)
    with pytest.raises(ModelNotFound):
        pool.pick(request(b"", "m-c"), NOW_S)


def test_the_name_of_a_service_that_is_gone_is_not_found_any_more(pool: Pool) -> None:
    pool.remove_endpoint("s0")
    pool.remove_endpoint("s1")
    pool.remove_endpoint("c0")
    pool.set_services([Service(name="other", model="m-o")])

    assert pool.models() == ["m-o"]
    with pytest.raises(ModelNotFound):
        pool.pick(request(b""), NOW_S)


def test_a_declared_name_stays_whatever_services_come_and_go() -> None:
    pool = Pool("router")
    pool.declare_model("kept")

    pool.set_services([Service(name="a", model="m-a")])
    pool.set_services([])

    assert pool.models() == ["kept"]


def test_an_engine_gets_nothing_under_the_name_of_another_service() -> None:
    pool = Pool("router")
    pool.set_services([Service(name="a", model="m-a"), Service(name="b", model="m-b")])
    add(pool, "e", "a", model="m-b")

    assert pool.endpoints_of("m-b") == ()
    assert pool.mismatch("e") == "it serves m-b, the service a is to serve m-a"
    with pytest.raises(Unavailable):
        pool.pick(request(b"", "m-b"), NOW_S)


def test_an_engine_of_the_old_name_serves_on_while_its_service_is_renamed() -> None:
    pool = Pool("router")
    pool.set_services([Service(name="a", model="old")])
    add(pool, "e", "a", model="old")

    pool.set_services([Service(name="a", model="new")])

    assert pool.pick(request(b"", "old"), NOW_S).endpoint.id == "e"
    assert pool.mismatch("e") is not None
    assert pool.models() == ["old", "new"]
    # Once somebody else is to serve that name, it is a stranger's.
    pool.set_services([Service(name="a", model="new"), Service(name="b", model="old")])
    with pytest.raises(Unavailable):
        pool.pick(request(b"", "old"), NOW_S)
