"""Keys, tenants, the queue and TLS in a whole router in front of fake engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvoy_cluster.pki import Authority
from kvoy_contract.testing import FakeEngine, Script
from kvoy_router.app import Router
from kvoy_router.config import RouterConfig
from kvoy_router.errors import BadFile
from kvoy_router.keys import cache_salt
from kvoy_router.testing import eventually, in_flight, is_routable, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BUSY = {"running": 1, "queued_prefill_tokens": 10_000_000}


def key_text(letter: str) -> str:
    return f"kvoy-{letter * 12}-{letter * 43}"


def entry(letter: str, tenant: str, /, **changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256(key_text(letter).encode()).hexdigest()
    return {"id": letter * 12, "hash": f"sha256:{digest}", "tenant": tenant} | {
        name.replace("_", "-"): value for name, value in changes.items()
    }


def write_keys(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text(json.dumps({"keys": entries}))
    return str(path)


def client_of(router: Router, letter: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key_text(letter)}"} if letter else {}
    url = f"http://127.0.0.1:{router.server.port}"
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60)


async def ask(router: Router, letter: str = "", body: Any = CHAT, **options: Any) -> httpx.Response:
    async with client_of(router, letter) as client:
        return await client.post("/v1/chat/completions", json=body, **options)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["type"], error["code"]


def value_of(router: Router, series: str) -> float | None:
    for line in router.metrics.expose().decode().splitlines():
        if line.startswith(series + " "):
            return float(line.rpartition(" ")[2])
    return None


async def make_busy(router: Router, engine: FakeEngine) -> None:
    """Until `engine.report_load(queued_prefill_tokens=0, running=0)` it has no room."""
    engine.report_load(**BUSY)
    endpoint = router.pool.endpoint(engine.address)
    assert endpoint is not None
    await eventually(lambda: endpoint.load is not None and endpoint.load.queued_prefill_tokens)


# Keys


async def test_without_a_key_nothing_but_health_is_answered(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", entry("a", "team-a"))
    engine = await start_engine()

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        refused = await ask(router)
        wrong = await ask(router, "b")
        async with client_of(router) as client:
            models = await client.get("/v1/models")
            tokens = await client.post("/tokenize", json={"prompt": "a"})
            health = await client.get("/health")
        answered = await ask(router, "a")

        assert error_of(refused) == (401, "authentication_error", "missing_api_key")
        assert error_of(wrong) == (401, "authentication_error", "invalid_api_key")
        assert models.status_code == tokens.status_code == 401
        assert health.status_code == answered.status_code == 200
        assert value_of(router, 'kvoy_router_unauthorized_total{code="invalid_api_key"}') == 1
    assert len(engine.requests) == 1


async def test_no_engine_sees_a_key_and_no_log_line_has_one(
    start_engine: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = write_keys(tmp_path / "keys", entry("a", "team-a"))
    engine = await start_engine(envelope=False)

    with caplog.at_level(logging.DEBUG):
        async with running_router([engine], keys_file=keys, admin_port=0) as router:
            await ask(router, "a", headers={"traceparent": "00-1-2-01"})
            await ask(router, "b")
            exposed = router.metrics.expose().decode()

    (request,) = engine.requests
    assert "authorization" not in request.headers
    assert request.headers["traceparent"] == "00-1-2-01"
    lines = [str(record.__dict__) for record in caplog.records]
    assert any("team-a" in line for line in lines)
    for letter in "ab":
        assert key_text(letter) not in exposed
        assert not [line for line in lines if key_text(letter) in line]


@pytest.mark.parametrize("has_envelope", [True, False])
async def test_a_tenant_salts_the_cache_and_cannot_name_anothers_salt(
    start_engine: StartEngine, tmp_path: Path, has_envelope: bool
) -> None:
    keys = write_keys(tmp_path / "keys", entry("a", "team-a"), entry("b", "team-b"))
    engine = await start_engine(envelope=has_envelope)

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        assert router.keys_file is not None
        team_a = router.keys_file.keyring.by_id["a" * 12]
        stolen = cache_salt(team_a, None)
        await ask(router, "a")
        await ask(router, "b")
        await ask(router, "b", CHAT | {"cache_salt": stolen})

    own, other, thief = (request.json() for request in engine.requests)
    assert own == CHAT | {"cache_salt": stolen}
    assert len({own["cache_salt"], other["cache_salt"], thief["cache_salt"]}) == 3


async def test_the_routers_hashes_have_the_salt_that_the_engine_is_told(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", entry("a", "team-a"), entry("b", "team-b"))
    engine = await start_engine()
    body = CHAT | {"messages": [{"role": "user", "content": "word " * 100}]}

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        await ask(router, "a", body)
        await ask(router, "a", body)
        await ask(router, "b", body)
        latest = router.dispatcher.decisions(None, 3)

    cached = [decision["cached_tokens"] for decision in reversed(latest)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


async def test_a_key_decides_the_priority_and_the_models(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    keys = write_keys(
        tmp_path / "keys", entry("a", "team-a", priority=4), entry("b", "team-b", models=["other"])
    )
    engine = await start_engine()

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        await ask(router, "a", CHAT | {"priority": -100})
        await ask(router, "a", CHAT | {"priority": 2})
        refused = await ask(router, "b")
        async with client_of(router, "b") as client:
            listed = await client.get("/v1/models")
            hidden = await client.get("/v1/models/m")

    envelopes = [request.envelope for request in engine.requests]
    assert [envelope.priority for envelope in envelopes if envelope] == [8, 12]
    assert all("priority" not in request.json() for request in engine.requests)
    assert error_of(refused) == (403, "permission_error", "model_not_allowed")
    assert listed.json()["data"] == []
    assert hidden.status_code == 404


async def test_limits_of_a_key_are_held_and_its_use_is_counted(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    keys = write_keys(
        tmp_path / "keys",
        entry("a", "team-a", requests_per_minute=2),
        entry("b", "team-b", tokens_per_minute=30),
    )
    engine = await start_engine()

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        for _ in range(2):
            assert (await ask(router, "a")).status_code == 200
        beyond = await ask(router, "a")
        long = CHAT | {"messages": [{"role": "user", "content": "x" * 100}]}
        assert (await ask(router, "b", long)).status_code == 200
        spent = await ask(router, "b")

        assert error_of(beyond) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert error_of(spent) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert 20 < int(beyond.headers["retry-after"]) <= 30
        assert int(spent.headers["retry-after"]) > 100
        labels = 'tenant="team-a"'
        prompt = value_of(router, f'kvoy_router_tenant_prompt_tokens_total{{model="m",{labels}}}')
        output = value_of(router, f'kvoy_router_tenant_output_tokens_total{{model="m",{labels}}}')
    assert prompt == 2 * engine.requests[0].envelope.token_ids.__len__() // 4  # type: ignore[union-attr]
    assert output == 2 * 3


async def test_changed_keys_count_at_once_and_a_bad_file_changes_nothing(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    keys = write_keys(path, entry("a", "team-a"))
    engine = await start_engine()

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        assert router.keys_file is not None
        assert (await ask(router, "a")).status_code == 200
        write_keys(path, entry("b", "team-b"))
        router.keys_file.check()
        assert (await ask(router, "a")).status_code == 401
        assert (await ask(router, "b")).status_code == 200
        assert "team-a" not in router.metrics.expose().decode()
        assert value_of(router, "kvoy_router_keys_file_ok") == 1

        path.write_text("keys: 1")
        router.keys_file.check()
        assert (await ask(router, "b")).status_code == 200
        assert value_of(router, "kvoy_router_keys_file_ok") == 0


async def test_a_router_does_not_start_with_a_bad_keys_file(tmp_path: Path) -> None:
    config = RouterConfig(engine=("h:1",), keys_file=str(tmp_path / "none"), admin_port=1)

    with pytest.raises(BadFile, match="none"):
        Router(config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"keys_file": "f"}, "keys_file"),
        ({"tls_key": "f"}, "tls_certificate"),
        ({"objective": ("batch",)}, "objective"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"shared_wait": 1.5}, "shared_wait"),
        ({"aged_share": 0.0}, "aged_share"),
        ({"max_engine_wait_s": 0.0}, "max_engine_wait_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RouterConfig(engine=("h:1",), **settings)


# The queue


async def test_a_request_waits_for_room_and_goes_on_when_there_is_some(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        await make_busy(router, engine)
        task = asyncio.create_task(ask(router))
        await eventually(lambda: router.gate.flow.num_waiting == 1)
        queued = 'kvoy_router_queued_requests{model="m",priority="normal"}'
        assert value_of(router, queued) == 1
        assert engine.requests == []

        engine.report_load(queued_prefill_tokens=0, running=0)
        assert (await task).status_code == 200
        assert value_of(router, queued) == 0
        assert value_of(router, 'kvoy_router_queue_wait_seconds_count{model="m"}') == 1


async def test_a_dead_engine_is_no_room_for_what_a_busy_one_makes_wait(
    start_engine: StartEngine,
) -> None:
    busy, dead = await start_engine(), await start_engine()

    async with running_router([busy, dead]) as router:
        await make_busy(router, busy)
        await dead.stop_telemetry()
        await dead.stop_http()
        await eventually(lambda: not is_routable(router.pool, dead.address))
        task = asyncio.create_task(ask(router))
        await eventually(lambda: router.gate.flow.num_waiting == 1)
        assert busy.requests == []

        busy.report_load(queued_prefill_tokens=0, running=0)
        assert (await task).status_code == 200


async def test_beyond_the_bound_exactly_those_beyond_it_are_refused(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine], max_waiting=10) as router:
        await make_busy(router, engine)
        tasks = [asyncio.create_task(ask(router)) for _ in range(30)]
        await eventually(lambda: sum(task.done() for task in tasks) == 20)
        refused = [task.result() for task in tasks if task.done()]
        assert {error_of(answer) for answer in refused} == {(429, "rate_limit_error", "queue_full")}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)

        engine.report_load(queued_prefill_tokens=0, running=0)
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers].count(200) == 10
        assert router.gate.flow.num_waiting == 0
        assert in_flight(router) == [0]


async def test_who_waited_too_long_is_told_to_come_again(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with running_router([engine], max_waiting_s=0.2) as router:
        await make_busy(router, engine)
        answer = await ask(router)

    assert error_of(answer) == (429, "rate_limit_error", "waited_too_long")
    assert "retry-after" in answer.headers


async def test_a_client_that_goes_while_it_waits_leaves_the_queue(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        await make_busy(router, engine)
        task = asyncio.create_task(ask(router))
        await eventually(lambda: router.gate.flow.num_waiting == 1)
        task.cancel()
        await eventually(lambda: router.gate.flow.num_waiting == 0)

    assert engine.requests == []


async def test_requests_are_held_for_the_first_engine_and_then_encoded_as_it_does(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = await start_engine()
    port = engine.telemetry_address.rpartition(":")[2]
    file = tmp_path / "engines"
    file.write_text("engines: []")
    settings: dict[str, Any] = {"engine": (), "engines_file": str(file), "model": ("m",)}

    async with running_router([], wait=False, max_held_s=30.0, **settings) as router:
        task = asyncio.create_task(ask(router))
        await eventually(lambda: router.gate.flow.num_waiting == 1)
        file.write_text(f"engines: ['{engine.address}@{port}']")
        answer = await asyncio.wait_for(task, 30)

    assert answer.status_code == 200
    (request,) = engine.requests
    assert request.envelope is not None
    assert request.envelope.token_ids


async def test_holding_is_bounded_in_number_and_time(start_engine: StartEngine) -> None:
    settings: dict[str, Any] = {"model": ("m",), "max_held": 1, "max_held_s": 1.5}
    async with running_router([], wait=False, **settings) as router:
        router.pool.remove_endpoint("127.0.0.1:9")
        task = asyncio.create_task(ask(router))
        await eventually(lambda: router.gate.flow.num_waiting == 1)

        assert error_of(await ask(router)) == (503, "server_error", "unavailable")
        assert error_of(await task) == (503, "server_error", "unavailable")


async def test_tenants_of_a_gateways_headers_share_by_tokens_and_no_engine_sees_the_headers(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(envelope=False)
    fairness, objective = "x-llm-d-inference-fairness-id", "x-gateway-inference-objective"

    async with running_router([engine], objective=("urgent=-5",)) as router:
        await make_busy(router, engine)
        tasks = []
        for tenant, name in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "urgent")):
            headers = {fairness: tenant, objective: name} | dict.fromkeys(OTHER_OF_GATEWAYS, "1")
            body = CHAT | {"user": f"{tenant} {name}"}
            tasks.append(asyncio.create_task(ask(router, body=body, headers=headers)))
            await eventually(lambda: router.gate.flow.num_waiting == len(tasks))
        engine.report_load(queued_prefill_tokens=0, running=0)
        await asyncio.gather(*tasks)

    order = [request.json()["user"] for request in engine.requests]
    assert order == ["a urgent", "a x", "b x", "a x"]
    for request in engine.requests:
        assert not [n for n in request.headers if n.startswith(("x-llm-d-", "x-gateway-"))]


OTHER_OF_GATEWAYS = (
    "x-llm-d-slo-ttft-ms",
    "x-llm-d-slo-tpot-ms",
    "x-llm-d-model-name-rewrite",
    "x-gateway-model-name-rewrite",
    "x-gateway-destination-endpoint",
)


async def test_with_keys_a_gateways_headers_say_nothing_and_reach_no_engine(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = await start_engine(envelope=False)
    keys = write_keys(tmp_path / "keys.yaml", entry("a", "team-a"))
    names = ("fairness-id", "objective")
    headers = {f"x-{brand}-inference-{n}": "other" for brand in ("llm-d", "gateway") for n in names}

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        answer = await ask(router, "a", headers=headers | dict.fromkeys(OTHER_OF_GATEWAYS, "1"))
        used = value_of(
            router,
            'kvoy_router_tenant_requests_total{model="m",outcome="ok",tenant="team-a"}',
        )

    assert answer.status_code == 200
    assert used == 1
    (request,) = engine.requests
    assert not [n for n in request.headers if n.startswith(("x-llm-d-", "x-gateway-"))]


async def test_a_request_that_no_engine_could_serve_is_not_counted_against_its_key(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("a", "team-a", requests_per_minute=1))
    engine = await start_engine()

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        engine.report_load(ready=False)
        await eventually(lambda: not is_routable(router.pool, engine.address))
        away = [await ask(router, "a") for _ in range(3)]
        engine.report_load(ready=True)
        await eventually(lambda: is_routable(router.pool, engine.address))
        served, beyond = await ask(router, "a"), await ask(router, "a")

    assert [error_of(answer)[0] for answer in away] == [503] * 3
    assert served.status_code == 200
    assert error_of(beyond) == (429, "rate_limit_error", "rate_limit_exceeded")


async def test_a_retry_takes_no_second_turn(start_engine: StartEngine) -> None:
    engines = [await start_engine() for _ in range(2)]
    for engine in engines:
        engine.scripts.append(Script(status=503, body=b"{}"))

    async with running_router(engines) as router:
        await ask(router)

        assert router.gate.flow.num_waiting == 0
        assert all(queue.is_idle for _, queue in router.gate.flow.queues())


# TLS


async def test_the_main_port_speaks_tls_where_it_has_a_certificate(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    authority = Authority("test")
    authority.sign("router", hosts=["127.0.0.1"]).write(tmp_path / "tls")
    (tmp_path / "ca.crt").write_bytes(authority.pair.certificate_pem)
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    engine = await start_engine()
    settings: dict[str, Any] = {
        "tls_certificate": str(tmp_path / "tls.crt"),
        "tls_key": str(tmp_path / "tls.key"),
    }

    async with running_router([engine], **settings) as router:
        url = f"https://127.0.0.1:{router.server.port}"
        async with httpx.AsyncClient(base_url=url, verify=trust, timeout=60) as client:
            whole = await client.post("/v1/chat/completions", json=CHAT)
            stream = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert value_of(router, "kvoy_router_certificate_ok") == 1

    assert whole.status_code == 200
    assert stream.text.endswith("data: [DONE]\n\n")


async def test_a_large_body_without_a_right_key_is_refused_before_it_comes(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", entry("a", "team-a"))
    engine = await start_engine()

    async with running_router([engine], keys_file=keys, admin_port=0) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        )
        async with asyncio.timeout(60):
            refusal = await reader.read()
        writer.close()
        long = CHAT | {"messages": [{"role": "user", "content": "x" * 100_000}]}
        answer = await ask(router, "a", long)
        refused = value_of(router, 'kvoy_router_unauthorized_total{code="missing_api_key"}')

    assert b"HTTP/1.1 401 " in refusal
    assert b"missing_api_key" in refusal
    assert answer.json()["error"]["code"] == "context_length_exceeded", "it was read"
    assert refused == 1
