"""Clients whose large bodies wait for a place in memory, and what else they do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvoy_contract.errors import Unauthorized
from kvoy_router.body_memory import REQUEST_BYTES, BodyMemory, Budget
from kvoy_router.http_message import Headers, Request
from kvoy_router.http_response import Response
from kvoy_router.http_server import HttpLimits, HttpServer
from kvoy_router.testing import eventually

LIMITS = HttpLimits(sweep_s=0.02, drain_idle_s=0.02, linger_s=30.0)
ROOM_FOR_ONE = 16 * 110_000
"""5/16 of it for the places of large bodies, which is one of 100 kB."""
LARGE = b"x" * 100_000
CHUNKED = b"POST /b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


def head(path: bytes, length: int = len(LARGE), more: bytes = b"") -> bytes:
    lines = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return lines % (path, more, length)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits = LIMITS) -> AsyncIterator[tuple[HttpServer, asyncio.Event]]:
    """Answers with the path and the body's length; to /held when the event is set."""
    may_end = asyncio.Event()

    async def handle(request: Request, response: Response) -> None:
        if request.path == "/held":
            await may_end.wait()
        response.send(200, [], b"%b %d;" % (request.path.encode(), len(request.body)))

    server = HttpServer(handle, limits, memory=BodyMemory(Budget(ROOM_FOR_ONE, ROOM_FOR_ONE)))
    await server.listen("127.0.0.1", 0)
    try:
        yield server, may_end
    finally:
        may_end.set()
        await server.drain(0.2)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, server: HttpServer, *data: bytes) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        client.send(*data)
        return client

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def rest(self) -> bytes:
        """Until the server closes."""
        try:
            async with asyncio.timeout(60):
                return await self._reader.read()
        finally:
            self.writer.close()

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(60):
            return await self._reader.readuntil(end)


async def holder_of(server: HttpServer) -> Client:
    """Of the only place for large bodies."""
    client = await Client.of(server, head(b"/held", more=b"connection: close\r\n"), LARGE)
    await eventually(lambda: server.memory.used_bytes > REQUEST_BYTES)
    return client


async def test_a_chunked_body_finds_a_place_though_everything_else_has_grown() -> None:
    """Less room than an idle process would leave is the usual state, not a moment to wait for."""
    async with serving() as (server, _):
        server.memory.use(Budget(now=ROOM_FOR_ONE - 100, most=ROOM_FOR_ONE))
        client = await Client.of(server, CHUNKED, chunk(LARGE[:70_000]))
        await eventually(lambda: server.memory.held.used_bytes)
        client.send(chunk(b"xyz"), b"0\r\n\r\n")
        answer = await client.rest()

    assert answer.endswith(b"/b 70003;")


async def test_a_client_asks_first_and_is_not_told_to_go_on_within_another_answer() -> None:
    asking = b"connection: close\r\nexpect: 100-continue\r\n"

    async with serving() as (server, may_end):
        holder = await holder_of(server)
        client = await Client.of(server, head(b"/held", 0), head(b"/b", more=asking))
        await eventually(lambda: server.memory.num_waiting == 1)
        holder.writer.transport.abort()
        await eventually(lambda: server.memory.num_waiting == 0)
        may_end.set()
        first = await client.until(b"/held 0;")
        interim = await client.until(b"\r\n\r\n")
        client.send(LARGE)
        second = await client.rest()

    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert second.endswith(b"/b 100000;")


async def test_a_client_of_http_1_0_is_never_told_to_go_on() -> None:
    request = head(b"/b", 2, b"expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")

    async with serving() as (server, _):
        answer = await (await Client.of(server, request, b"hi")).rest()

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_second_body_of_a_client_is_not_read_when_its_first_gets_a_place() -> None:
    async with serving() as (server, may_end):
        holder = await holder_of(server)
        client = await Client.of(server, head(b"/held"), LARGE, head(b"/b"))
        await eventually(lambda: server.memory.num_waiting == 2)
        waiting = next(c for c in server._connections if not c.is_answering)
        holder.writer.transport.abort()
        await eventually(lambda: waiting.is_answering)
        is_reading = waiting.transport.is_reading() if waiting.transport else None
        may_end.set()
        await client.until(b"/held 100000;")
        client.send(LARGE)
        await client.until(b"/b 100000;")
        client.writer.close()

    assert is_reading is False


async def test_a_body_that_is_refused_behind_a_running_answer_gives_its_place_back_at_once() -> (
    None
):
    async with serving() as (server, may_end):
        client = await Client.of(server, head(b"/held", 0), head(b"/b"), LARGE[:10])
        await eventually(lambda: server.memory.held.used_bytes)
        client.send(LARGE[10:], b"no request\r\n\r\n")
        await eventually(lambda: server.memory.used_bytes > 0)
        chunks = await Client.of(server, head(b"/held", 0), CHUNKED, chunk(LARGE[:70_000]))
        chunks.send(b"no chunk\r\n")
        await eventually(lambda: server.memory.num_waiting == 0)
        may_end.set()
        await asyncio.gather(client.rest(), chunks.rest())


