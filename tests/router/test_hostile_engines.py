"""Engines that answer what no engine should: no request hangs, and nothing wrong is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest

from kvoy_contract.testing import FakeEngine, Fault, Script
from kvoy_router.app import Router
from kvoy_router.testing import eventually, hurry, in_flight, running_router

StartEngine = Callable[..., Awaitable[FakeEngine]]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
SSE = OK + b"content-type: text/event-stream\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
SHORT_S = 0.3
"""How long such an engine is waited for, so that the tests end soon."""
FEW: dict[str, Any] = {"breaker_failures": 0, "max_retries": 1}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hello"},"finish_reason":null}]}\n\n'


@dataclass
class Hostile:
    """An engine's telemetry, and an HTTP port that writes `answer` to whoever asks."""

    telemetry_address: str
    address: str = ""
    answer: bytes = b""
    repeats: bytes = b""
    """Written again and again behind it, until the router closes."""
    closes: bool = True
    num_asked: int = 0
    num_written: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            self.num_asked += 1
            writer.write(self.answer)
            await writer.drain()
            while self.repeats:
                writer.write(self.repeats)
                self.num_written += len(self.repeats)
                await writer.drain()
            if not self.closes:
                await reader.read()
        writer.close()


@pytest.fixture
async def hostile(start_engine: StartEngine) -> AsyncIterator[Hostile]:
    engine = await start_engine()
    hostile = Hostile(engine.telemetry_address)
    server = await asyncio.start_server(hostile.serve, "127.0.0.1", 0)
    hostile.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield hostile
    server.close()


def facing(*engines: Hostile | FakeEngine, **settings: Any) -> AbstractAsyncContextManager[Router]:
    return running_router(cast(Sequence[FakeEngine], engines), **settings)


