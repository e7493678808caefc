"""The router's HTTP/1.1 server against raw sockets: framing, limits, slow and hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvoy_router.body_memory import REQUEST_BYTES, BodyMemory, Budget
from kvoy_router.http_body import place_bytes
from kvoy_router.http_message import JSON_TYPE, Request
from kvoy_router.http_response import Response
from kvoy_router.http_server import Handler, HttpLimits, HttpServer
from kvoy_router.testing import eventually

LIMITS = HttpLimits(sweep_s=0.02, linger_s=60.0, drain_idle_s=0.02)


async def echo(request: Request, response: Response) -> None:
    response.send(200, [(b"x-path", request.path.encode())], request.body)


@contextlib.asynccontextmanager
async def serving(
    handler: Handler = echo, limits: HttpLimits = LIMITS, memory_bytes: int = 512 * 1024 * 1024
) -> AsyncIterator[HttpServer]:
    memory = BodyMemory(Budget(now=memory_bytes, most=memory_bytes))
    server = HttpServer(handler, limits, memory=memory)
    await server.listen("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.drain(0.2)


async def talk(server: HttpServer, *pieces: bytes) -> bytes:
    """Send the pieces, and return everything until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n"


async def test_a_request_split_at_every_byte_is_read_the_same() -> None:
    data = POST + CLOSE + b"content-length: 5\r\n\r\nhello"

    async with serving() as server:
        answer = await talk(server, *[data[i : i + 1] for i in range(len(data))])

    assert status_of(answer) == 200
    assert b"x-path: /a\r\n" in answer
    assert answer.endswith(b"\r\n\r\nhello")


async def test_a_chunked_request_body_is_joined() -> None:
    body = b"3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n"

    async with serving() as server:
        answer = await talk(server, POST + CLOSE + b"transfer-encoding: chunked\r\n\r\n" + body)

    assert answer.endswith(b"\r\n\r\nabcdefg")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def slow_first(request: Request, response: Response) -> None:
        await asyncio.sleep(0.05 if request.path == "/1" else 0)
        response.send(200, [], request.path.encode())

    requests = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(1, 4))

    async with serving(slow_first) as server:
        answer = await talk(server, requests + b"GET /4 HTTP/1.1\r\n" + CLOSE + b"\r\n")

    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"/1", b"/2", b"/3", b"/4"]


async def test_too_many_pipelined_requests_end_the_connection() -> None:
    async def slow(request: Request, response: Response) -> None:
        await asyncio.sleep(0.02)
        response.send(200, [], b"")

    async with serving(slow) as server:
        answer = await talk(server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)

    assert answer.count(b"HTTP/1.1 200") <= 10
    assert answer.count(b"HTTP/1.1 400") == 1


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 3\r\n",
        b"content-length: 3\r\ncontent-length: 4\r\n",
        b"content-length: 3\r\ncontent-length: 3\r\n",
        b"content-length: 3, 3\r\n",
        b"content-length: +3\r\n",
        b"content-length: -3\r\n",
        b"content-length: 0x3\r\n",
        b"content-length : 3\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding:\x0bchunked\r\n",
        b"x: a\r\n b\r\n",
        b"x: a\0b\r\n",
        b"x: a\rb: c\r\n",
        b"no-colon\r\n",
        b": empty\r\n",
        b"content-length:\r\n",
    ],
)
async def test_a_request_that_two_parsers_could_read_differently_is_refused(head: bytes) -> None:
    smuggled = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    paths: list[str] = []

    async def note(request: Request, response: Response) -> None:
        paths.append(request.path)
        response.send(200, [], b"")

    async with serving(note) as server:
        answer = await talk(server, POST + head + b"\r\n3\r\nabc\r\n0\r\n\r\n" + smuggled)

    assert status_of(answer) == 400
    assert b'"type":"invalid_request_error"' in answer
    assert paths == []


async def test_an_empty_header_value_does_not_join_its_neighbour() -> None:
    async def show(request: Request, response: Response) -> None:
        response.send(200, [], repr(request.headers).encode())

    async with serving(show) as server:
        answer = await talk(server, b"GET / HTTP/1.1\r\nx-a:\r\nx-b: 2\r\n" + CLOSE + b"\r\n")

    assert b"[(b'x-a', b''), (b'x-b', b'2'), (b'connection', b'close')]" in answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 900_000, 431),
        (POST + b"content-length: 40000000\r\n\r\n", 413),
        (POST + b"expect: 200-ok\r\ncontent-length: 1\r\n\r\n", 417),
    ],
)
async def test_what_cannot_be_served_gets_its_status_and_the_connection_ends(
    data: bytes, status: int
) -> None:
    async with serving() as server:
        answer = await talk(server, data)

    assert status_of(answer) == status
    assert b"connection: close\r\n" in answer
    assert b'{"error":{"message":' in answer


