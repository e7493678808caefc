"""Engines of two pools: who gets requests alone, and which could work together."""

from __future__ import annotations

import dataclasses

import pytest

from kvoy_contract.errors import Unavailable
from kvoy_contract.names import PREFILL_POOL, SERVING_POOL
from kvoy_router.endpoint import EngineInfo, Origin, Role
from kvoy_router.fleet_testing import IDLE, MODEL
from kvoy_router.pairs import RevisionPair, pairs
from kvoy_router.pool import Pool
from kvoy_router.request import InferenceRequest

NOW_S = 100.0


def add(pool: Pool, address: str, origin: Origin, role: Role = Role.BOTH) -> None:
    pool.add_endpoint(address, origin=origin)
    pool.on_describe(address, EngineInfo(epoch=b"1", served_model=MODEL, role=role), NOW_S)
    pool.on_snapshot_begin(address, NOW_S)
    pool.on_snapshot_end(address, NOW_S)
    pool.on_load(address, IDLE, NOW_S)


def test_a_prefill_engine_gets_no_request_alone() -> None:
    pool = Pool("router")
    add(pool, "p", Origin(), Role.PREFILL)
    request = InferenceRequest("r", MODEL, 100)

    with pytest.raises(Unavailable):
        pool.pick(request, NOW_S)
    add(pool, "d", Origin(), Role.DECODE)
    decision = pool.pick(request, NOW_S)

    assert decision.endpoint.id == "d"
    assert decision.rejected == (("p", "prefill only"),)
    assert [endpoint.is_routable for endpoint in pool.endpoints] == [False, True]


def serving(revision: str, service: str = "s") -> Origin:
    return Origin(service=service, pool=SERVING_POOL, revision=revision)


def prefill(revision: str, service: str = "s") -> Origin:
    return Origin(service=service, pool=PREFILL_POOL, revision=revision)


def test_pairs_never_cross_revisions_or_services() -> None:
    pool = Pool("router")
    add(pool, "s-old", serving("old"))
    add(pool, "p-new", prefill("new"))
    add(pool, "p-other", prefill("old", service="t"))

    assert pairs(pool.endpoints) == []


def test_pairs_list_the_ready_engines_of_both_pools_by_service_and_revision() -> None:
    pool = Pool("router")
    add(pool, "s0", serving("old"))
    add(pool, "s1", serving("old"))
    add(pool, "p0", prefill("old"), Role.PREFILL)
    add(pool, "s2", serving("new"))
    add(pool, "p1", prefill("new"), Role.PREFILL)
    add(pool, "t0", serving("old", service="t"))

    assert pairs(pool.endpoints) == [
        RevisionPair("s", "new", ("s2",), ("p1",)),
        RevisionPair("s", "old", ("s0", "s1"), ("p0",)),
    ]


def test_a_revision_without_a_ready_engine_in_one_pool_has_no_pair() -> None:
    pool = Pool("router")
    add(pool, "s0", serving("r"))
    add(pool, "p0", prefill("r"), Role.PREFILL)
    assert len(pairs(pool.endpoints)) == 1

    pool.on_load("p0", dataclasses.replace(IDLE, ready=False), NOW_S)
    assert pairs(pool.endpoints) == []
    pool.on_load("p0", IDLE, NOW_S)
    pool.set_draining("s0", True)
    assert pairs(pool.endpoints) == []
    pool.set_draining("s0", False)
    pool.on_lost("p0", NOW_S)
    assert pairs(pool.endpoints) == []


def test_engines_that_no_service_owns_form_no_pairs() -> None:
    pool = Pool("router")
    add(pool, "a", Origin(pool=SERVING_POOL, revision="r"))
    add(pool, "b", Origin(pool=PREFILL_POOL, revision="r"))

    assert pairs(pool.endpoints) == []
