"""One HTTP/1.1 connection to an engine: bytes in, one answer at a time out to a sink.

A read of a stream costs one call; no task wakes up for it. Either it is parsed and what it brought
goes to the sink, or, where the sink offers a short cut and the parser stands between two chunks, it
goes to the short cut as it is: the loop calls that directly. See `http_client` for the pool and for
what callers use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from kvoy_router.errors import BadResponse, ConnectionBroken
from kvoy_router.http_message import Headers

Reader = Callable[[bytes], None]
"""Takes what one read brought."""

_EARLY_BODY_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 64 * 1024


def _chunk_heads(max_bytes: int) -> list[bytes | tuple[()]]:
    """By a chunk's length with its framing: how it begins. No chunk begins with an empty tuple."""
    heads: list[bytes | tuple[()]] = [()] * (max_bytes + 1)
    for size in range(1, max_bytes):
        head = b"%x\r\n" % size
        if (num_bytes := len(head) + size + 2) <= max_bytes:
            heads[num_bytes] = head
    return heads


CHUNK_HEADS = _chunk_heads(4096)


def is_one_chunk(data: bytes) -> bool:
    """Whether this is one whole chunk of a chunked body, with its framing and nothing else.

    A short one that is written in an unusual way, such as with leading zeros, is not recognised.
    """
    num_bytes = len(data)
    if num_bytes < len(CHUNK_HEADS):
        return data.startswith(CHUNK_HEADS[num_bytes]) and data.endswith(b"\r\n")
    end = data.find(b"\r\n", 0, 10)
    try:
        size = int(data[:end], 16)
    except ValueError:
        return False
    return size > 0 and num_bytes == end + size + 4 and data.endswith(b"\r\n")


def _drop(data: bytes) -> None:
    """The reader of a lost connection: nothing is read any more."""


_SPENT_PARSER = httptools.HttpResponseParser(object())
"""That of a lost connection."""


class ShortCut(Protocol):
    """What a sink does with reads that it recognises without a parser."""

    def is_open(self) -> bool:
        """Whether the next read may take it: the sink holds nothing back."""
        ...

    def reader(self, long_way: Reader) -> Reader:
        """What takes reads that begin between two chunks of a chunked body. It passes on whole
        chunks alone, and hands any read that is not of the shape that it knows to `long_way`."""
        ...

    def has_moved(self) -> bool:
        """Whether it has taken a read since it was asked last."""
        ...


