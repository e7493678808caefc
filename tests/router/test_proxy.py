"""The byte path in front of fake engines: what arrives, what is retried, what a client sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvoy_contract.blocks import unpack_tokens
from kvoy_contract.testing import FakeEngine, Fault, Script
from kvoy_router.app import Router
from kvoy_router.testing import eventually, hurry, in_flight, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = CHAT | {"stream": True}


def client_of(router: Router) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.server.port}", timeout=60)


async def ask(router: Router, body: Any = CHAT, **options: Any) -> httpx.Response:
    async with client_of(router) as client:
        return await client.post("/v1/chat/completions", json=body, **options)


def events_of(text: str) -> list[Any]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


def texts_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        if "choices" in chunk
        for choice in chunk["choices"]
    )


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


async def test_a_plain_answer_comes_whole_with_the_engine_and_its_cached_tokens(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.script = Script(cached_tokens=16)

    async with running_router([engine]) as router:
        answer = await ask(router, headers={"x-request-id": "abc-1"})

        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "Hello world!"
        assert answer.headers["x-kvoy-engine"] == engine.address
        assert answer.headers["x-kvoy-cached-tokens"] == "16"
        assert answer.headers["x-request-id"] == "abc-1"
        assert in_flight(router) == [0]


async def test_a_stream_is_passed_on_byte_for_byte(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.script = Script(pieces=("a", "é🦙", "c"), gap_s=0.01)

    async with running_router([engine]) as router:
        answer = await ask(router, STREAM | {"stream_options": {"include_usage": True}})

    events = events_of(answer.text)
    assert answer.headers["content-type"] == "text/event-stream"
    assert texts_of(events) == "aé🦙c"
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 3


async def test_the_router_tokenises_once_and_hands_the_ids_to_the_engine(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        async with client_of(router) as client:
            await client.post("/v1/completions", json={"model": "m", "prompt": "abc", "seed": 7})
            await client.post("/v1/completions", json={"model": "m", "prompt": "abc"})
            await client.post("/v1/completions", json={"model": "m", "prompt": ["a", "b"]})
        first, second, several = (request.envelope for request in engine.requests)

        assert first is not None
        assert second is not None
        assert several is not None
        assert first.router_id == router.pool.router_id
    assert list(unpack_tokens(first.token_ids)) == [97, 98, 99]
    assert first.tokenizer_digest == engine.tokenizer.digest
    assert engine.requests[0].json() == {"model": "m", "prompt": "abc", "seed": 7}
    assert (first.number, second.number, several.number) == (1, 2, 3)
    assert second.settled_through == 1
    assert first.seed is None
    assert second.seed is not None
    assert several.token_ids == b""


async def test_engines_without_the_envelope_get_the_clients_own_body(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(envelope=False, engine_kind="vllm")

    async with running_router([engine]) as router:
        answer = await ask(router)

    assert answer.status_code == 200
    assert engine.requests[0].envelope is None
    assert engine.requests[0].json() == CHAT
    assert "x-kvoy-secret" not in engine.requests[0].headers


async def test_the_header_switch_turns_both_headers_off(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async with running_router([engine], response_headers=False) as router:
        answer = await ask(router)

    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-kvoy-")]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-kvoy-secret": "guess"},
        {"X-KVOY-Anything": "1"},
        {"content-type": "application/vnd.kvoy.request"},
        {"content-type": "text/plain"},
        {"content-encoding": "gzip"},
    ],
)
async def test_a_client_cannot_speak_as_a_router(
    start_engine: StartEngine, headers: dict[str, str]
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router, client_of(router) as client:
        answer = await client.post(
            "/v1/chat/completions",
            content=json.dumps(CHAT),
            headers={"content-type": "application/json"} | headers,
        )

    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"
    assert engine.requests == []


SHORT_S = 0.2
"""For engines that hang: much longer would only make the tests last."""

BEFORE_THE_FIRST_BYTE = [
    Script(fault=Fault.CLOSE_BEFORE_HEAD),
    Script(fault=Fault.RESET_BEFORE_HEAD),
    Script(fault=Fault.HANG_BEFORE_HEAD),
    Script(fault=Fault.NOT_HTTP),
    Script(fault=Fault.RESET_AFTER_HEAD),
    Script(fault=Fault.EMPTY_BODY),
    Script(status=500, body=b'{"error":{"message":"broken"}}'),
    Script(status=500, body=b"<html>oops</html>"),
    Script(status=503, body=b""),
    Script(status=429, body=b'{"error":{"message":"full"}}', headers=(("retry-after", "3"),)),
]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("script", BEFORE_THE_FIRST_BYTE, ids=lambda s: f"{s.fault}-{s.status}")
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(
    start_engine: StartEngine, script: Script, body: Any
) -> None:
    bad, good = await start_engine(), await start_engine()
    bad.script = script

    async with running_router([bad, good]) as router:
        hurry(router, bad.address, SHORT_S if script.fault is Fault.HANG_BEFORE_HEAD else 60.0)
        answers = [await ask(router, body) for _ in range(2)]

        assert [answer.status_code for answer in answers] == [200, 200]
        assert {answer.headers["x-kvoy-engine"] for answer in answers} == {good.address}
        assert len(bad.requests) >= 1
        assert in_flight(router) == [0, 0]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(fault=Fault.CLOSE_BEFORE_HEAD), 502),
        (Script(fault=Fault.RESET_BEFORE_HEAD), 502),
        (Script(fault=Fault.HANG_BEFORE_HEAD), 504),
        (Script(fault=Fault.NOT_HTTP), 502),
        (Script(fault=Fault.RESET_AFTER_HEAD), 502),
        (Script(fault=Fault.EMPTY_BODY), 502),
        (Script(status=500, body=b'{"error":{"message":"broken"}}'), 502),
        (Script(status=500, body=b"<html>oops</html>"), 502),
        (Script(status=302, body=b"", headers=(("location", "http://x/"),)), 502),
        (Script(status=403, body=b'{"error":{"message":"secret"}}'), 502),
    ],
)
async def test_a_failure_without_another_engine_is_an_error_object(
    start_engine: StartEngine, script: Script, status: int, body: Any
) -> None:
    engine = await start_engine()
    engine.script = script

    async with running_router([engine]) as router:
        hurry(router, engine.address, SHORT_S if script.fault is Fault.HANG_BEFORE_HEAD else 60.0)
        answer = await ask(router, body)

        assert answer.status_code == status
        assert error_of(answer)["message"]
        assert in_flight(router) == [0]


async def test_a_plain_answer_may_take_longer_than_a_streams_first_byte(
    start_engine: StartEngine,
) -> None:
    slow, other = await start_engine(), await start_engine()
    slow.script = other.script = Script(delay_s=0.3)

    async with running_router([slow, other], first_byte_timeout_s=0.1) as router:
        answer = await ask(router, CHAT)

        assert answer.status_code == 200
        assert len(slow.requests) + len(other.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engines_saturation_is_passed_on_with_its_retry_after(
    start_engine: StartEngine, status: int
) -> None:
    engine = await start_engine()
    error = (
        b'{"error":{"message":"full","type":"rate_limit_error","param":null,"code":"saturated"}}'
    )
    engine.script = Script(status=status, body=error, headers=(("retry-after", "3"),))

    async with running_router([engine]) as router:
        answers = [await ask(router, CHAT), await ask(router, STREAM)]

    for answer in answers:
        assert answer.status_code == status
        assert answer.headers["retry-after"] == "3"
        assert error_of(answer)["code"] == "saturated"


async def test_an_engines_refusal_of_the_request_is_passed_on_and_not_retried(
    start_engine: StartEngine,
) -> None:
    engines = [await start_engine(), await start_engine()]
    error = b'{"error":{"message":"no","type":"invalid_request_error","param":"n","code":null}}'
    for engine in engines:
        engine.script = Script(status=400, body=error)

    async with running_router(engines) as router:
        answer = await ask(router)

    assert answer.status_code == 400
    assert error_of(answer)["param"] == "n"
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_retries_are_bounded(start_engine: StartEngine) -> None:
    engines = [await start_engine() for _ in range(4)]
    for engine in engines:
        engine.script = Script(fault=Fault.CLOSE_BEFORE_HEAD)

    async with running_router(engines, max_retries=1) as router:
        answer = await ask(router)

    assert answer.status_code == 502
    assert sum(len(engine.requests) for engine in engines) == 2


async def test_a_refused_connection_is_retried_elsewhere(start_engine: StartEngine) -> None:
    bad, good = await start_engine(), await start_engine()

    async with running_router([bad, good]) as router:
        await bad.stop_http()
        answers = [await ask(router) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]


async def test_an_engine_that_cannot_be_reached_is_unavailability(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        await engine.stop_http()
        answer = await ask(router)

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert error_of(answer)["code"] == "unavailable"


async def test_a_plain_answer_that_breaks_off_is_asked_for_again_elsewhere(
    start_engine: StartEngine,
) -> None:
    bad, good = await start_engine(), await start_engine()
    bad.script = Script(fault=Fault.CUT)

    async with running_router([bad, good]) as router:
        answers = [await ask(router) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"][0]["message"]["content"] == "Hello world!"


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.HANG])
async def test_an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error_event(
    start_engine: StartEngine, fault: Fault
) -> None:
    engines = [await start_engine(), await start_engine()]
    for engine in engines:
        engine.script = Script(pieces=("a", "b", "c"), fault=fault, fault_after=2)

    async with running_router(engines, idle_timeout_s=0.2) as router:
        answer = await ask(router, STREAM)

        assert in_flight(router) == [0, 0]
    *good, last = events_of(answer.text)
    assert answer.status_code == 200
    assert texts_of(good) == "ab"
    assert json.loads(last)["error"]["code"] in ("upstream_error", "engine_timeout")
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_a_stream_without_its_end_mark_is_told_as_an_error(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.script = Script(
        body=b'data: {"choices":[]}\n\ndata: {"half',
        headers=(("content-type", "text/event-stream"),),
    )

    async with running_router([engine]) as router:
        answer = await ask(router, STREAM)

    first, last = events_of(answer.text)
    assert json.loads(first) == {"choices": []}
    assert json.loads(last)["error"]["code"] == "upstream_error"


async def test_an_error_event_of_the_engine_is_not_followed_by_another(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.script = Script(
        body=b'data: {"choices":[]}\n\ndata: {"error":{"message":"nan"}}\n\n',
        headers=(("content-type", "text/event-stream"),),
    )

    async with running_router([engine]) as router:
        answer = await ask(router, STREAM)

    assert len(events_of(answer.text)) == 2


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_a_request_past_its_deadline_ends_with_504(
    start_engine: StartEngine, body: Any
) -> None:
    engine = await start_engine()
    engine.script = Script(fault=Fault.HANG_BEFORE_HEAD)

    async with running_router([engine], request_timeout_s=1.5) as router:
        answer = await ask(router, body)

        assert answer.status_code == 504
        assert error_of(answer)["code"] == "deadline_exceeded"
        await eventually(lambda: engine.num_aborted == 1)
        assert in_flight(router) == [0]


async def test_a_stream_past_its_deadline_ends_with_an_error_event(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    engine.script = Script(pieces=("a", "b"), fault=Fault.HANG)

    async with running_router([engine], request_timeout_s=2.0) as router:
        answer = await ask(router, STREAM)

    assert json.loads(events_of(answer.text)[-1])["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_a_client_that_leaves_cancels_the_engines_work_at_once(
    start_engine: StartEngine, body: Any
) -> None:
    engine = await start_engine()
    engine.script = Script(fault=Fault.HANG_BEFORE_HEAD)

    async with running_router([engine]) as router:
        asking = [asyncio.create_task(ask(router, body)) for _ in range(5)]
        await eventually(lambda: engine.in_flight == 5)
        for task in asking:
            task.cancel()

        await eventually(lambda: engine.num_aborted == 5)
        await eventually(lambda: in_flight(router) == [0])


async def test_a_client_that_leaves_its_stream_cancels_it_too(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.script = Script(fault=Fault.HANG)

    async with running_router([engine]) as router, client_of(router) as client:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            await anext(answer.aiter_bytes())

        await eventually(lambda: engine.num_aborted == 1)
        await eventually(lambda: in_flight(router) == [0])


@pytest.mark.slow
async def test_in_flight_counts_end_at_zero_whatever_happened(start_engine: StartEngine) -> None:
    engines = [await start_engine(), await start_engine()]

    async with (
        # In the end both are to be used alike: a breaker that the failures opened would forbid it.
        running_router(engines, breaker_failures=0) as router,
        client_of(router) as client,
    ):

        async def one(index: int) -> None:
            for engine in engines:
                engine.scripts.append(
                    (
                        Script(delay_s=0.01),
                        Script(fault=Fault.RESET_AFTER_HEAD),
                        Script(fault=Fault.HANG_BEFORE_HEAD),
                    )[index % 3]
                )
            try:
                async with asyncio.timeout(0.3):
                    # Each its own: engines that fail one and the same time and again are spared it.
                    await client.post("/v1/chat/completions", json=CHAT | {"user": str(index)})
            except TimeoutError:
                pass

        for start in range(0, 36, 12):
            await asyncio.gather(*(one(index) for index in range(start, start + 12)))
        await eventually(lambda: in_flight(router) == [0, 0])
        router.pool.check_integrity()
        for engine in engines:
            engine.scripts.clear()
            engine.requests.clear()
        for _ in range(20):
            await ask(router)

    assert [len(engine.requests) for engine in engines] == [10, 10]


async def test_an_engine_that_restarts_during_streams_keeps_counts_right(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    gate = asyncio.Event()
    engine.script = Script(gate=gate)

    async with running_router([engine]) as router:
        asking = [asyncio.create_task(ask(router, STREAM)) for _ in range(10)]
        await eventually(lambda: engine.in_flight == 10)
        engine.restart()
        await eventually(lambda: len(engine.router_ids) == 1 and engine.num_acks == 1)
        gate.set()
        await asyncio.gather(*asking)

        assert in_flight(router) == [0]
        router.pool.check_integrity()


@pytest.mark.parametrize("offset_s", [-0.01, 0.0, 0.01])
async def test_a_connection_that_the_engine_has_closed_meanwhile_costs_no_error(
    start_engine: StartEngine, offset_s: float
) -> None:
    engine = await start_engine(keep_alive_s=0.1)

    async with running_router([engine], max_retries=0) as router, client_of(router) as client:
        statuses = []
        for _ in range(10):
            answer = await client.post("/v1/chat/completions", json=CHAT)
            statuses.append(answer.status_code)
            await asyncio.sleep(0.1 + offset_s)

    assert statuses == [200] * 10


async def test_connections_are_kept_unless_the_engine_closes_them(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async with running_router([engine]) as router:
        for _ in range(5):
            await ask(router)
        assert engine.num_connections == 1

        engine.script = Script(keep_alive=False)
        for _ in range(3):
            assert (await ask(router)).status_code == 200

    assert engine.num_connections == 3


async def test_a_slow_client_holds_the_engine_back(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.script = Script(pieces=("x" * 100_000,) * 300)

    async with running_router([engine], idle_timeout_s=1.0) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port, limit=4096)
        body = json.dumps(STREAM).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await eventually(lambda: engine.in_flight == 1)
        # Longer than the idle limit: an engine is not silent while it is not listened to.
        await asyncio.sleep(1.5)
        assert engine.in_flight == 1

        answer = await reader.read()
        writer.close()

    assert answer.count(b'"content": "xxx') == 300
    assert b"[DONE]" in answer
    assert b'"error"' not in answer
