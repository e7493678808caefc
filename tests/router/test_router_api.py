"""The router's routes: models, tokens, health, debug, metrics, and bad input of every kind."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from kvoy_contract.prompt import PromptEncoder
from kvoy_contract.testing import FakeEngine, Script
from kvoy_router.app import Router
from kvoy_router.testing import eventually, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def url_of(router: Router) -> str:
    return f"http://127.0.0.1:{router.server.port}"


async def call(router: Router, method: str, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url_of(router), timeout=60) as client:
        return await client.request(method, path, **options)


async def test_models_are_merged_over_engines_and_aliases(start_engine: StartEngine) -> None:
    engines = [
        await start_engine(model="big", max_model_len=100),
        await start_engine(model="big", max_model_len=200),
        await start_engine(model="org/small", aliases=("s",)),
    ]

    async with running_router(engines, model=("sleeping",)) as router:
        listed = (await call(router, "GET", "/v1/models")).json()
        one = (await call(router, "GET", "/v1/models/org/small")).json()
        missing = await call(router, "GET", "/v1/models/nope")

    assert listed["object"] == "list"
    assert {card["id"] for card in listed["data"]} == {"big", "org/small", "s", "sleeping"}
    assert {card["id"]: card["max_model_len"] for card in listed["data"]}["big"] == 200
    assert one["id"] == "org/small"
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_each_model_is_answered_by_its_own_engines(start_engine: StartEngine) -> None:
    one, other = await start_engine(model="one"), await start_engine(model="other")

    async with running_router([one, other]) as router:
        for _ in range(3):
            await call(router, "POST", "/v1/chat/completions", json=CHAT | {"model": "other"})

    assert (len(one.requests), len(other.requests)) == (0, 3)


async def test_a_declared_model_without_engines_is_unavailable_and_others_unknown(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine], model=("m1",)) as router:
        declared = await call(router, "POST", "/v1/chat/completions", json=CHAT | {"model": "m1"})
        unknown = await call(router, "POST", "/v1/chat/completions", json=CHAT | {"model": "nope"})

    assert declared.status_code == 503
    assert int(declared.headers["retry-after"]) >= 1
    assert declared.json()["error"]["code"] == "unavailable"
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


async def test_without_any_ready_engine_requests_get_503_and_a_retry_after(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        engine.report_load(ready=False)
        await eventually(lambda: router.pool.endpoints[0].load.ready is False)  # type: ignore[union-attr]
        answer = await call(router, "POST", "/v1/chat/completions", json=CHAT)
        ready = await call(router, "GET", "/ready")
        health = await call(router, "GET", "/health")

    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert ready.status_code == 503
    assert health.status_code == 200


async def test_tokenize_and_detokenize_are_answered_by_the_router(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        plain = await call(router, "POST", "/tokenize", json={"prompt": "ab"})
        chat = await call(router, "POST", "/tokenize", json=CHAT | {"return_token_strs": True})
        back = await call(router, "POST", "/detokenize", json={"model": "m", "tokens": [97, 98]})
        bad = await call(router, "POST", "/detokenize", json={"model": "m", "tokens": [99999]})

    assert plain.json()["tokens"] == [97, 98]
    assert chat.json()["count"] == len(chat.json()["token_strs"])
    assert back.json() == {"prompt": "ab"}
    assert bad.status_code == 400
    assert engine.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("OPTIONS", "/v1/completions", 204),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/health", 200),
        ("GET", "/v1/nothing", 404),
        ("POST", "/metrics", 405),
        ("GET", "/docs", 200),
        ("GET", "/openapi.json", 200),
    ],
)
async def test_methods_and_paths_are_answered_properly(
    start_engine: StartEngine, method: str, path: str, status: int
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        answer = await call(router, method, path)

    assert answer.status_code == status
    if status == 405:
        assert ("GET" if path == "/metrics" else "OPTIONS") in answer.headers["allow"]
    if status >= 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'{"model":"m"}', "messages"),
        (b'{"model":5,"messages":[]}', "model"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":0}', "n"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"cache_salt":5}', "cache_salt"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{}]}', "tools"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"resume":{}}', "resume"),
        (
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"kv_transfer_params":{}}',
            "kv_transfer_params",
        ),
        (
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":'
            + b'{"a":' * 900
            + b"1"
            + b"}" * 901,
            "chat_template_kwargs",
        ),
        (b'{"model":"m","messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}", None),
        (b"\xff\xfe{}", None),
    ],
)
async def test_a_bad_body_is_refused_by_name_before_it_reaches_an_engine(
    start_engine: StartEngine, body: bytes, param: str | None
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        answer = await call(
            router,
            "POST",
            "/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
        after = await call(router, "POST", "/v1/chat/completions", json=CHAT)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    if param is not None:
        assert answer.json()["error"]["param"] == param
    assert after.status_code == 200
    assert len(engine.requests) == 1


async def test_a_prompt_longer_than_any_context_is_refused(start_engine: StartEngine) -> None:
    engine = await start_engine(max_model_len=64)
    long = CHAT | {"messages": [{"role": "user", "content": "a" * 500}]}

    async with running_router([engine]) as router:
        answer = await call(router, "POST", "/v1/chat/completions", json=long)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("num_tokens", [65, 200, 100_000])
async def test_too_many_token_ids_are_refused_by_the_name_of_their_field(
    start_engine: StartEngine, num_tokens: int
) -> None:
    engine = await start_engine(max_model_len=64)

    async with running_router([engine]) as router:
        body = {"model": "m", "prompt": [1] * num_tokens}
        answer = await call(router, "POST", "/v1/completions", json=body)

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"{num_tokens} tokens" in error["message"]


@pytest.mark.parametrize("longest_first", [True, False])
async def test_the_longest_context_of_a_models_engines_counts(
    start_engine: StartEngine, longest_first: bool
) -> None:
    lengths = sorted((64, 512), reverse=longest_first)
    engines = [await start_engine(max_model_len=length) for length in lengths]

    async with running_router(engines) as router:
        body = {"model": "m", "prompt": [1] * 400, "max_tokens": 1}
        answers = [await call(router, "POST", "/v1/completions", json=body) for _ in range(3)]

    longest = engines[lengths.index(512)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert {answer.headers["x-kvoy-engine"] for answer in answers} == {longest.address}


@pytest.mark.slow
async def test_a_long_prompt_does_not_hold_up_other_answers(start_engine: StartEngine) -> None:
    engine = await start_engine(max_model_len=10_000_000, num_blocks=1_000_000)
    long = CHAT | {"messages": [{"role": "user", "content": "a b c " * 500_000}]}

    async with running_router([engine]) as router:
        asking = asyncio.create_task(call(router, "POST", "/v1/chat/completions", json=long))
        num_answers = 0
        while not asking.done():
            assert (await call(router, "GET", "/health")).status_code == 200
            num_answers += 1
        answer = await asking

    assert answer.status_code == 200
    assert num_answers >= 3


async def test_texts_to_tokenise_do_not_hold_up_prompts(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    begun = []

    def wait(*arguments: object) -> list[int]:
        begun.append(arguments)
        go_on.wait(30)
        return [65]

    monkeypatch.setattr(PromptEncoder, "encode_text", wait)
    long = CHAT | {"messages": [{"role": "user", "content": "a" * 5000}]}

    async with running_router([await start_engine()]) as router:
        body = {"prompt": "a" * 5000}
        tokenising = [
            asyncio.create_task(call(router, "POST", "/tokenize", json=body)) for _ in range(4)
        ]
        await eventually(lambda: router.server.num_connections == 4 and begun)
        answer = await call(router, "POST", "/v1/chat/completions", json=long)
        go_on.set()
        await asyncio.gather(*tokenising)

    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/tokenize", {"prompt": "a" * 5000, "return_token_strs": True}, "token_text"),
        ("/tokenize", {"prompt": "a" * 5000}, "encode_text"),
        ("/detokenize", {"tokens": [65] * 5000}, "decode"),
    ],
)
async def test_long_texts_are_tokenised_beside_the_event_loop(
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    work: str,
) -> None:
    threads = set()
    original = getattr(PromptEncoder, work)

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return original(*arguments, **options)

    monkeypatch.setattr(PromptEncoder, work, noted)
    async with running_router([await start_engine()]) as router:
        answer = await call(router, "POST", path, json=body)

    assert answer.status_code == 200
    assert threads
    assert threading.get_ident() not in threads


async def test_cache_salts_keep_tenants_apart(start_engine: StartEngine) -> None:
    engine = await start_engine()
    prompt = {"model": "m", "prompt": "a" * 640}

    async with running_router([engine]) as router:
        for salt in ("t1", "t2", None, "t1"):
            body = prompt | ({"cache_salt": salt} if salt else {})
            await call(router, "POST", "/v1/completions", json=body)
        decisions = (await call(router, "GET", "/debug/decisions")).json()["decisions"]

    predicted = [decision["cached_tokens"] for decision in reversed(decisions)]
    assert predicted == [0, 0, 0, 640]


async def test_debug_routes_show_engines_and_decisions(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        for request_id in ("r1", "r2"):
            await call(
                router,
                "POST",
                "/v1/chat/completions",
                json=CHAT,
                headers={"x-request-id": request_id},
            )
        engines = (await call(router, "GET", "/debug/engines")).json()
        one = (await call(router, "GET", "/debug/decisions?request_id=r1")).json()
        both = (await call(router, "GET", "/debug/decisions")).json()
        bad = await call(router, "GET", "/debug/decisions?limit=x")

    (shown,) = engines["engines"]
    assert shown["address"] == engine.address
    assert shown["epoch"] == engine.description.epoch.hex()
    assert shown["knowledge"] == "exact"
    assert shown["routable"] is True
    assert [decision["request_id"] for decision in one["decisions"]] == ["r1"]
    assert [decision["request_id"] for decision in both["decisions"]] == ["r2", "r1"]
    assert one["decisions"][0]["candidates"][0]["endpoint_id"] == engine.address
    assert bad.status_code == 422


async def test_an_admin_port_takes_the_debug_routes_away_from_the_main_port(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine], admin_port=0) as router:
        assert router.admin_server is not None
        admin = f"http://127.0.0.1:{router.admin_server.port}"
        for path in ("/metrics", "/debug/engines", "/debug/decisions", "/docs"):
            assert (await call(router, "GET", path)).status_code == 404
            assert (await call(router, "GET", admin + path)).status_code == 200
        for base in (url_of(router), admin):
            assert (await call(router, "GET", f"{base}/health")).status_code == 200
            assert (await call(router, "GET", f"{base}/ready")).status_code == 200
        assert (await call(router, "GET", f"{admin}/v1/models")).status_code == 404


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_metrics_count_what_happened(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.script = Script(cached_tokens=5)

    async with running_router([engine]) as router:
        await call(router, "POST", "/v1/chat/completions", json=CHAT)
        await call(router, "POST", "/v1/chat/completions", json=CHAT | {"stream": True})
        await call(router, "POST", "/v1/chat/completions", json=CHAT | {"model": "free text"})
        engine.scripts.append(Script(status=500))
        await call(router, "POST", "/v1/chat/completions", json=CHAT)
        text = (await call(router, "GET", "/metrics")).text

    found = samples(text)
    requests = "kvoy_router_requests_total"
    assert found[f'{requests}{{model="m",outcome="ok",status="200"}}'] == 2
    assert found[f'{requests}{{model="",outcome="model_not_found",status="404"}}'] == 1
    assert found['kvoy_router_cached_tokens_total{model="m"}'] == 10
    name = f'kvoy_router_engine_failures_total{{engine="{engine.address}",model="m"'
    assert found[f'{name},reason="status_500"}}'] == 1
    assert found[f'kvoy_router_engine_in_flight{{engine="{engine.address}",service=""}}'] == 0
    labels = f'engine="{engine.address}",service="",state="exact"'
    assert found[f"kvoy_router_engine_state{{{labels}}}"] == 1
    assert found["kvoy_router_requests_in_flight"] == 0
    assert "free text" not in text


async def test_each_request_is_logged_once_without_its_prompt(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine()
    secret_chat = CHAT | {"messages": [{"role": "user", "content": "TOPSECRET"}]}

    with caplog.at_level(logging.DEBUG):
        async with running_router([engine]) as router:
            await call(
                router,
                "POST",
                "/v1/chat/completions",
                json=secret_chat,
                headers={"x-request-id": "abc"},
            )

    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields = record.__dict__
    assert (fields["request_id"], fields["engine"], fields["status"]) == (
        "abc",
        engine.address,
        200,
    )
    assert fields["ttft_s"] <= fields["duration_s"]
    assert "TOPSECRET" not in json.dumps([r.__dict__ for r in caplog.records], default=str)


@pytest.mark.parametrize("request_id", ["a b", "x" * 200, ""])
async def test_a_request_id_that_is_not_printable_and_short_is_replaced(
    start_engine: StartEngine, request_id: str
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        answer = await call(
            router,
            "POST",
            "/v1/chat/completions",
            json=CHAT,
            headers={"x-request-id": request_id},
        )

    assert answer.headers["x-request-id"].startswith("req-")


async def test_the_official_client_works_through_the_router(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with (
        running_router([engine]) as router,
        openai.AsyncOpenAI(
            base_url=f"{url_of(router)}/v1",
            api_key="k",
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        models = [model.id async for model in client.models.list()]
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], n=1000
            )

    assert models == ["m"]
    assert answer.choices[0].message.content == "Hello world!"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello world!"
    assert chunks[-1].usage is not None
    assert missing.value.code == "model_not_found"
    assert bad.value.param == "n"


async def test_a_popular_prefix_spreads_instead_of_queueing_at_one_engine(
    start_engine: StartEngine,
) -> None:
    engines = [await start_engine(max_num_seqs=8, num_blocks=20_000) for _ in range(4)]
    for engine in engines:
        engine.script = Script(delay_s=0.2)
        engine.load.prefill_tokens_per_s = 20_000
    system = {"role": "system", "content": "You are helpful. " * 180}

    async with (
        running_router(engines, policy="kv-aware") as router,
        httpx.AsyncClient(base_url=url_of(router), timeout=30, limits=httpx.Limits()) as client,
    ):

        async def one(index: int) -> None:
            user = {"role": "user", "content": f"question {index}"}
            answer = await client.post(
                "/v1/chat/completions",
                json={"model": "m", "messages": [system, user], "max_tokens": 20},
            )
            assert answer.status_code == 200

        await asyncio.gather(*(one(index) for index in range(100)))

    counts = [len(engine.requests) for engine in engines]
    assert sum(counts) == 100
    assert max(counts) <= 50, counts


async def test_churn_of_prompts_and_engines_leaves_nothing_behind(
    start_engine: StartEngine,
) -> None:
    engine, other = await start_engine(num_blocks=20_000), await start_engine()

    async with running_router([engine, other]) as router:
        async with httpx.AsyncClient(base_url=url_of(router), timeout=30) as client:
            for index in range(100):
                prompt = "shared " * 30 + f"{index} " * 100
                await client.post("/v1/completions", json={"model": "m", "prompt": prompt})
        router.fleet.apply([])

        assert len(router.pool.endpoints) == 0
        assert len(router.pool.assumed) == 0
        assert router.memory.bodies.used_bytes == 0
        assert engine.address not in router.metrics.expose().decode()
        router.pool.check_integrity()
