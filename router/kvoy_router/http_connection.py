"""One client connection: bytes in, requests to the handler one after the other, answers out in
order.

Parsing is strict: a request with two lengths, a malformed header or anything else that two
parsers could read differently ends the connection with 400. Requests sent ahead (pipelining) wait
in a short queue. A client's end of stream counts as "gone": the running handler is cancelled at
once, because TCP cannot tell a half-closed client from one that has left."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from kvoy_contract.errors import ApiError, BadRequest, RequestTimeout, Unavailable
from kvoy_router.body_memory import REQUEST_BYTES, SMALL_BODY_BYTES
from kvoy_router.http_body import IncomingBody, too_large, too_many
from kvoy_router.http_message import (
    Headers,
    HeadersTooLarge,
    Request,
    check_head,
    encode_request_head,
    refusal_of,
    without_upgrade,
)
from kvoy_router.http_response import Response, answer

if TYPE_CHECKING:
    from kvoy_router.http_server import HttpServer

_WRITE_HIGH_WATER_BYTES = 64 * 1024
_MAX_HEADERS = 128
_MAX_PIPELINED = 8
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ServerConnection(asyncio.Protocol):
    """Cheap while idle: no timer and, until the first byte, no parser. `deadline` is swept by the
    server."""

    __slots__ = (
        "_body",
        "_body_length",
        "_head_done",
        "_incoming",
        "_owes_continue",
        "_parser",
        "_paused_bytes",
        "_queue",
        "_quiet_bytes",
        "_response",
        "_target",
        "_task",
        "_upgrade_refused",
        "deadline",
        "headers",
        "is_discarding",
        "is_write_paused",
        "max_body_bytes",
        "server",
        "transport",
    )

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.deadline = math.inf
        """On the loop's clock: when what the client owes (a head, a body, reading) is overdue."""
        self.is_write_paused = False
        self.is_discarding = False
        """Nothing more is read from this client; it ends after the answers that are due."""
        self._parser: httptools.HttpRequestParser | None = None
        self._queue: deque[Request | ApiError] = deque()
        self._response: Response | None = None
        self._task: asyncio.Task[None] | None = None
        self._paused_bytes = 0
        self._reset_message()

    def _reset_message(self) -> None:
        self._target = b""
        self.headers: Headers = []
        self._head_done = False
        self._body = b""
        self._body_length = 0
        self._incoming: IncomingBody | None = None
        self._owes_continue = False
        self.max_body_bytes = 0
        self._quiet_bytes = 0
        self._upgrade_refused = False

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, though they have all their methods.
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
        self.deadline = self.server.now_s() + self.server.limits.keep_alive_s
        if not self.server.add(self):
            self._refuse(Unavailable("Too many connections.", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.discard(self)
        self.deadline = math.inf
        self.is_discarding = True
        self._forget_input()
        self._count_paused(0)
        if self._response is not None:
            self._response.lose()
        if self._task is not None:
            self._task.cancel()
        self._parser = self.transport = None  # they know it: cycles would wait for the collector

    def eof_received(self) -> bool:
        if self._task is not None:
            self.abort()
        return False

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.deadline = self.server.now_s() + self.server.limits.send_stall_s
        if self.transport is not None:
            self._count_paused(self.transport.get_write_buffer_size())
        if self._response is not None:
            self._response.on_pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.deadline = math.inf
        self._count_paused(0)
        if self._response is not None:
            self._response.on_resume()
        elif self.is_discarding:
            self.deadline = self.server.now_s() + self.server.limits.linger_s
        elif not self._queue:
            self._await_request()

    def data_received(self, data: bytes) -> None:
        if self.is_discarding:
            return
        if self._parser is None:
            self._parser = httptools.HttpRequestParser(self)
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(refusal_of(error))
        else:
            if self._quiet_bytes > self.server.limits.max_head_bytes:
                self._refuse(HeadersTooLarge("The request's headers are too large."))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers HTTP/2 or WebSocket as plain HTTP/1.1, as the standard
        allows. The parser stops at such a head, so a new one reads it again without the offer."""
        if self._upgrade_refused:
            self._refuse(BadRequest("Malformed HTTP request."))
            return
        assert self._parser is not None
        method, target = self._parser.get_method(), self._target
        if method == b"CONNECT":
            self._refuse(BadRequest("CONNECT is not supported."))
            return
        headers = without_upgrade(self.headers)
        self._reset_message()
        self._upgrade_refused = True
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(encode_request_head(method, target, headers) + rest)

    @property
    def is_answering(self) -> bool:
        return self._response is not None

    # The parser's callbacks. An ApiError in one ends the connection with it.

    def on_message_begin(self) -> None:
        if self._response is None:
            self.deadline = self.server.now_s() + self.server.limits.head_s

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer: nothing here reads any
        if len(self.headers) >= _MAX_HEADERS:
            raise HeadersTooLarge(f"The request has more than {_MAX_HEADERS} headers.")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._head_done = True
        self._quiet_bytes = 0
        limits = self.server.limits
        self.max_body_bytes = limits.max_body_bytes  # also if that changes while it comes
        if self._parser.should_upgrade():
            return
        version = self._parser.get_http_version()
        length = check_head(self._target, self.headers, version, limits.max_head_bytes)
        if length is not None and length > limits.max_body_bytes:
            raise too_large(limits.max_body_bytes)
        if self._response is None:
            self.deadline = self.server.now_s() + limits.body_s
        if length is None or length > SMALL_BODY_BYTES:
            self._incoming = IncomingBody(self)
            if length is not None:
                self._incoming.ask(length)
        if length != 0 and version != "1.0":
            self._owes_continue = any(name == b"expect" for name, _ in self.headers)
            self.say_continue()

    def say_continue(self) -> None:
        """If a client waits for it: when its body has a place, never into another's answer."""
        is_next = self._response is None and not self._queue and not self._waits_for_memory
        if self._owes_continue and is_next and self.transport is not None:
            self._owes_continue = False
            self.transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._quiet_bytes = 0
        self._body_length += len(data)
        if self._body_length > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        if self._incoming is None and not self._body:
            if not self.server.memory.take(len(data)):
                raise too_many()
            self._body = data
        else:
            if self._incoming is None:
                self._incoming, self._body = IncomingBody(self, self._body), b""
            self._incoming.add(data)
        if self._response is None:
            # A sender that keeps to a minimal rate gets more time, a trickling one does not.
            self.deadline += len(data) / self.server.limits.min_body_bytes_per_s

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.should_upgrade():
            return
        self._quiet_bytes = 0
        if len(self._queue) >= _MAX_PIPELINED:
            raise BadRequest("Too many pipelined requests.")
        request = Request(
            method=self._parser.get_method().decode("ascii"),
            target=self._target,
            headers=self.headers,
            is_http_1_0=self._parser.get_http_version() == "1.0",
            keep_alive=self._parser.should_keep_alive() and not self._upgrade_refused,
            body=self._body,
        )
        if self._incoming is not None:
            request.body, request.claim = self._incoming.complete()
        self._reset_message()
        self._queue.append(request)
        self.start_next()

    # Requests in order.

    def _refuse(self, error: ApiError) -> None:
        """Answer `error` after what is already due, read no more, and close."""
        self.is_discarding = True
        self._forget_message()  # what is due first may take minutes
        self._queue.append(error)
        self.start_next()

    def overdue(self) -> None:
        """The deadline has passed: 408 for half a request, plain closing for an idle client."""
        self.deadline = math.inf
        if self.transport is None:
            return
        if self.is_write_paused or self.is_discarding:
            self.transport.abort()
        elif self._waits_for_memory:
            self._forget_input()
            self._refuse(too_many())
        elif self._is_receiving:
            self._refuse(RequestTimeout("The request was sent too slowly."))
        else:
            self.transport.close()

    @property
    def _is_receiving(self) -> bool:
        """Whether a part of a request has come."""
        return bool(self._target or self._quiet_bytes or self.headers)

    def close_if_idle(self) -> None:
        """For a draining server: only a request, running or coming in, keeps the connection."""
        is_idle = self._response is None and not self._queue and not self._is_receiving
        if is_idle and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    @property
    def _waits_for_memory(self) -> bool:
        """Whether the next request is not to be read on, or not to begin, until it has a place."""
        if self._queue:
            item = self._queue[0]
            return isinstance(item, Request) and item.waits
        return self._incoming is not None and self._incoming.waits

    def resume_reading(self) -> None:
        """Unless a body of this client still waits for a place."""
        parts = (self._incoming, *self._queue)
        waits = any(part.waits for part in parts if isinstance(part, IncomingBody | Request))
        if self.transport is not None and not waits:
            self.transport.resume_reading()

    def start_next(self) -> None:
        """The first of those that have come begins, unless one is being answered."""
        if self._response is not None or self.transport is None:
            return
        if not self._queue:
            self._await_request()
            return
        self.deadline = math.inf
        if self._waits_for_memory:
            self.deadline = self.server.now_s() + self.server.limits.memory_wait_s
            return
        item = self._queue.popleft()
        if isinstance(item, ApiError):
            response = Response(self, self.transport, None)
            response.send_error(item)
            self.server.on_refused(item)
            self._linger()
            return
        self._response = Response(self, self.transport, item)
        self.server.memory.used_bytes += REQUEST_BYTES
        self._task = asyncio.get_running_loop().create_task(self._run(item, self._response))

    def _await_request(self) -> None:
        """Or the rest of one of which a part came while another was answered."""
        if not self.is_discarding:
            self.deadline = self.server.now_s() + self.server.limits.time_s(
                self._is_receiving, self._waits_for_memory
            )
            if self._incoming is not None:
                self._incoming.limit_sender()
            self.say_continue()

    async def _run(self, request: Request, response: Response) -> None:
        try:
            await answer(self.server.handler, request, response)
        finally:
            self._task = None
            self._response = None
            self.server.release(request, REQUEST_BYTES)
            self._after(response)

    def _after(self, response: Response) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if response.keep_alive:
            self.start_next()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close so that the answer arrives: closing over unread input would reset the connection.

        The write side ends now; what still comes is thrown away until the client closes or time
        is up."""
        assert self.transport is not None
        self.is_discarding = True
        self._forget_input()
        if not self.is_write_paused:
            self.deadline = self.server.now_s() + self.server.limits.linger_s
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _forget_input(self) -> None:
        """Drop what was read and not begun: a partial body and waiting requests."""
        for item in self._queue:
            if isinstance(item, Request):
                self.server.release(item)
        self._queue.clear()
        self._forget_message()

    def _forget_message(self) -> None:
        """Drop the part of a request that has come."""
        if self._incoming is not None:
            self._incoming.end()
        self.server.memory.give_back(len(self._body))
        self._reset_message()
        self.resume_reading()  # what still comes is thrown away, and the client's end is seen

    def _count_paused(self, num_bytes: int) -> None:
        """So much is held for a client that reads slowly. Without room for it the client is cut."""
        self._paused_bytes = self.server.memory.exchange(self._paused_bytes, num_bytes)
        if self._paused_bytes < num_bytes:
            self.abort()