@pytest.mark.parametrize(("body_s", "memory_wait_s"), [(0.05, 10.0), (3600.0, 0.1)])
async def test_the_rest_of_a_body_is_overdue_also_when_it_began_behind_another_answer(
    body_s: float, memory_wait_s: float
) -> None:
    limits = replace(LIMITS, body_s=body_s, memory_wait_s=memory_wait_s, min_body_bytes_per_s=1e9)
    async with serving(limits) as (server, may_end):
        client = await Client.of(server, head(b"/held", 0), head(b"/b"), LARGE[:10])
        await eventually(lambda: server.memory.held.used_bytes)
        may_end.set()
        answer = await client.rest()
        used = server.memory.held.used_bytes

    assert b"HTTP/1.1 408 " in answer
    assert used == 0


async def test_a_client_that_leaves_after_its_refusal_is_gone_at_once() -> None:
    """Its body had come whole, and nothing more was read."""
    async with serving(replace(LIMITS, memory_wait_s=0.05)) as (server, _):
        holder = await holder_of(server)
        client = await Client.of(server, head(b"/b"), LARGE)
        answer = await client.rest()
        await eventually(lambda: server.num_connections == 1, timeout_s=20)
        holder.writer.close()

    assert answer.startswith(b"HTTP/1.1 503 ")


async def test_draining_answers_a_whole_request_that_waits_for_a_place() -> None:
    async with serving() as (server, may_end):
        holder = await holder_of(server)
        client = await Client.of(server, head(b"/b"), LARGE)
        await eventually(lambda: server.memory.num_waiting == 1)

        draining = asyncio.create_task(server.drain(60))
        await eventually(lambda: server.is_draining)
        await asyncio.sleep(5 * LIMITS.drain_idle_s)
        may_end.set()
        answer = await client.rest()
        await holder.rest()

        assert await draining is True
    assert answer.endswith(b"/b 100000;")


@pytest.mark.slow
@pytest.mark.parametrize("start", [head(b"/b"), CHUNKED + chunk(LARGE[:70_000])])
async def test_who_has_a_place_and_sends_nothing_loses_it_to_those_who_wait(start: bytes) -> None:
    """A body has far more time than the others wait for a place."""
    limits = replace(LIMITS, body_s=3600.0, memory_wait_s=6.0, min_body_bytes_per_s=1e9)
    async with serving(limits) as (server, _):
        stalled = await Client.of(server, start)
        await eventually(lambda: server.memory.held.used_bytes)
        client = await Client.of(server, head(b"/b", more=b"connection: close\r\n"), LARGE)
        answer = await client.rest()
        refusal = await stalled.rest()

    assert answer.endswith(b"/b 100000;")
    assert refusal.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("start", [head(b"/b"), CHUNKED + chunk(LARGE[:70_000])])
async def test_whose_sender_may_not_ask_gets_no_place(start: bytes) -> None:
    async with serving() as (server, _):

        def check(headers: Headers) -> None:
            if (b"authorization", b"right") not in headers:
                raise Unauthorized("wrong")

        server.check_sender = check
        stranger = await Client.of(server, start)
        refusal = await stranger.rest()
        used = server.memory.held.used_bytes
        right = head(b"/b", more=b"authorization: right\r\nconnection: close\r\n")
        answer = await (await Client.of(server, right, LARGE)).rest()

    assert refusal.startswith(b"HTTP/1.1 401 ")
    assert used == 0
    assert answer.endswith(b"/b 100000;")


async def test_the_end_of_one_client_may_give_another_one_time_in_the_same_sweep() -> None:
    async with serving(replace(LIMITS, sweep_s=3600.0)) as (server, _):
        stalled = await Client.of(server, head(b"/b"))
        await eventually(lambda: server.memory.held.used_bytes)
        client = await Client.of(server, head(b"/b", more=b"connection: close\r\n"), LARGE)
        await eventually(lambda: server.memory.num_waiting == 1)
        # Whoever came first is looked at first.
        holder, waiter = sorted(server._connections, key=lambda connection: connection.deadline)
        server._connections = dict.fromkeys((holder, waiter))  # type: ignore[assignment]
        holder.deadline = waiter.deadline = server.now_s() - 1.0
        server._sweep()
        server._connections = {holder, waiter}
        answer = await client.rest()
        refusal = await stalled.rest()

    assert refusal.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(b"/b 100000;")
