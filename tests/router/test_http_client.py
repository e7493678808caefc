"""The router's HTTP client against a raw server: framing however the bytes are cut."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from kvoy_router.errors import ConnectionBroken
from kvoy_router.http_client import ClientLimits, ClientPool
from kvoy_router.upstream_connection import Reader, is_one_chunk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b"data: %d %b\n\n" % (i, b"x" * (i % 40)) for i in range(60)]
FRAMES = [b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS]


@contextlib.asynccontextmanager
async def answering(pieces: list[bytes]) -> AsyncIterator[str]:
    """A server that answers a request with the pieces, each in a read of its own, and closes."""

    is_done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        is_done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await is_done.wait()
        server.close()


class Sink:
    """Takes a body, along a short cut where a read is one chunk."""

    def __init__(self) -> None:
        self.body = b""
        self.num_short = 0
        self._num_seen = 0

    def take(self, data: bytes) -> None:
        self.body += data

    def is_open(self) -> bool:
        return True

    def reader(self, long_way: Reader) -> Reader:
        def read(data: bytes) -> None:
            if is_one_chunk(data):
                self.num_short += 1
                self.take(data[data.find(b"\r\n") + 2 : -2])
            else:
                long_way(data)

        return read

    def has_moved(self) -> bool:
        seen, self._num_seen = self._num_seen, self.num_short
        return self.num_short > seen


async def fetch(pieces: list[bytes]) -> tuple[bytes, int]:
    """(the body without framing, how many chunks took the short cut)"""
    sink = Sink()
    pool = ClientPool(ClientLimits())
    async with answering(pieces) as address:
        try:
            with await pool.request(address, b"GET", b"/", []) as exchange:
                await exchange.relay(sink.take, sink)
        finally:
            pool.close()
    return sink.body, sink.num_short


async def test_chunks_that_come_one_by_one_take_the_short_cut() -> None:
    body, num_short = await fetch([HEAD, *FRAMES, b"0\r\n\r\n"])

    assert body == b"".join(EVENTS)
    assert num_short > len(FRAMES) // 2


@pytest.mark.parametrize("seed", range(10))
async def test_any_cut_of_the_stream_gives_the_same_body(seed: int) -> None:
    generator = random.Random(seed)
    stream = HEAD + b"".join(FRAMES) + b"0\r\n\r\n"
    cuts = sorted(generator.sample(range(1, len(stream)), 100))
    # Some cuts lie where a chunk ends, so that framed and parsed chunks take turns.
    ends = [len(HEAD)]
    for frame in FRAMES:
        ends.append(ends[-1] + len(frame))
    cuts = sorted({*cuts, *generator.sample(ends, 30)})
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    body, _ = await fetch(pieces)

    assert body == b"".join(EVENTS)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"3\r\nabc\r\n", True),
        (b"a\r\n0123456789\r\n", True),
        (b"3\r\nabc\r\n3\r\nabc\r\n", False),
        (b"3\r\nab\r\n", False),
        (b"3\r\nabcde", False),
        (b"0\r\n\r\n", False),
        (b"3;x=1\r\nabc\r\n", False),
        (b"\r\nabc\r\n", False),
        (b"abc", False),
        (b"", False),
    ],
)
def test_one_whole_chunk_is_told_from_anything_else(data: bytes, expected: bool) -> None:
    assert is_one_chunk(data) is expected


async def test_a_body_that_ends_by_closing_is_whole() -> None:
    body, _ = await fetch([b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"])

    assert body == b"abcdef"


async def test_interim_answers_are_passed_over() -> None:
    body, _ = await fetch(
        [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", HEAD + FRAMES[1] + b"0\r\n\r\n"]
    )

    assert body == EVENTS[1]


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD, FRAMES[1]],
        [HEAD + FRAMES[1], FRAMES[2][:-3]],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"],
        [b"HTTP/1.1 200 OK\r\ncontent-le"],
        [],
    ],
)
async def test_an_answer_that_is_cut_is_never_taken_for_whole(pieces: list[bytes]) -> None:
    with pytest.raises(ConnectionBroken):
        await fetch(pieces)
