"""Series of pods, services and models vanish with them: averages and scalers see no ghosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from kvoy_contract.testing import FakeEngine, Script
from kvoy_router.app import Router
from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import Origin
from kvoy_router.found import FoundEngine
from kvoy_router.metrics import Metrics
from kvoy_router.split import Service
from kvoy_router.testing import SECRET, eventually, flag_of, is_routable, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]


def pod(engine: FakeEngine, name: str, service: str = "svc") -> FoundEngine:
    origin = Origin(service=service, pod=name, pod_uid=f"uid-{name}", secret=SECRET)
    return FoundEngine(EngineAddress.parse(flag_of(engine)), origin)


async def ask(router: Router, model: str = "m") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    url = f"http://127.0.0.1:{router.server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await client.post("/v1/chat/completions", json=body)


async def test_of_pods_that_come_under_new_names_only_the_last_has_series(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.script = Script(status=500)
    async with running_router([engine]) as router:
        for number in range(20):
            router.fleet.apply([pod(engine, f"pod-{number}.")])
            await eventually(lambda: is_routable(router.pool, engine.address))
            assert (await ask(router)).headers["x-kvoy-engine"] == f"pod-{number}."

        exposed = router.metrics.expose().decode()
        named = {number for number in range(20) if f'engine="pod-{number}."' in exposed}
        assert named == {19}
        assert 'engine="pod-19.",model="m",reason="status_500"' in exposed
        assert engine.address not in exposed


async def test_a_failure_after_the_engine_has_gone_is_told_once(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.script = Script(gate=asyncio.Event())
    async with running_router([engine], max_retries=0) as router:
        router.fleet.apply([pod(engine, "pod-1")])
        await eventually(lambda: is_routable(router.pool, engine.address))
        request = asyncio.create_task(ask(router))
        await eventually(lambda: engine.in_flight == 1)

        router.fleet.apply([])
        await engine.stop_http()
        assert (await request).status_code == 502

        assert b'engine="pod-1"' in router.metrics.expose()
        assert b'engine="pod-1"' not in router.metrics.expose()


async def test_series_of_a_service_and_a_model_end_with_them(start_engine: StartEngine) -> None:
    one, other = await start_engine(model="m-one"), await start_engine(model="m-two")
    async with running_router([one, other]) as router:
        router.pool.set_services(
            [Service(name="one", model="m-one"), Service(name="two", model="m-two")]
        )
        engines = [pod(one, "pod-1", "one"), pod(other, "pod-2", "two")]
        router.fleet.apply(engines)
        await eventually(lambda: all(is_routable(router.pool, e.address) for e in (one, other)))
        for model in ("m-one", "m-two"):
            assert (await ask(router, model)).status_code == 200

        router.fleet.apply(engines[:1])
        router.metrics.forget_service("two")
        router.metrics.forget_model("m-two")

        exposed = router.metrics.expose().decode()
        assert 'service="one"' in exposed
        assert 'model="m-one"' in exposed
        assert "two" not in exposed


def test_a_services_name_in_another_label_is_left_alone() -> None:
    metrics = Metrics()
    metrics._decisions["random", "other", "random", "cold"].inc()
    metrics._decisions["m", "random", "random", "cold"].inc()

    metrics.forget_service("random")

    exposed = metrics.expose().decode()
    assert 'service="other"' in exposed
    assert 'service="random"' not in exposed
