"""A light HTTP client for load: httptools on a protocol, one connection per request in flight.

It keeps what a run needs (times, counts, text) in an `Outcome` and nothing else; the figures say
what CPU it used. Connections are kept open and used again, as long as clients usually do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvoy_cli.bench.outcome import Outcome
from kvoy_cli.bench.request import Request
from kvoy_contract.names import CACHED_TOKENS_HEADER, ENGINE_HEADER
from kvoy_contract.sse import SseParser, parse_token_ids_comment


class _Delta(msgspec.Struct):
    content: str | None = None


class _Logprobs(msgspec.Struct):
    """Of /v1/completions; those of chats have another form and are left out."""

    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Payload(msgspec.Struct):
    """The fields of a chunk or an answer, of either endpoint, that a client of a benchmark
    reads."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_payload = msgspec.json.Decoder(_Payload).decode
_DONE = b"[DONE]"
KEEP_S = 30.0
"""An idle connection is used again within so long. Kvoy's router closes it later (after 75 s), so
not while a request is on its way to it."""


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request in flight."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sse = SseParser()
        self._outcome: Outcome | None = None
        self._done: asyncio.Future[None] | None = None
        self.idle_since_s = 0.0
        self._is_stream = False
        self._now = 0.0
        self._last_read_s = 0.0
        self._body: list[bytes] = []
        self._keeps_alive = True

    def send(self, data: bytes, outcome: Outcome) -> asyncio.Future[None]:
        assert self.transport is not None
        self._outcome = outcome
        self._done = asyncio.get_running_loop().create_future()
        self._is_stream = False
        self._body = []
        self.transport.write(data)
        return self._done

    @property
    def is_usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing() and self._keeps_alive

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError, ValueError) as error:
            self._keeps_alive = False
            if self._done is not None and not self._done.done():
                cause = error.__context__ or error
                self._done.set_exception(ConnectionError(f"unreadable answer: {cause}"))

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._outcome is None:
            return
        lowered = name.lower()
        if lowered == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        elif lowered == ENGINE_HEADER.encode():
            self._outcome.engine = value.decode("latin-1")
        elif lowered == CACHED_TOKENS_HEADER.encode():
            self._outcome.predicted_cached_tokens = int(value)

    def on_headers_complete(self) -> None:
        if self._outcome is not None:
            self._outcome.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._outcome is None:
            return
        if not self._is_stream:
            self._body.append(body)
            return
        num_before = len(self._outcome.arrivals)
        for event in self._sse.feed(body):
            for comment in event.comments:
                for _, ids, _ in parse_token_ids_comment(comment) or ():
                    self._outcome.token_ids.extend(ids)
            if event.data is not None and event.data != _DONE:
                read_payload(self._outcome, event.data, self._now)
        if len(self._outcome.arrivals) > num_before and self._now != self._last_read_s:
            self._outcome.num_reads += 1
            self._last_read_s = self._now

    def on_message_complete(self) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None or self._done is None or self._done.done():
            return
        self._keeps_alive = self._parser.should_keep_alive()
        outcome.end_s = self._now
        if not self._is_stream:
            outcome.body = b"".join(self._body)
            if outcome.body.startswith(b"{"):
                read_payload(outcome, outcome.body, self._now)
        if outcome.status != 200 and outcome.error is None:
            outcome.error = f"status {outcome.status}"
        self._sse = SseParser()
        self._done.set_result(None)


def read_payload(outcome: Outcome, data: bytes, now_s: float) -> None:
    """Add one event's (or a whole answer's) content to `outcome`."""
    payload = _decode_payload(data)
    if payload.error is not None:
        outcome.error = str(payload.error.get("message", payload.error))
    for choice in payload.choices:
        part = choice.delta or choice.message
        text = choice.text if part is None else part.content
        if text:
            outcome.arrivals.append(now_s)
            outcome.texts.append(text)
        if choice.finish_reason is not None:
            outcome.finish_reason = choice.finish_reason
            if (
                not outcome.arrivals
            ):  # an answer without visible text has a first token all the same
                outcome.arrivals.append(now_s)
        if choice.logprobs is not None:
            outcome.top_logprobs.extend(entry or {} for entry in choice.logprobs.top_logprobs or ())
    if payload.usage is not None:
        usage = payload.usage
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens


class Client:
    """Sends requests to one base URL. Use it as an async context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// URL")
        self.host = parts.hostname
        self.port = parts.port or 80
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    async def send(self, request: Request, outcome: Outcome | None = None) -> Outcome:
        """The outcome of `request`; failures are in it, never raised.

        A caller that passes `outcome` sees it fill while the answer streams. When the task is
        cancelled the connection is closed (the server sees its client go) and the outcome is
        marked as cut.
        """
        if outcome is None:
            outcome = Outcome(due_s=time.perf_counter())
        connection: _Connection | None = None
        try:
            connection = await self._connect()
            outcome.sent_s = time.perf_counter()
            await connection.send(request.to_bytes(f"{self.host}:{self.port}"), outcome)
        except OSError as error:
            outcome.error = f"{type(error).__name__}: {error}"
            outcome.end_s = time.perf_counter()
        except asyncio.CancelledError:
            outcome.is_cut = True
            outcome.end_s = time.perf_counter()
            if connection is not None:
                self._close(connection)
            raise
        if connection is not None:
            self._give_back(connection)
        return outcome

    async def _connect(self) -> _Connection:
        oldest_s = time.perf_counter() - KEEP_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since_s >= oldest_s:
                return connection
            self._close(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self.host, self.port)
        self._all.add(connection)
        return connection

    def _give_back(self, connection: _Connection) -> None:
        if connection.is_usable:
            connection.idle_since_s = time.perf_counter()
            self._idle.append(connection)
        else:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        connection.close()
        self._all.discard(connection)


async def send_until(
    client: Client, request: Request, outcome: Outcome, num_events: int
) -> Outcome:
    """Send, and go away as a client once `num_events` events with text have come."""
    task = asyncio.ensure_future(client.send(request, outcome))
    while not task.done() and len(outcome.arrivals) < num_events:
        await asyncio.wait([task], timeout=0.001)
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return outcome
