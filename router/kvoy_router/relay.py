"""An engine's answer on its way to the client: whole for a plain one, piece by piece for a stream.

A stream is passed on as it comes, up to the last complete event: so an error event can follow at
any moment without falling into the middle of another. The first byte decides: before it the
client has seen nothing and another engine may be tried, after it an error can only be told inside
the stream, or the stream be continued by another engine, see `resumable_relay`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from kvoy_contract.sse import MAX_EVENT_BYTES
from kvoy_router.errors import BadResponse, ConnectionBroken, UpstreamError
from kvoy_router.http_client import Exchange
from kvoy_router.http_message import Headers
from kvoy_router.http_response import Response
from kvoy_router.upstream_connection import Reader, is_one_chunk

MAX_ANSWER_BYTES = 256 * 1024 * 1024
EVENT_STREAM = b"text/event-stream"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_FRAMED_EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
_DONE_TAIL_BYTES = 64
_DONE_ENDS = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")
_DONE_CHUNK_BYTES = len(b"12\r\ndata: [DONE]\r\n\r\n\r\n")
"""Of a chunk that has the end mark alone. No shorter one takes the short cut."""
_ENDING_S = 1.0
# A model may well write "[DONE]" or "error"; only an event of its own means it.
_DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]\s*\Z")
_ERROR = re.compile(rb'data: ?\{\s*"error"\s*:')


_USAGE = re.compile(rb'"completion_tokens": ?(\d{1,12})\b')
"""Inside a text its quotes would be escaped."""
_USAGE_BYTES = 4096


class StreamRelay:
    """Passes one engine's event stream on. `has_begun` once the client has seen a byte of it."""

    def __init__(
        self,
        exchange: Exchange,
        response: Response,
        headers: Headers,
        on_begin: Callable[[], None],
    ) -> None:
        """`headers` are the client's, unless its answer has begun already."""
        self._exchange = exchange
        self._response = response
        self._headers = headers
        self._on_begin = on_begin
        self._held = b""
        self._last = b""
        self._seen = b""
        self._ending: asyncio.TimerHandle | None = None
        self.has_begun = False

    async def run(self) -> None:
        """Raises what `Exchange.relay` raises, BadResponse for what is no event stream, and
        ConnectionBroken for one that ends without saying so."""
        if self._exchange.media_type != EVENT_STREAM:
            raise BadResponse("it answered a streamed request with something else")
        response, connection = self._response, self._exchange.connection
        response.on_pause = connection.pause_reading
        response.on_resume = connection.resume_reading
        response.on_lost = connection.detach
        try:
            await self._exchange.relay(self._push, self if response.takes_frames else None)
        except UpstreamError:
            if not self._has_end_mark():
                raise  # else only the framing of what is complete is missing
        finally:
            if self._ending is not None:
                self._ending.cancel()
        self._finish()

    def told_output_tokens(self) -> int | None:
        """What a usage chunk at the end said, for clients that asked for one."""
        return told_output_tokens(self._last + self._held)

    def _has_end_mark(self) -> bool:
        return _DONE.search(self._last[-_DONE_TAIL_BYTES:] + self._held) is not None

    def _finish(self) -> None:
        """The engine's answer has ended, as HTTP."""
        if not self.has_begun:
            raise BadResponse("its stream was empty")
        if self._has_end_mark():
            self._response.write(completed(self._held))
        elif not _ERROR.search(self._last):
            raise ConnectionBroken("its stream ended early")

    def _push(self, data: bytes) -> None:
        if self._held or not data.endswith(_EVENT_ENDS):
            data = self._whole_events(data)
            if not data:
                return
        self._last = data
        if not self.has_begun:
            self._begin()
        self._response.write(data)
        self._note_end(data)

    def _note_end(self, data: bytes) -> None:
        """Behind the end mark nothing is waited for but the end of the message, and not for long:
        clients that read to it would wait with us."""
        if data.endswith(_DONE_ENDS) and self._ending is None and self._has_end_mark():
            connection = self._exchange.connection
            if not connection.is_complete:
                error = ConnectionBroken("it kept its stream open behind the end mark")
                loop = asyncio.get_running_loop()
                self._ending = loop.call_later(_ENDING_S, connection.fail, error)

    # The short cut: a read that is one whole chunk of whole events travels on as it is.

    def is_open(self) -> bool:
        return self.has_begun and not self._held

    def reader(self, long_way: Reader) -> Reader:
        write = self._response.write_chunk

        def read(data: bytes) -> None:
            if (
                data.endswith(_FRAMED_EVENT_ENDS)
                and is_one_chunk(data)
                and len(data) > _DONE_CHUNK_BYTES
            ):
                self._last = data
                write(data)
            else:
                long_way(data)

        return read

    def has_moved(self) -> bool:
        seen, self._seen = self._seen, self._last
        return seen is not self._seen

    def _whole_events(self, data: bytes) -> bytes:
        data = self._held + data
        end = max(data.rfind(mark) + len(mark) for mark in _EVENT_ENDS)
        if end < len(_EVENT_ENDS[1]):
            end = 0
        self._hold(data[end:])
        return data[:end]

    def _hold(self, data: bytes) -> None:
        self._held = data
        if len(data) > MAX_EVENT_BYTES:
            self._exchange.connection.fail(BadResponse("an event of its stream is too large"))

    def _begin(self) -> None:
        self.has_begun = True
        self._on_begin()
        if not self._response.status:
            self._response.start(200, self._headers)
        if self._response.is_paused:
            self._exchange.connection.pause_reading()


async def relay_whole(
    exchange: Exchange, response: Response, headers: Headers, on_begin: Callable[[], None]
) -> bytes:
    """Pass on an answer that comes as one JSON document; nothing is sent before all of it is here.
    Returns the document.

    Raises what `Exchange.read` raises, and BadResponse for an empty or foreign body.
    """
    body = await exchange.read(MAX_ANSWER_BYTES)
    if not body or exchange.media_type != b"application/json":
        raise BadResponse("its answer is not a JSON document")
    on_begin()
    response.send(200, headers, body)
    return body


def completed(data: bytes) -> bytes:
    """Events of which the last one may lack its end: the connection broke just before it."""
    whole = data.rstrip(b"\r\n")
    return whole + b"\n\n" if whole else b""


def told_output_tokens(data: bytes) -> int | None:
    """What the usage at the end of an answer says; None where there is none."""
    found = _USAGE.search(data, max(0, len(data) - _USAGE_BYTES))
    return None if found is None else int(found[1])