async def ask(router: Router, **fields: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{router.server.port}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(url, json=CHAT | fields)
    await eventually(lambda: sum(in_flight(router)) == 0)
    return answer


NOTHING_TO_TELL = {
    "garbage": (b"\x00\xff\x13garbage\r\n\r\n" * 10, True),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", True),
    "half a status line": (b"HTTP/1.1 20", True),
    "half a status line, open": (b"HTTP/1.1 20", False),
    "half a head": (SSE, True),
    "half a head, open": (SSE, False),
    "nothing": (b"", True),
    "nothing, open": (b"", False),
    "10 MB of headers": (OK + b"x-filler: %b\r\n" % (b"y" * 1000) * 10_000 + b"\r\n", True),
    "a header of 10 MB": (OK + b"x-filler: " + b"y" * 10_000_000 + b"\r\n\r\n", True),
    "switched protocols": (
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        True,
    ),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", True),
    "a redirection": (b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", True),
    "a page": (OK + b"content-type: text/html\r\ncontent-length: 4\r\n\r\n<p/>", True),
    "empty JSON": (JSON + b"content-length: 0\r\n\r\n", True),
    "no kind": (OK + b"content-length: 2\r\n\r\n{}", True),
    "an empty stream": (SSE + CHUNKED + b"0\r\n\r\n", True),
    "a wrong chunk length": (SSE + CHUNKED + b"zz\r\nabc\r\n", True),
    "a negative length": (JSON + b"content-length: -5\r\n\r\n{}", True),
    "two lengths": (JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}", True),
    "a status of nobody": (b"HTTP/1.1 999 Wow\r\ncontent-length: 0\r\n\r\n", True),
    "an error page of 10 MB": (
        b"HTTP/1.1 500 Oops\r\ncontent-length: 10000000\r\n\r\n" + b"x" * 10_000_000,
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_no_answer_is_an_error_object_and_another_engine_is_asked(
    start_engine: StartEngine, hostile: Hostile, stream: bool
) -> None:
    good = await start_engine()
    alone: dict[str, httpx.Response] = {}
    statuses: dict[str, list[int]] = {}

    async with facing(hostile, **FEW) as router:
        hurry(router, hostile.address, SHORT_S)
        for name, (hostile.answer, hostile.closes) in NOTHING_TO_TELL.items():
            alone[name] = await ask(router, stream=stream)
    num_asked = hostile.num_asked
    async with facing(hostile, good, **FEW) as router:
        hurry(router, hostile.address, SHORT_S)
        for name, (hostile.answer, hostile.closes) in NOTHING_TO_TELL.items():
            answers = [await ask(router, stream=stream) for _ in range(2)]
            statuses[name] = [answer.status_code for answer in answers]

    assert {
        name: a.status_code for name, a in alone.items() if a.status_code not in (502, 504)
    } == {}
    for answer in alone.values():
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert statuses == {name: [200, 200] for name in NOTHING_TO_TELL}
    assert num_asked == len(NOTHING_TO_TELL)
    assert hostile.num_asked - num_asked >= len(NOTHING_TO_TELL)


WITHOUT_END = {
    "an event": (SSE + CHUNKED, chunk(b"x" * 65536)),
    "a later event": (SSE + CHUNKED + chunk(EVENT), chunk(b"x" * 65536)),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "a status line": (b"HTTP/1.1 200 ", b"y" * 65536),
    "a header": (OK + b"x: ", b"y" * 65536),
    "headers": (OK, b"x: y\r\n" * 1000),
    "a trailer": (SSE + CHUNKED + chunk(EVENT) + b"0\r\nx: ", b"y" * 65536),
    "a chunk's extension": (SSE + CHUNKED + b"5;", b"y" * 65536),
    "an error": (b"HTTP/1.1 500 X\r\n" + CHUNKED, chunk(b"x" * 65536)),
}


@pytest.mark.slow
async def test_what_has_no_end_is_cut_off(hostile: Hostile) -> None:
    answers = {}

    # No deadline may be what ends it: an engine that says something every second reaches none.
    async with facing(hostile, breaker_failures=0, max_retries=0) as router:
        for name, (hostile.answer, hostile.repeats) in WITHOUT_END.items():
            answers[name] = await asyncio.wait_for(ask(router, stream=True), 25)

    for name, answer in answers.items():
        assert "too large" in answer.text or "larger than" in answer.text, (name, answer.text)
    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses == dict.fromkeys(WITHOUT_END, 502) | {"a later event": 200, "a trailer": 200}


ENDINGS = {
    "half an event": (EVENT + EVENT[:20], True, "its stream ended early|closed the connection"),
    "half an event, open": (EVENT + EVENT[:20], False, "stopped answering"),
    "no end mark": (EVENT, True, "its stream ended early|closed the connection"),
    "no end mark, open": (EVENT, False, "stopped answering"),
}


async def test_a_stream_that_stops_tells_whole_events_and_then_one_error(hostile: Hostile) -> None:
    async with facing(hostile, idle_timeout_s=SHORT_S, **FEW) as router:
        for said, hostile.closes, words in ENDINGS.values():
            hostile.answer = SSE + CHUNKED + chunk(said)
            answer = await ask(router, stream=True)
            events = answer.text.removesuffix("\n\n").split("\n\n")

            assert events[0] == EVENT.decode().rstrip()
            assert len(events) == 2
            error = json.loads(events[1].removeprefix("data: "))["error"]
            assert re.search(words, error["message"]), error


async def test_a_request_keeps_its_name_and_its_trace_wherever_it_goes_on(
    start_engine: StartEngine,
) -> None:
    engines = [await start_engine(resume=True) for _ in range(3)]
    engines[0].script = Script(status=500)
    engines[1].script = Script(pieces=("a", "b", "c"), fault=Fault.CUT, fault_after=2)
    headers = {"x-request-id": "my-name", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}

    async with facing(*engines, breaker_failures=0) as router:
        url = f"http://127.0.0.1:{router.server.port}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=30) as client:
            answers = [
                await client.post(url, json=CHAT | {"stream": True}, headers=headers)
                for _ in range(3)
            ]

    assert [answer.headers["x-request-id"] for answer in answers] == ["my-name"] * 3
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    received = [request for engine in engines for request in engine.requests]
    assert len(received) > 4, "nothing was retried and resumed"
    for request in received:
        assert {name: request.headers[name] for name in headers} == headers
    for engine in engines:
        ids = [r.envelope.request_id for r in engine.requests if r.envelope is not None]
        assert len(set(ids)) == len(engine.requests), "its live requests are told apart by these"


BEHIND_THE_END = {
    "nothing, open": (b"", b"", False),
    "no framing": (b"", b"", True),
    "no HTTP": (b"zz\r\n\r\n", b"", True),
    "trailers for ever": (b"0\r\n", b"x: y\r\n" * 1000, True),
    "one trailer for ever": (b"0\r\nx: ", b"y" * 65536, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n"])
async def test_what_follows_the_end_mark_is_no_failure(hostile: Hostile, end: bytes) -> None:
    async with facing(hostile, breaker_failures=1, max_retries=0) as router:
        for what, hostile.repeats, hostile.closes in BEHIND_THE_END.values():
            for said in (chunk(EVENT) + chunk(end), chunk(EVENT + end)):
                hostile.answer = SSE + CHUNKED + said + what
                answer = await asyncio.wait_for(ask(router, stream=True), 25)
                assert answer.content == EVENT + end
        assert hostile.num_asked == 2 * len(BEHIND_THE_END)
