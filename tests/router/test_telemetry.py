"""Telemetry from fake engines into the pool: snapshots, deltas, gaps, restarts, silence."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvoy_contract.blocks import BlockHash, block_hashes, seed_hash, stride_hashes
from kvoy_contract.testing import FakeEngine
from kvoy_router.app import Router
from kvoy_router.endpoint import Knowledge
from kvoy_router.testing import eventually, running_router
from kvoy_router.watch_reader import read_description

StartEngine = Callable[..., Awaitable[FakeEngine]]


def hashes_of(engine: FakeEngine, num_tokens: int, salt: str = "") -> list[BlockHash]:
    """Stride hashes of a prompt of `num_tokens` letters a."""
    seed = seed_hash(engine.description.model_identity, cache_salt=salt)
    return stride_hashes(block_hashes(seed, [97] * num_tokens, 16), 16, 64)


def held(router: Router, engine: FakeEngine) -> int:
    endpoint = router.pool.endpoint(engine.address)
    assert endpoint is not None
    return router.pool.index.num_held(endpoint.slot)


def knowledge(router: Router, engine: FakeEngine) -> Knowledge:
    endpoint = router.pool.endpoint(engine.address)
    assert endpoint is not None
    return endpoint.knowledge


async def test_a_snapshot_is_indexed_and_acknowledged(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.change_blocks(stored=hashes_of(engine, 640))

    async with running_router([engine]) as router:
        await eventually(lambda: engine.num_acks == 1)

        assert held(router, engine) == 10
        assert knowledge(router, engine) is Knowledge.EXACT
        assert engine.router_ids == {router.pool.router_id}


async def test_deltas_change_the_index_and_duplicates_are_harmless(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    hashes = hashes_of(engine, 640)

    async with running_router([engine]) as router:
        engine.change_blocks(stored=hashes)
        engine.change_blocks(stored=hashes)
        await eventually(lambda: held(router, engine) == 10)
        engine.change_blocks(removed=hashes[8:])
        engine.change_blocks(removed=hashes[8:])
        await eventually(lambda: held(router, engine) == 8)
        engine.change_blocks(cleared=True)
        await eventually(lambda: held(router, engine) == 0)
        router.pool.check_integrity()


async def test_a_gap_forgets_the_engine_and_takes_one_new_snapshot(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.change_blocks(stored=hashes_of(engine, 640))

    async with running_router([engine]) as router:
        await eventually(lambda: held(router, engine) == 10)
        before = engine.num_describes
        engine.skip_seq(4)
        engine.report_load()
        await eventually(lambda: engine.num_describes == before + 1)
        await eventually(lambda: knowledge(router, engine) is Knowledge.EXACT)
        await eventually(lambda: held(router, engine) == 10)

        assert engine.num_describes == before + 1


async def test_a_snapshot_inside_the_stream_replaces_what_was_known(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.change_blocks(stored=hashes_of(engine, 640))

    async with running_router([engine]) as router:
        await eventually(lambda: engine.num_acks == 1)
        engine.blocks.clear()
        engine.blocks.update(dict.fromkeys(hashes_of(engine, 128, "other")))
        engine.send_snapshot()
        await eventually(lambda: engine.num_acks == 2)

        assert held(router, engine) == 2


async def test_a_restarted_engine_is_forgotten_and_described_anew(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.change_blocks(stored=hashes_of(engine, 640))

    async with running_router([engine]) as router:
        await eventually(lambda: held(router, engine) == 10)
        engine.restart()
        await eventually(lambda: engine.num_describes == 2)
        await eventually(lambda: knowledge(router, engine) is Knowledge.EXACT)

        endpoint = router.pool.endpoint(engine.address)
        assert endpoint is not None
        assert endpoint.info is not None
        assert endpoint.info.epoch == engine.description.epoch
        assert held(router, engine) == 0


async def test_silence_means_unknown_and_not_zero(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with running_router([engine], stale_after_s=0.6) as router:
        engine.is_muted = True
        await eventually(lambda: knowledge(router, engine) is Knowledge.LOST)
        endpoint = router.pool.endpoint(engine.address)
        assert endpoint is not None
        assert endpoint.load is None

        engine.is_muted = False
        await eventually(lambda: knowledge(router, engine) is Knowledge.EXACT)
        await eventually(lambda: endpoint.load is not None)


async def test_an_engine_that_comes_back_after_minutes_of_absence_is_found(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        await engine.stop_telemetry()
        await eventually(lambda: knowledge(router, engine) is Knowledge.LOST)
        await engine.start_telemetry()
        await eventually(lambda: knowledge(router, engine) is Knowledge.EXACT)


async def test_a_fleet_with_one_tokenizer_hands_it_over_once(start_engine: StartEngine) -> None:
    engines = [await start_engine() for _ in range(5)]

    async with running_router(engines) as router:
        assert router.prompts.digests == {engines[0].tokenizer.digest}

    assert sum(engine.num_tokenizer_calls for engine in engines) == 1


async def test_an_engine_with_two_addresses_counts_once_and_is_kept_while_it_has_one(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = await start_engine()
    port, telemetry = engine.address.rpartition(":")[2], engine.telemetry_address
    names = [f"{host}:{port}" for host in ("127.0.0.1", "localhost")]
    file = tmp_path / "engines.yaml"

    def write(addresses: list[str]) -> None:
        entries = [{"address": address, "telemetry": telemetry} for address in addresses]
        file.write_text(json.dumps({"engines": entries}))

    def known(router: Router) -> list[str]:
        return [e.id for e in router.pool.endpoints if e.knowledge is Knowledge.EXACT]

    write(names)
    async with running_router([], engine=(), engines_file=str(file), wait=False) as router:
        await eventually(lambda: len(known(router)) == 1)
        (first,) = known(router)
        await eventually(lambda: f"it is the engine that is known as {first}" in reasons(caplog))
        assert router.pool.models() == ["m"]

        other = names[1 - names.index(first)]
        write([other])
        await eventually(lambda: known(router) == [other])


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__.get("reason", "") for record in caplog.records]


async def test_a_wrong_secret_leaves_the_engine_unknown(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine(secret="another")

    async with running_router([engine], wait=False) as router:
        await eventually(lambda: len(router.pool.endpoints) == 1)
        await eventually(lambda: knowledge(router, engine) is Knowledge.LOST)

        assert router.pool.models() == []
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage() == "telemetry fails"


async def test_an_engine_that_is_not_up_yet_is_no_warning(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine()
    await engine.stop_telemetry()

    with caplog.at_level("INFO"):
        async with running_router([engine], wait=False):
            await eventually(lambda: "telemetry not reachable yet" in caplog.messages)

    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_two_routers_watch_one_engine_apart(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with running_router([engine]) as one, running_router([engine]) as other:
        assert engine.router_ids == {one.pool.router_id, other.pool.router_id}


async def test_a_description_without_a_model_or_with_a_broken_stride_is_refused(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.description.hash_stride = 40
    with pytest.raises(ValueError, match="stride"):
        read_description(engine.description)

    engine.description.served_model = ""
    with pytest.raises(ValueError, match="model"):
        read_description(engine.description)