class UpstreamConnection(asyncio.BaseProtocol):
    """One connection; the attributes below are of the exchange that runs on it."""

    def __init__(self) -> None:
        self._long_reader: Reader = self._parse
        self.data_received: Reader = self._long_reader
        """The transport's callback, which it looks up once: see `_take`."""
        self.transport: asyncio.Transport | None = None
        self.is_open = True
        self.idle_since_s = 0.0
        self.num_exchanges = 0
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.begin()

    def begin(self) -> None:
        """Forget the last exchange and expect a new answer."""
        self.num_exchanges += 1
        self.num_bytes = 0
        """Of the answer's beginning; chunks that go on as they are do not count."""
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self.sink: Reader | None = None
        self._short_cut: ShortCut | None = None
        self._short_reader: Reader = self._long_reader
        self.begun_s = self.last_data_s = self._loop.time()
        self.is_movable = True
        """Whether another engine could take over what this one is asked for."""
        self.is_reading_paused = False
        self.head: asyncio.Future[None] = self._loop.create_future()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # read by the parser when it is made, as are the others
        self._parser = httptools.HttpResponseParser(self)
        self._is_final = False
        self._keep_alive = False
        self._ends_by_closing = False
        self._chunk_ended = False
        self._is_between_chunks = False
        self._quiet_bytes = 0  # since the last of the body

    @property
    def is_reusable(self) -> bool:
        return self.is_open and self.is_complete and self._keep_alive and not self._ends_by_closing

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, though they have all their methods.
        self.transport = cast(asyncio.Transport, transport)

    def eof_received(self) -> None:
        return

    def _take(self, reader: Reader) -> None:
        """What is read from now on goes there."""
        if self.data_received is not reader:
            self.data_received = reader
            if self.is_open and self.transport is not None:
                self.transport.set_protocol(self)

    def _parse(self, data: bytes) -> None:
        self.last_data_s = self._time()
        self.num_bytes += len(data)
        if self.is_complete:
            self.fail(BadResponse("it sent more than its answer"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(BadResponse("it switched protocols"))
        except httptools.HttpParserError as error:
            self.fail(BadResponse(f"its answer is not HTTP: {error}"))
        else:
            self._quiet_bytes = 0 if self._parts else self._quiet_bytes + len(data)
            if self._quiet_bytes > _MAX_HEAD_BYTES:
                what = "trailers" if self.status else "headers"
                self.fail(BadResponse(f"its {what} are too large"))
            # Anything behind a chunk that ends in a line end would be a chunk's header.
            self._is_between_chunks = self._chunk_ended and data.endswith(b"\r\n")
            self._push()
            if self._short_cut is not None:
                self._choose_way(self._short_cut)

    def _choose_way(self, short_cut: ShortCut) -> None:
        """The parser stays between two chunks, so it need not see what the short cut takes."""
        if self._is_between_chunks and short_cut.is_open():
            self._take(self._short_reader)
        else:
            self._take(self._long_reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._can_write.set()
        if self._ends_by_closing and exc is None:
            self._complete()
        else:
            reason = str(exc) if exc else "it closed the connection"
            self.fail(ConnectionBroken(reason))
        # Its parser, transport and readers know it: cycles would wait for the collector.
        self.transport = None
        self._parser = _SPENT_PARSER
        self._long_reader = self._short_reader = self.data_received = _drop

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_final:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim answer; the real one follows
        self._is_final = True
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()
        names = {name for name, _ in self.headers}
        bodiless = status in (204, 304)
        self._ends_by_closing = not bodiless and names.isdisjoint(
            (b"content-length", b"transfer-encoding")
        )
        if not self.head.done():
            self.head.set_result(None)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        self._chunk_ended = False
        if self._is_final:
            self.is_complete = True

    # Towards the reader.

    def _push(self) -> None:
        """Hand what one read brought to the sink, in one piece, and then the end."""
        parts = self._parts
        if parts:
            if self.sink is not None:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                self.sink(data)
            elif sum(map(len, parts)) > _EARLY_BODY_BYTES:
                self.pause_reading()
        if self.is_complete and not self.done.done():
            self.done.set_result(None)

    def attach(self, sink: Reader, short_cut: ShortCut | None = None) -> None:
        """Send all body bytes to `sink`, beginning with those that came already, or with their
        framing along `short_cut` where it can take them."""
        self.sink = sink
        self._short_cut = short_cut
        if short_cut is not None:
            self._short_reader = short_cut.reader(self._long_reader)
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            sink(data)
        if short_cut is not None:
            self._choose_way(short_cut)
        self.resume_reading()

    def detach(self) -> None:
        """Send nothing to the sink any more."""
        self.sink = self._short_cut = None
        self._take(self._long_reader)

    def look(self) -> None:
        """Bring `last_data_s` up to date: the short cut reads no clock."""
        if self._short_cut is not None and self._short_cut.has_moved():
            self.last_data_s = self._time()

    def _complete(self) -> None:
        self.is_complete = True
        self._push()

    def fail(self, error: Exception) -> None:
        """End the exchange with `error`, and the connection with it."""
        for future in (self.head, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever awaits it sees it; nobody need
        self.close()

    def pause_reading(self) -> None:
        if not self.is_reading_paused and self.is_open and self.transport is not None:
            self.is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_reading_paused:
            self.is_reading_paused = False
            self.last_data_s = self._loop.time()
            if self.is_open and self.transport is not None:
                self.transport.resume_reading()

    async def write(self, parts: tuple[bytes, ...]) -> None:
        """Send a request, the last part its body; returns when the socket has taken most of it, or
        when the connection is lost, which `head` then says."""
        if self.transport is None:
            return
        if len(parts[-1]) < _EARLY_BODY_BYTES:
            self.transport.write(b"".join(parts))
        else:
            self.transport.writelines(parts)
        await self._can_write.wait()

    def close(self) -> None:
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()
