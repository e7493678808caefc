"""The answer to one request: framing, backpressure and the state of what was sent.

A handler gets one and calls either `send` once, or `start`, `write` as often as it likes, and
`end`. Writing never blocks; a handler that produces without limit watches `on_pause` and
`on_resume`, which follow the socket's buffer. The head travels with the first body bytes, in one
packet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvoy_contract.errors import ApiError, EngineFailed
from kvoy_router.http_message import Headers, Request, encode_head, error_headers

if TYPE_CHECKING:
    from kvoy_router.http_connection import ServerConnection

log = logging.getLogger(__name__)

_BODILESS = frozenset({204, 304})


def _nothing() -> None:
    return


class Response:
    """Owned by one handler; `status` is 0 until `start` or `send`."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_head_only",
        "_is_http_1_0",
        "_left",
        "_transport",
        "finished",
        "keep_alive",
        "on_lost",
        "on_pause",
        "on_resume",
        "status",
    )

    def __init__(
        self, connection: ServerConnection, transport: asyncio.Transport, request: Request | None
    ) -> None:
        """`request` is None when none could be parsed: the connection ends with this answer."""
        self._connection = connection
        self._transport = transport
        self._head_only = request is not None and request.method == "HEAD"
        self._is_http_1_0 = request is not None and request.is_http_1_0
        self.keep_alive = request is not None and request.keep_alive
        self._chunked = False
        self._head = b""
        self._left: int | None = None
        self.status = 0
        self.finished = False
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing
        self.on_lost: Callable[[], None] = _nothing
        """The client has gone: `write_chunk` must not be used any more."""

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly: the socket's buffer is above its high-water mark."""
        return self._connection.is_write_paused

    def start(self, status: int, headers: Headers, content_length: int | None = None) -> None:
        """Set the head. Without a length the body is chunked (for HTTP/1.0: ended by closing)."""
        assert not self.status, "a response starts once"
        self.status = status
        self._left = content_length
        lines = [(b"date", self._connection.server.date), *headers]
        if status in _BODILESS:
            self._left = 0
        elif content_length is not None:
            lines.append((b"content-length", b"%d" % content_length))
        elif self._is_http_1_0:
            self.keep_alive = False
        else:
            self._chunked = True
            lines.append((b"transfer-encoding", b"chunked"))
        if self._connection.server.is_draining:
            self.keep_alive = False
        if not self.keep_alive:
            lines.append((b"connection", b"close"))
        elif self._is_http_1_0:
            lines.append((b"connection", b"keep-alive"))
        self._head = encode_head(status, lines)

    def write(self, data: bytes) -> None:
        """Send body bytes; empty ones send nothing. After the client has gone they are dropped."""
        if self.finished or self._head_only or not data:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._left is not None:
            assert len(data) <= self._left, "more body than the announced length"
            self._left -= len(data)
        if self._head:
            data = self._head + data
            self._head = b""
        self._transport.write(data)

    @property
    def takes_frames(self) -> bool:
        """Whether a body without a length is chunked, so that `write_chunk` may be used."""
        return not self._head_only and not self._is_http_1_0

    @property
    def write_chunk(self) -> Callable[[bytes], None]:
        """Sends chunks that have their framing already, between the first `write` and `end`. The
        transport's own method, which knows nothing of this answer's state: see `on_lost`."""
        return self._transport.write

    def lose(self) -> None:
        """The client has gone; what is written from now on is dropped."""
        on_lost = self.on_lost
        self._finish()
        on_lost()

    def end(self) -> None:
        """Complete the message; the connection then serves the next request."""
        if self.finished:
            return
        if self._left and not self._head_only:
            self.abort()
            return
        tail = b"0\r\n\r\n" if self._chunked and not self._head_only else b""
        if self._head or tail:
            self._transport.write(self._head + tail)
            self._head = b""
        self._finish()

    def send(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """A whole response in one write."""
        self.start(status, headers, len(body))
        self.write(body)
        self.end()

    def send_error(self, error: ApiError) -> None:
        self.send(error.status, error_headers(error), error.to_json())

    def abort(self) -> None:
        """Break off: the client sees a cut connection, never a message that looks complete."""
        if not self.finished:
            self._finish()
            self._transport.abort()

    def _finish(self) -> None:
        self.finished = True
        self.on_pause = self.on_resume = self.on_lost = _nothing


async def answer(
    handler: Callable[[Request, Response], Awaitable[None]], request: Request, response: Response
) -> None:
    """Have `handler` answer, or answer its failure in its place."""
    try:
        await handler(request, response)
    except ApiError as error:
        _answer_failure(response, error)
    except asyncio.CancelledError:
        # The client has gone, or the server ends: there is nobody to answer.
        response.abort()
        raise
    except Exception:
        log.exception("request handler failed", extra={"path": request.path})
        _answer_failure(response, EngineFailed("Internal error.", code="internal_error"))
    else:
        if not response.finished:
            log.error("request handler left no answer", extra={"path": request.path})
            response.abort()


def _answer_failure(response: Response, error: ApiError) -> None:
    if response.status:
        response.abort()
    else:
        response.send_error(error)