async def test_a_100_mb_body_is_refused_before_it_is_held() -> None:
    most = 0

    async def read_status(reader: asyncio.StreamReader) -> int:
        return status_of(await reader.readline())

    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(piece)
                await writer.drain()
                most = max(most, server.memory.used_bytes)
        assert await read_status(reader) == 413
        writer.close()
        await eventually(lambda: server.num_connections == 0)
        assert server.memory.used_bytes == 0

    assert most <= place_bytes(LIMITS.max_body_bytes)


async def test_memory_for_all_bodies_together_is_bounded() -> None:
    async with serving(memory_bytes=1000) as server:
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(POST + b"content-length: 500\r\n\r\n" + b"x" * 450)
            writers.append(writer)
        await eventually(lambda: server.memory.used_bytes == 900)

        answer = await talk(server, POST + b"content-length: 200\r\n\r\n" + b"x" * 200)
        for writer in writers:
            writer.close()
        await eventually(lambda: server.memory.used_bytes == 0)

    assert status_of(answer) == 503
    assert b"retry-after: 1\r\n" in answer


ROOM_FOR_ONE = 16 * 110_000
"""For requests: 5/16 for the places of large bodies, which is one of 100 kB; and 1/16 for what has
come of others."""
LARGE = b"x" * 100_000


def large(ending: bytes = CLOSE) -> bytes:
    return POST + ending + b"content-length: %d\r\n\r\n" % len(LARGE)


@contextlib.asynccontextmanager
async def one_large_request_under_way(
    limits: HttpLimits = LIMITS,
) -> AsyncIterator[tuple[HttpServer, asyncio.Event]]:
    """It ends when the event is set."""
    may_end = asyncio.Event()

    async def hold(request: Request, response: Response) -> None:
        if request.path == "/a":
            await may_end.wait()
        response.send(200, [], b"%d" % len(request.body))

    async with serving(hold, limits, memory_bytes=ROOM_FOR_ONE) as server:
        first = asyncio.create_task(talk(server, large() + LARGE))
        await eventually(lambda: server.memory.held.used_bytes)
        try:
            yield server, may_end
        finally:
            may_end.set()
            assert status_of(await first) == 200
            await eventually(lambda: server.num_connections == 0)
            assert server.memory.used_bytes == 0
            assert server.memory.num_waiting == 0


@pytest.mark.parametrize("piece", [b"", LARGE[:50_000], LARGE], ids=["none", "half", "all"])
async def test_a_large_body_waits_for_room_and_small_requests_pass(piece: bytes) -> None:
    """Whatever has come of it."""
    async with one_large_request_under_way() as (server, may_end):
        second = asyncio.create_task(talk(server, large() + piece, LARGE[len(piece) :]))
        await eventually(lambda: server.memory.held.num_waiting == 1)
        small = await talk(
            server, POST.replace(b"/a", b"/b") + CLOSE + b"content-length: 2\r\n\r\nhi"
        )
        assert not second.done()

        may_end.set()
        answer = await second

    assert (status_of(small), status_of(answer)) == (200, 200)
    assert answer.endswith(b"100000")


async def test_a_large_body_that_finds_no_room_in_time_is_refused() -> None:
    limits = replace(LIMITS, memory_wait_s=0.05)

    async with one_large_request_under_way(limits) as (server, _):
        unread = await talk(server, large(), LARGE)
        read = await talk(server, large() + LARGE)

    for answer in (unread, read):
        assert status_of(answer) == 503
        assert b"retry-after: 1\r\n" in answer


