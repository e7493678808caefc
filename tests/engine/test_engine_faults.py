"""What the engine does when steps fail, clients leave, bodies are hostile, or it shall end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

from kvoy_contract.sse import SseParser
from kvoy_engine import server as engine_server
from kvoy_engine.batch import Batch, RowOutput, RunnerOutput
from kvoy_engine.build import build_core
from kvoy_engine.testing_server import HookedRunner, RunningEngine, running_engine, sim_config

MODEL = "sim"
DEADLINE_S = 60.0


@pytest.fixture
async def engine() -> AsyncIterator[RunningEngine]:
    async with running_engine() as engine:
        yield engine


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose core failed goes on answering until it is told to end at once."""
    monkeypatch.setattr(engine_server, "FAILURE_LINGER_S", DEADLINE_S)


async def status_at_once(engine: RunningEngine) -> int:
    """The exit status of an engine that is told twice to end."""
    engine.server.request_drain()
    engine.server.request_drain()
    return await engine.running


def hooked(hook: Callable[[Batch], RunnerOutput | None], **settings: Any) -> HookedRunner:
    runner = build_core(sim_config(**settings), lambda text: None).core.runner
    return HookedRunner(runner, hook)


async def until(holds: Callable[[], Any]) -> None:
    """Poll until `holds()` is true; fails after a generous deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            result = holds()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.01)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    )


def client_of(engine: RunningEngine) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_S)


async def payloads(client: httpx.AsyncClient, body: dict[str, Any]) -> list[bytes]:
    parser, events = SseParser(), []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            events += parser.feed(piece)
    return [event.data for event in events if event.data is not None]


@pytest.mark.usefixtures("lingering")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_step_that_fails_before_the_first_token_is_a_status(
    stream: bool, path: str
) -> None:
    def fail(batch: Batch) -> RunnerOutput:
        raise RuntimeError("kernel died")

    async with running_engine(runner=hooked(fail)) as engine, client_of(engine) as client:
        body: dict[str, Any] = {"model": MODEL, "stream": stream, "max_tokens": 200}
        body |= (
            {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "x"}
        )
        answer = await client.post(path, json=body)
        health = await client.get("/health")
        later = await client.post(path, json=body)
        errors = await metric(client, "kvoy_engine_requests_total")
        status = await status_at_once(engine)

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert "kernel died" in answer.json()["error"]["message"]
    assert health.status_code == 503
    assert later.status_code == 503
    assert later.headers["retry-after"]
    assert errors == 2
    assert status == 1


@pytest.mark.usefixtures("lingering")
async def test_a_step_that_fails_later_ends_the_stream_with_an_error_event() -> None:
    num_steps = 0

    def fail(batch: Batch) -> RunnerOutput | None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 10:
            raise RuntimeError("kernel died")
        return None

    async with running_engine(runner=hooked(fail)) as engine, client_of(engine) as client:
        events = await payloads(client, {"model": MODEL, "prompt": "x", "max_tokens": 200})
        text = (await client.get("/metrics")).text

    assert b"[DONE]" not in events
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert 'endpoint="completions",outcome="error"} 1.0' in text


async def test_a_row_that_is_not_finite_ends_alone_and_is_not_cached() -> None:
    is_broken = True

    def poison(batch: Batch) -> RunnerOutput | None:
        """NaN in the fifth step of the request that asks for seed 13."""
        if not is_broken or not any(
            row.params.seed == 13 and len(row.output_ids) == 4 for row in batch.rows
        ):
            return None
        inner = runner.inner.run(batch)
        rows = [
            RowOutput(error="logits are not finite") if row.params.seed == 13 else output
            for row, output in zip(batch.rows, inner.rows, strict=True)
        ]
        return RunnerOutput(rows, inner.duration_s)

    runner = hooked(poison)
    async with running_engine(runner=runner) as engine, client_of(engine) as client:
        prompt = "q" * 100

        async def ask(seed: int) -> httpx.Response:
            body = {"model": MODEL, "prompt": prompt + str(seed), "seed": seed, "max_tokens": 12}
            return await client.post("/v1/completions", json=body)

        answers = await asyncio.gather(*(ask(seed) for seed in (11, 12, 13, 14)))
        corrupted = await metric(client, "kvoy_engine_corrupted_requests_total")
        is_broken = False
        again = await asyncio.gather(*(ask(seed) for seed in (11, 12, 13, 14)))

    assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
    assert answers[2].json()["error"]["code"] == "engine_error"
    assert [answer.status_code for answer in again] == [200] * 4
    for index in (0, 1, 3):
        assert again[index].json()["choices"] == answers[index].json()["choices"]
    assert corrupted == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
async def test_what_a_client_leaves_behind_is_aborted(stream: bool, n: int) -> None:
    """Running and queued requests alike: 2 sequences fit into a step, many wait."""
    config = sim_config(max_num_seqs=2, sim_base_s=0.01)
    async with running_engine(config) as engine, client_of(engine) as client:
        free = await metric(client, "kvoy_engine_kv_blocks_free")
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": "x",
                "max_tokens": 4000,
                "ignore_eos": True,
                "n": n,
                "stream": stream,
            }
        ).encode()
        writers = [await post_raw(engine, body) for _ in range(10)]
        await until(lambda: is_at_least(client, "kvoy_engine_running_sequences", 2))

        for writer in writers:
            writer.close()

        async def is_idle() -> bool:
            gone = await metric(client, "kvoy_engine_running_sequences")
            gone += await metric(client, "kvoy_engine_waiting_sequences")
            left = await metric(client, "kvoy_engine_kv_blocks_free")
            left += await metric(client, "kvoy_engine_kv_blocks_evictable")
            return gone == 0 and left == free

        await until(is_idle)
        text = (await client.get("/metrics")).text
        steps = await metric(client, "kvoy_engine_steps_total")
        await asyncio.sleep(0.05)
        later = await metric(client, "kvoy_engine_steps_total")

    assert 'outcome="aborted"} 10.0' in text
    assert steps == later


async def is_at_least(client: httpx.AsyncClient, name: str, value: float) -> bool:
    return await metric(client, name) >= value


async def post_raw(engine: RunningEngine, body: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", engine.server.http_port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    await writer.drain()
    return writer


async def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    config = sim_config(max_body_bytes=100_000)
    async with running_engine(config) as engine, client_of(engine) as client:
        announced = await client.post("/v1/completions", content=b"x" * 3_000_000)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(300):
                yield b"x" * 10_000

        chunked = await client.post("/v1/completions", content=chunks())
        after = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1}
        )

    assert announced.status_code == chunked.status_code == 413
    assert announced.json()["error"]["code"] == "payload_too_large"
    assert after.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"model":"sim","prompt":"\\ud800","max_tokens":1}',
        b'{"model":"sim","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model":"sim","prompt":"x","metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"model":"sim","prompt":"x","temperature":1e999}',
        b'{"model":"sim","prompt":"x","temperature":NaN}',
    ],
)
async def test_hostile_json_is_a_400(engine: RunningEngine, body: bytes) -> None:
    async with client_of(engine) as client:
        answer = await client.post("/v1/completions", content=body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_slow_sender_is_cut_off() -> None:
    config = sim_config(request_read_timeout_s=0.3)
    async with running_engine(config) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.server.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(DEADLINE_S):
            head = await reader.readuntil(b"\r\n")
        writer.close()

    assert b"408" in head


@pytest.mark.slow
async def test_a_silent_connection_is_closed() -> None:
    config = sim_config(request_read_timeout_s=0.1)
    async with running_engine(config) as engine:
        silent, first = await asyncio.open_connection("127.0.0.1", engine.server.http_port)
        partial, second = await asyncio.open_connection("127.0.0.1", engine.server.http_port)
        second.write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        async with asyncio.timeout(DEADLINE_S):
            ends = [await silent.read(), await partial.read()]
        first.close()
        second.close()

    assert ends == [b"", b""]


async def test_reserved_headers_of_a_client_are_refused_by_name(engine: RunningEngine) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    async with client_of(engine) as client:
        reserved = await client.post("/v1/completions", json=body, headers={"X-Kvoy-Engine": "e"})
        secret = await client.post("/v1/completions", json=body, headers={"x-kvoy-secret": "e"})

    assert reserved.status_code == 400
    assert "x-kvoy-engine" in reserved.json()["error"]["message"]
    assert secret.status_code == 403


async def test_health_answers_while_large_prompts_are_tokenised(engine: RunningEngine) -> None:
    body = json.dumps({"model": MODEL, "prompt": "word " * 1_000_000}).encode()
    async with client_of(engine) as client:
        flood = [
            asyncio.create_task(client.post("/v1/completions", content=body)) for _ in range(4)
        ]
        answers = []
        while not all(task.done() for task in flood):
            answers.append((await client.get("/health")).status_code)
        refused = [task.result().status_code for task in flood]

    assert refused == [400] * 4
    assert set(answers) == {200}


async def test_a_stuck_step_turns_health_red_and_ends_its_requests() -> None:
    release = threading.Event()
    is_stuck = True

    def stick(batch: Batch) -> RunnerOutput | None:
        if is_stuck and any(row.output_ids for row in batch.rows):
            release.wait(DEADLINE_S)
        return None

    config = sim_config(stall_timeout_s=1.0, sim_prefill_tokens_per_s=1e6)
    async with (
        running_engine(config, runner=hooked(stick, sim_prefill_tokens_per_s=1e6)) as engine,
        client_of(engine) as client,
    ):
        body = {"model": MODEL, "prompt": "x" * 64, "max_tokens": 20}
        stream = asyncio.create_task(payloads(client, body))
        await until(lambda: has_status(client, 503))
        events = await stream
        refused = await client.post("/v1/completions", json=body)
        is_stuck = False
        release.set()
        await until(lambda: has_status(client, 200))
        good = await client.post("/v1/completions", json=body)

    assert json.loads(events[-1])["error"]["code"] == "engine_error"
    assert refused.status_code == 503
    assert good.status_code == 200


async def has_status(client: httpx.AsyncClient, status: int) -> bool:
    return (await client.get("/health")).status_code == status


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    has_refused = threading.Event()

    def hold(batch: Batch) -> RunnerOutput | None:
        if any(row.output_ids for row in batch.rows):
            has_refused.wait(DEADLINE_S)
        return None

    config = sim_config(stall_timeout_s=DEADLINE_S)
    async with (
        running_engine(config, runner=hooked(hold)) as engine,
        client_of(engine) as client,
    ):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "ignore_eos": True}
        running = asyncio.create_task(payloads(client, body))
        await until(lambda: is_at_least(client, "kvoy_engine_running_sequences", 1))

        engine.server.request_drain()
        await until(lambda: is_draining(client))
        refused = await client.post("/v1/completions", json=body)
        has_refused.set()
        events = await running
        status = await engine.running

    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert events[-1] == b"[DONE]"
    assert len(events) > 10
    assert status == 0


async def is_draining(client: httpx.AsyncClient) -> bool:
    answer = await client.get("/ready")
    return answer.status_code == 503 and answer.json()["status"] == "draining"


async def test_a_second_request_to_drain_ends_at_once_with_an_error_event() -> None:
    async with (
        running_engine(sim_config(sim_base_s=0.02)) as engine,
        client_of(engine) as client,
    ):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 20_000, "ignore_eos": True}
        running = asyncio.create_task(payloads(client, body))
        await until(lambda: is_at_least(client, "kvoy_engine_running_sequences", 1))
        began_s = time.monotonic()

        engine.server.request_drain()
        engine.server.request_drain()
        events = await running
        await engine.running

    assert json.loads(events[-1])["error"]["code"] == "unavailable"
    assert time.monotonic() - began_s < DEADLINE_S


async def test_a_full_queue_answers_429() -> None:
    config = sim_config(max_num_seqs=1, max_num_waiting=1, sim_base_s=0.02)
    async with running_engine(config) as engine, client_of(engine) as client:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 30, "ignore_eos": True}
        endless = body | {"max_tokens": 20_000}
        first = asyncio.create_task(client.post("/v1/completions", json=endless))
        await until(lambda: is_at_least(client, "kvoy_engine_running_sequences", 1))
        second = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: is_at_least(client, "kvoy_engine_waiting_sequences", 1))

        third = await client.post("/v1/completions", json=body | {"stream": True})
        first.cancel()
        answer = await second

    assert third.status_code == 429
    assert third.headers["retry-after"]
    assert first.cancelled()
    assert answer.status_code == 200


async def answer_to(engine: RunningEngine, data: bytes) -> bytes:
    """All that the engine says to `data` until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.server.http_port)
    writer.write(data)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "request_",
    [
        b"NONSENSE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 100_000,
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-many: a\r\n" * 10_000,
    ],
    ids=["no HTTP", "two lengths", "long header", "many headers"],
)
async def test_what_is_no_sensible_http_gets_an_error_object(
    engine: RunningEngine, request_: bytes
) -> None:
    answer = await answer_to(engine, request_)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert msgspec.json.decode(body)["error"]["type"] == "invalid_request_error"


async def test_a_head_is_measured_anew_for_each_request_of_a_connection(
    engine: RunningEngine,
) -> None:
    async with client_of(engine) as client:
        for _ in range(5):
            answer = await client.post("/v1/completions", content=b"x" * 40_000)
            assert answer.status_code == 400
            assert (await client.get("/health", headers={"x": "a" * 40_000})).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/version"])
async def test_what_can_be_read_can_be_asked_for_its_head(engine: RunningEngine, path: str) -> None:
    async with client_of(engine) as client:
        head = await client.head(path)
        wrong = await client.delete(path)

    assert (head.status_code, head.content) == (200, b"")
    assert wrong.status_code == 405
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD"}
