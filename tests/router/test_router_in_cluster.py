"""A router that finds its engines through a real API server, with no more rights than it needs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys

import httpx
import pytest

from kvoy_contract.testing import Script
from kvoy_contract.testing_ports import free_port
from kvoy_router.testing import eventually
from kvoy_scene.scene import MODEL, WAIT_S, Scene, StartEngine, ask, call, names, routable

pytestmark = pytest.mark.slow

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_services_pods_serve_and_are_named(scene: Scene, start_engine: StartEngine) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 2)
    async with scene.router() as router:
        engines = await scene.start_engines(start_engine, "qwen-s-r1", service, 2)
        await routable(router, *engines.values())

        answers = [await ask(router) for _ in range(4)]
        shown = (await call(router, "GET", "/debug/engines")).json()["engines"]
        metrics = (await call(router, "GET", "/metrics")).text

        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.headers["x-kvoy-engine"] for answer in answers} == set(engines)
        for engine in engines.values():
            assert all(r.headers["x-kvoy-secret"] == service.secret for r in engine.requests)
        assert {(e["name"], e["service"], e["pool"], e["revision"]) for e in shown} == {
            (name, "qwen", "serving", "r1") for name in engines
        }
        name = min(engines)
        assert f'kvoy_router_engine_in_flight{{engine="{name}",service="qwen"}} 0.0' in metrics
        assert "kvoy_router_kubernetes_up 1.0" in metrics
        assert "kvoy_router_fleet_file_ok 1.0" in metrics
        assert service.secret not in json.dumps(shown) + metrics


async def test_strangers_with_our_labels_get_nothing(
    scene: Scene, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service)
    scene.deploy("stranger", None, claims="qwen")
    labels = scene.labels("qwen") | {"app": "loner"}
    scene.create(
        "pods", {"metadata": {"name": "loner", "labels": labels}, "spec": scene.pod_spec()}
    )
    async with scene.router() as router:
        strangers = await scene.start_engines(start_engine, "stranger", service, 1)
        strangers |= await scene.start_engines(start_engine, "loner", service, 1)
        engines = await scene.start_engines(start_engine, "qwen-s-r1", service, 1)
        await routable(router, *engines.values())
        await eventually(lambda: caplog.text.count("none of ours") == 2, WAIT_S)

        for _ in range(5):
            assert (await ask(router)).status_code == 200

        assert names(router) == set(engines)
        assert not any(e.requests or e.num_describes for e in strangers.values())


async def test_a_pod_that_is_deleted_drains_and_its_stream_ends_well(
    scene: Scene, start_engine: StartEngine
) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 2)
    async with scene.router() as router:
        engines = await scene.start_engines(start_engine, "qwen-s-r1", service, 2)
        await routable(router, *engines.values())
        gate = asyncio.Event()
        leaving, staying = sorted(engines)
        for engine in engines.values():
            engine.script = Script(gate=gate)
        streams = [asyncio.create_task(ask(router)) for _ in range(2)]
        await eventually(lambda: all(e.in_flight == 1 for e in engines.values()))

        scene.delete_pod(leaving)
        endpoint = router.pool.endpoint(engines[leaving].address)
        assert endpoint is not None
        await eventually(lambda: endpoint.is_draining, WAIT_S)
        later = [asyncio.create_task(ask(router)) for _ in range(3)]
        await eventually(lambda: engines[staying].in_flight == 4, WAIT_S)
        gate.set()
        answers = await asyncio.gather(*streams, *later)

        assert [answer.status_code for answer in answers] == [200] * 5
        assert len(engines[leaving].requests) == 1
        # Its process ends before the API forgets the pod.
        await engines[leaving].stop_telemetry()
        await eventually(lambda: names(router) == {staying}, WAIT_S)
        assert leaving.encode() not in router.metrics.expose()


async def test_an_address_that_another_pod_has_taken_over_is_a_new_engine(
    scene: Scene, start_engine: StartEngine
) -> None:
    first, second = scene.add_service("one", model="m1"), scene.add_service("two", model="m2")
    scene.deploy("one-s-r1", first)
    scene.deploy("two-s-r1", second)
    async with scene.router() as router:
        engines = await scene.start_engines(start_engine, "one-s-r1", first, 1)
        (old_name, old), (taker,) = *engines.items(), await scene.pods_of("two-s-r1", 1)
        await routable(router, old)

        await old.stop_http()
        await old.stop_telemetry()
        new = await start_engine(host=old.host, model="m2", secret=second.secret, **scene.ports)
        scene.give_address(taker["metadata"]["name"], old.host)
        await eventually(lambda: names(router) == {taker["metadata"]["name"]}, WAIT_S)
        await routable(router, new)

        assert (await ask(router, model="m2")).status_code == 200
        assert (await ask(router, model="m1")).status_code == 503
        assert [request.headers["x-kvoy-secret"] for request in new.requests] == [second.secret]
        assert old_name not in names(router)


async def test_an_engine_that_serves_another_services_model_gets_nothing_for_it(
    scene: Scene, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = scene.add_service("one", model="m1"), scene.add_service("two", model="m2")
    scene.deploy("one-s-r1", one)
    async with scene.router() as router:
        engines = await scene.start_engines(start_engine, "one-s-r1", one, 1, model=two.model)
        (engine,) = engines.values()
        await routable(router, engine)

        assert (await ask(router, model="m1")).status_code == 503
        assert (await ask(router, model="m2")).status_code == 503
        assert engine.requests == []
        assert "engine serves another model" in caplog.text


async def test_services_share_a_model_and_the_file_changes_the_shares(
    scene: Scene, start_engine: StartEngine
) -> None:
    stable = scene.add_service("stable", weight=50)
    canary = scene.add_service("canary", weight=50)
    scene.deploy("stable-s-r1", stable)
    scene.deploy("canary-s-r1", canary)
    async with scene.router(policy="kv-aware") as router:
        (one,) = (await scene.start_engines(start_engine, "stable-s-r1", stable, 1)).values()
        (two,) = (await scene.start_engines(start_engine, "canary-s-r1", canary, 1)).values()
        await routable(router, one, two)

        for number in range(20):
            for _ in range(2):
                assert (await ask(router, f"conversation {number}")).status_code == 200
        # Both get some conversations (none in 20 would be one run in 500,000), each all its turns.
        assert len(one.requests) > 0
        assert len(two.requests) > 0
        assert len(one.requests) % 2 == len(two.requests) % 2 == 0
        metrics = router.metrics.expose().decode()
        assert 'service="stable"' in metrics
        assert 'service="canary"' in metrics

        scene.write_fleet(stable)
        await eventually(lambda: len(router.pool.endpoints) == 1, WAIT_S)
        assert 'service="canary"' not in router.metrics.expose().decode()
        assert (await ask(router)).status_code == 200


async def test_a_router_in_a_cluster_is_ready_once_it_knows_what_there_is(
    scene: Scene,
) -> None:
    async with scene.router(admin_port=free_port()) as router:
        assert router.admin_server is not None
        base = f"http://127.0.0.1:{router.admin_server.port}"
        async with httpx.AsyncClient(base_url=base, timeout=60) as admin:
            unready = await admin.get("/ready")
            scene.add_service("qwen")
            deadline = asyncio.get_running_loop().time() + WAIT_S
            while (await admin.get("/ready")).status_code != 200:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.05)
            for path in ("/health", "/metrics", "/debug/engines", "/docs"):
                assert (await admin.get(path)).status_code == 200

            assert unready.status_code == 503
            assert unready.json() == {"status": "the fleet file has not been read"}
            models = (await call(router, "GET", "/v1/models")).json()["data"]
            assert [model["id"] for model in models] == [MODEL]
            assert (await ask(router)).status_code == 503
            assert (await ask(router, model="other")).status_code == 404
            assert (await call(router, "GET", "/metrics")).status_code == 404


async def test_a_new_router_is_not_ready_before_the_engines_have_spoken_or_kept_silent(
    scene: Scene, start_engine: StartEngine
) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service, 2)
    speaking, silent = (p["metadata"]["name"] for p in await scene.pods_of("qwen-s-r1", 2))
    engine = await start_engine(host="127.0.0.1", model=MODEL, secret=service.secret, **scene.ports)
    scene.give_address(speaking, engine.host)
    open_end: list[asyncio.StreamWriter] = []
    deaf = await asyncio.start_server(
        lambda reader, writer: open_end.append(writer), "127.0.0.2", scene.http_port + 1
    )
    scene.give_address(silent, "127.0.0.2")
    async with scene.router() as router:
        seen = set()

        def is_ready() -> bool:
            seen.add(router.sources.unready_reason())
            return None in seen

        await eventually(is_ready, WAIT_S)

        assert "engines have not reported yet" in seen
        # On a busy machine the one that speaks may need as long as the other one keeps silent.
        await routable(router, engine)
        assert (await ask(router)).status_code == 200
    deaf.close()
    for writer in open_end:
        writer.transport.abort()


_IN_SYNC = re.compile(r'^kvoy_router_engine_state\{.*state="exact"\} 1\.0$', re.MULTILINE)


async def test_a_router_process_as_a_pod_runs_it(scene: Scene, start_engine: StartEngine) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service)
    port, admin_port = free_port(), free_port()
    flags = f"--host 0.0.0.0 --port {port} --admin-port {admin_port} --kubernetes"
    flags += f" --fleet-file {scene.fleet_file} --policy kv-aware --drain-timeout-s 5"
    # On a busy machine the engines of this process may be late with their reports.
    flags += " --hang-timeout-s 60 --stale-after-s 60"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvoy_router", *flags.split(), "--log-format", "json",
        env=os.environ | {"KUBECONFIG": str(scene.kubeconfig)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        engines = await scene.start_engines(start_engine, "qwen-s-r1", service, 1)
        async with (
            asyncio.timeout(WAIT_S),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            await until_served(client)
        process.send_signal(signal.SIGTERM)
        told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()

    lines = [json.loads(line) for line in told.decode().splitlines()]
    assert process.returncode == 0
    events = [line["event"] for line in lines if line["event"] != "request"]
    assert sorted(events) == [
        "engine added",
        "fleet file read",
        "router drains",
        "router listens",
        "telemetry in sync",
    ]
    assert {line["engine"] for line in lines if line["event"] == "engine added"} == set(engines)
    assert service.secret.encode() not in told


async def until_served(client: httpx.AsyncClient) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200:
                return
        await asyncio.sleep(0.05)


async def until_in_sync(client: httpx.AsyncClient, admin_port: int) -> None:
    """An engine may well be asked before its first report has come."""
    while True:
        if _IN_SYNC.search((await client.get(f"http://127.0.0.1:{admin_port}/metrics")).text):
            return
        await asyncio.sleep(0.05)


async def test_the_admin_port_says_unready_while_streams_drain(
    scene: Scene, start_engine: StartEngine
) -> None:
    service = scene.add_service("qwen")
    scene.deploy("qwen-s-r1", service)
    gate = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack, httpx.AsyncClient(timeout=60) as admin:
        router = await stack.enter_async_context(scene.router(admin_port=free_port()))
        engines = await scene.start_engines(start_engine, "qwen-s-r1", service, 1)
        (engine,) = engines.values()
        await routable(router, engine)
        engine.script = Script(gate=gate)
        stream = asyncio.create_task(ask(router))
        await eventually(lambda: engine.in_flight == 1)
        assert router.admin_server is not None
        url = f"http://127.0.0.1:{router.admin_server.port}/ready"
        assert (await admin.get(url)).status_code == 200

        ending = asyncio.create_task(stack.aclose())
        await eventually(lambda: router.server.is_draining)
        unready = await admin.get(url)
        gate.set()
        await ending

        assert unready.status_code == 503
        assert (await stream).status_code == 200