async def test_a_client_that_leaves_while_it_waits_for_room_leaves_nothing_behind() -> None:
    async with one_large_request_under_way() as (server, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(large() + LARGE[:10])
        await eventually(lambda: server.memory.num_waiting == 1)
        writer.transport.abort()


async def test_what_comes_of_bodies_without_room_is_bounded() -> None:
    """The first read of a large body may bring much of it. A sixteenth of the memory is for that,
    and who finds it full is refused at once."""
    async with one_large_request_under_way() as (server, may_end):
        waiting = asyncio.create_task(talk(server, large() + LARGE[:60_000]))
        await eventually(lambda: server.memory.unread.used_bytes)
        refused = await talk(server, large() + LARGE[:60_000])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        may_end.set()

    assert status_of(refused) == 503


async def test_a_body_for_which_there_is_never_room_is_refused_by_its_size() -> None:
    async with serving(memory_bytes=ROOM_FOR_ONE) as server:
        answer = await talk(server, POST + b"content-length: 200000\r\n\r\n")

    assert status_of(answer) == 413
    assert b"larger than 169230 bytes, for which this router has memory" in answer


async def test_a_client_that_asks_first_is_told_to_go_on_when_there_is_room() -> None:
    async with one_large_request_under_way() as (server, may_end):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(large(CLOSE + b"expect: 100-continue\r\n"))
        await eventually(lambda: server.memory.num_waiting == 1)
        may_end.set()
        interim = await reader.readuntil(b"\r\n\r\n")
        writer.write(LARGE)
        answer = await reader.read()
        writer.close()

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert status_of(answer) == 200


async def test_a_chunked_body_takes_half_of_the_room_until_its_size_is_known() -> None:
    chunked = POST + CLOSE + b"transfer-encoding: chunked\r\n\r\n"

    async with serving(memory_bytes=ROOM_FOR_ONE) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(chunked + b"%x\r\n%b\r\n" % (70_000, LARGE[:70_000]))
        await eventually(lambda: server.memory.held.used_bytes)
        taken = server.memory.held.used_bytes
        writer.write(b"1\r\nx\r\n0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await eventually(lambda: server.num_connections == 0)
        left = server.memory.used_bytes
        too_much = await talk(server, chunked + b"%x\r\n%b\r\n" % (200_000, LARGE + LARGE))

    assert answer.endswith(LARGE[:70_001])
    assert (taken, left) == (place_bytes(169230 // 2), 0)
    assert status_of(too_much) == 413


async def test_a_running_request_counts_beside_its_body() -> None:
    seen = []

    async def look(request: Request, response: Response) -> None:
        seen.append(server.memory.used_bytes)
        response.send(200, [], b"")

    async with serving(look) as server:
        await talk(server, POST + CLOSE + b"content-length: 3\r\n\r\nabc")
        assert server.memory.used_bytes == 0

    assert seen == [REQUEST_BYTES + 3]


@pytest.mark.parametrize(("memory_bytes", "is_cut"), [(16_000_000, False), (100_000, True)])
async def test_a_client_that_reads_slowly_is_counted_and_cut_without_room(
    memory_bytes: int, is_cut: bool
) -> None:
    async def talkative(request: Request, response: Response) -> None:
        response.send(200, [], b"x" * 8_000_000)
        most.append(server.memory.used_bytes)

    most: list[int] = []
    answer = b""
    async with serving(talkative, memory_bytes=memory_bytes) as server:
        with contextlib.suppress(ConnectionError):
            answer = await talk(server, b"GET / HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
        await eventually(lambda: server.num_connections == 0)
        assert server.memory.used_bytes == 0

    assert (len(answer) < 8_000_000) == is_cut
    assert (most[0] > 1_000_000) != is_cut


async def test_expect_100_continue_is_answered_before_the_body_comes() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + CLOSE + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        interim = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"ok")
        answer = await reader.read()
        writer.close()

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.endswith(b"\r\n\r\nok")


async def test_an_offer_of_http2_is_ignored_and_the_body_still_read() -> None:
    head = (
        POST
        + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        + b"content-length: 5\r\n\r\n"
    )

    async with serving() as server:
        together = await talk(server, head + b"hello")
        apart = await talk(server, head, b"he", b"llo")

    assert together.endswith(b"\r\n\r\nhello")
    assert apart.endswith(b"\r\n\r\nhello")


async def test_head_requests_get_the_length_without_the_body() -> None:
    async with serving() as server:
        answer = await talk(
            server, b"HEAD / HTTP/1.1\r\n" + CLOSE + b"content-length: 3\r\n\r\nabc"
        )

    assert b"content-length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "start",
    [b"G", b"POST / HTTP/1.1\r\nx: ", POST + b"content-length: 5\r\n\r\nabc"],
)
async def test_a_request_that_stays_unfinished_ends_with_408(start: bytes) -> None:
    limits = replace(LIMITS, head_s=0.05, body_s=0.05)

    async with serving(limits=limits) as server:
        answer = await talk(server, start)

    assert status_of(answer) == 408


async def test_a_trickling_sender_gains_no_time() -> None:
    limits = replace(LIMITS, body_s=0.1)

    async with serving(limits=limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"content-length: 100000\r\n\r\n")
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        writer.close()

    assert status_of(await answer) == 408


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with serving(limits=replace(LIMITS, keep_alive_s=0.05)) as server:
        assert await talk(server) == b""


async def test_two_thousand_idle_connections_leave_room_for_work() -> None:
    async with serving() as server:
        writers = []
        for _ in range(2000):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writers.append(writer)
        await eventually(lambda: server.num_connections == 2000)

        answer = await talk(server, POST + CLOSE + b"content-length: 2\r\n\r\nhi")

        assert answer.endswith(b"hi")
        for writer in writers:
            writer.close()


async def test_connections_beyond_the_limit_are_told_so() -> None:
    async with serving(limits=replace(LIMITS, max_connections=1)) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await eventually(lambda: server.num_connections == 1)
        answer = await talk(server)
        writer.close()

    assert status_of(answer) == 503


async def test_a_client_that_leaves_cancels_its_handler_at_once() -> None:
    cancelled = asyncio.Event()
    started = asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(wait) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"content-length: 0\r\n\r\n")
        await started.wait()
        writer.close()
        async with asyncio.timeout(30):
            await cancelled.wait()


async def test_a_slow_reader_pauses_its_producer() -> None:
    written = 0

    async def flood(request: Request, response: Response) -> None:
        nonlocal written
        can_write = asyncio.Event()
        can_write.set()
        response.on_pause, response.on_resume = can_write.clear, can_write.set
        response.start(200, [])
        for _ in range(500):
            await can_write.wait()
            response.write(b"x" * 65536)
            written += 65536
        response.end()

    async with serving(flood) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
        writer.write(POST + CLOSE + b"content-length: 0\r\n\r\n")
        await eventually(lambda: written)
        last = -1
        while written != last:
            last = written
            await asyncio.sleep(0.05)
        assert 0 < written < 500 * 65536 / 2

        answer = await reader.read()
        writer.close()

    assert len(answer) > 500 * 65536


async def test_a_client_that_never_reads_is_dropped() -> None:
    begun = asyncio.Event()

    async def flood(request: Request, response: Response) -> None:
        response.start(200, [])
        response.write(b"x" * 20_000_000)
        begun.set()
        await asyncio.Event().wait()

    async with serving(flood, replace(LIMITS, send_stall_s=0.1)) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
        writer.write(POST + b"content-length: 0\r\n\r\n")
        await begun.wait()
        await eventually(lambda: server.num_connections == 0)
        writer.close()


async def test_an_error_in_a_handler_is_a_500_and_the_connection_lives() -> None:
    async def fail(request: Request, response: Response) -> None:
        if request.path == "/bad":
            raise RuntimeError("secret detail")
        response.send(200, [JSON_TYPE], b"{}")

    async with serving(fail) as server:
        answer = await talk(
            server,
            b"GET /bad HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET /good HTTP/1.1\r\n" + CLOSE + b"\r\n",
        )

    assert status_of(answer) == 500
    assert b"secret detail" not in answer
    assert answer.endswith(b"{}")


async def test_draining_finishes_the_running_answer_and_closes_the_idle() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        begun.set()
        await release.wait()
        response.send(200, [], b"done")

    async with serving(wait) as server:
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", server.port)
        busy = asyncio.create_task(talk(server, POST + b"content-length: 0\r\n\r\n"))
        await begun.wait()
        await eventually(lambda: server.num_connections == 2)

        draining = asyncio.create_task(server.drain(30))
        assert await idle_reader.read() == b""
        release.set()

        assert await draining is True
        answer = await busy
        idle_writer.close()

    assert answer.endswith(b"done")
    assert b"connection: close\r\n" in answer


async def test_draining_answers_a_request_that_was_on_its_way_on_an_idle_connection() -> None:
    async with serving(limits=replace(LIMITS, drain_idle_s=5.0)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await eventually(lambda: server.num_connections == 1)

        draining = asyncio.create_task(server.drain(10))
        await eventually(lambda: server.is_draining)
        writer.write(POST + b"content-length: 0\r\n\r\n")
        answer = await reader.read()
        writer.close()

        assert await draining is True
    assert status_of(answer) == 200
    assert b"connection: close\r\n" in answer


async def test_draining_waits_for_the_rest_of_a_request() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"content-length: 5\r\n\r\nhe")
        await eventually(lambda: server.memory.used_bytes > 0)

        draining = asyncio.create_task(server.drain(10))
        await eventually(lambda: server.is_draining)
        await asyncio.sleep(5 * LIMITS.drain_idle_s)
        writer.write(b"llo")
        answer = await reader.read()
        writer.close()

        assert await draining is True
    assert answer.endswith(b"hello")
