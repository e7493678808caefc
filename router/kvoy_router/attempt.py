"""One try at one engine: the request as that engine takes it, and its answer to the client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvoy_contract.names import (
    CACHED_TOKENS_HEADER,
    ENGINE_HEADER,
    ENVELOPE_CONTENT_TYPE,
    REQUEST_ID_HEADER,
    SECRET_HEADER,
)
from kvoy_contract.tracing import CONTEXT_HEADERS, Span
from kvoy_router.decision import Decision
from kvoy_router.dispatch import Job, says_token_ids
from kvoy_router.errors import ResumeRefused
from kvoy_router.failover import GaveUp
from kvoy_router.http_client import ClientPool, Exchange
from kvoy_router.http_message import JSON_TYPE, Headers, Request
from kvoy_router.http_response import Response
from kvoy_router.record import RequestRecord
from kvoy_router.relay import StreamRelay, relay_whole, told_output_tokens
from kvoy_router.resumable_relay import ResumableRelay
from kvoy_router.stream_progress import StreamProgress

_FORWARDED_REQUEST_HEADERS = frozenset(
    {b"authorization", b"accept", b"accept-language", *CONTEXT_HEADERS}
)
_FORWARDED_RESPONSE_HEADERS = frozenset({b"content-type", b"cache-control", b"retry-after"})
_REQUEST_ID_NAME = REQUEST_ID_HEADER.encode()
_ENGINE_NAME = ENGINE_HEADER.encode()
_CACHED_TOKENS_NAME = CACHED_TOKENS_HEADER.encode()
_SECRET_NAME = SECRET_HEADER.encode()
_ENVELOPE_TYPE = (b"content-type", ENVELOPE_CONTENT_TYPE.encode())
_MAX_ERROR_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine's own error answer, kept in case that nobody else does better."""

    status: int
    headers: Headers
    body: bytes
    concerns_request: bool
    """Whether every engine would say the same."""

    @property
    def outcome(self) -> str:
        """The word for metrics and logs."""
        return f"status_{self.status}"

    @property
    def message(self) -> str | None:
        """That of an OpenAI error object; None for anything else."""
        try:
            message = msgspec.json.decode(self.body)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return None
        return message if isinstance(message, str) else None


@dataclass(slots=True, eq=False)
class Attempt:
    """The request and its client are the same for every attempt; decision and what follows are
    not."""

    job: Job
    request: Request
    response: Response
    record: RequestRecord
    decision: Decision
    progress: StreamProgress | None
    """Of a stream that may be continued elsewhere."""
    engine_priority: int = 0
    """Within an engine, lower first."""
    span: Span | None = None
    """Its part of the request's trace."""
    first_byte_s: float | None = None
    """When something of this attempt's answer has come."""

    @property
    def is_resumable(self) -> bool:
        return self.progress is not None and says_token_ids(self.decision.endpoint)


class Attempts:
    """How attempts are made; `on_first_byte` hears of every answer that begins."""

    def __init__(
        self,
        clients: ClientPool,
        router_id: str,
        shows_headers: bool,
        now_s: Callable[[], float],
        on_first_byte: Callable[[Attempt], None],
    ) -> None:
        """`shows_headers`: whether clients are told the engine and its cached tokens."""
        self._clients = clients
        self._router_id = router_id
        self.shows_headers = shows_headers
        self._now_s = now_s
        self._on_first_byte = on_first_byte

    async def open(self, attempt: Attempt) -> Exchange | Refusal:
        """Ask the engine until its answer begins, or all of its refusal is here. Nothing reaches
        the client. Raises UpstreamError."""
        headers, prefix = self._upstream_request(attempt)
        exchange = await self._clients.request(
            attempt.decision.endpoint.address,
            b"POST",
            attempt.job.path.encode(),
            headers,
            attempt.job.body,
            prefix=prefix,
            is_stream=attempt.job.is_stream,
        )
        if exchange.status == 200:
            return exchange
        with exchange:
            return await self._read_refusal(attempt, exchange)

    async def finish(self, attempt: Attempt, exchange: Exchange) -> None:
        """Pass the whole answer on. Raises UpstreamError."""
        with exchange:
            await self._relay(attempt, exchange)

    def release(self, attempt: Attempt) -> None:
        """It is over: nothing of it is reserved at its engine any more."""
        attempt.decision.lease.release(self._now_s())

    def own_headers(self, record: RequestRecord) -> Headers:
        """What the router itself tells of an answer."""
        headers = [(_REQUEST_ID_NAME, record.request_id.encode())]
        if self.shows_headers:
            if record.engine:
                headers.append((_ENGINE_NAME, record.engine.encode()))
            if record.cached_tokens is not None:
                headers.append((_CACHED_TOKENS_NAME, b"%d" % record.cached_tokens))
        return headers

    def _upstream_request(self, attempt: Attempt) -> tuple[Headers, bytes]:
        """Headers, and what stands before the client's body."""
        job, decision = attempt.job, attempt.decision
        headers = [h for h in attempt.request.headers if h[0] in _FORWARDED_REQUEST_HEADERS]
        if attempt.span is not None:
            headers = [h for h in headers if h[0] not in CONTEXT_HEADERS] + attempt.span.headers()
        headers.append((_REQUEST_ID_NAME, job.request_id.encode()))
        info, secret = decision.endpoint.info, decision.endpoint.origin.secret
        if info is None or not info.takes_envelope or not secret:
            return [JSON_TYPE, *headers], b""
        headers.append(_ENVELOPE_TYPE)
        headers.append((_SECRET_NAME, secret.encode()))
        progress = attempt.progress if attempt.is_resumable else None
        priority = attempt.engine_priority
        return headers, job.envelope(self._router_id, decision, progress, priority)

    async def _relay(self, attempt: Attempt, exchange: Exchange) -> None:
        job, response, record, progress = (
            attempt.job,
            attempt.response,
            attempt.record,
            attempt.progress,
        )
        cached = exchange.header(_CACHED_TOKENS_NAME)
        if cached is not None and cached.isdigit() and not response.status:
            record.cached_tokens = int(cached)
        headers = self._answer_headers(exchange, record)

        def on_begin() -> None:
            attempt.first_byte_s = self._now_s()
            attempt.decision.lease.on_first_token(attempt.first_byte_s)
            self._on_first_byte(attempt)

        if not job.is_stream:
            body = await relay_whole(exchange, response, headers, on_begin)
            record.output_tokens = told_output_tokens(body)
            return
        if progress is not None and attempt.is_resumable:
            if not response.status:
                progress.engine = attempt.decision.endpoint.info
                progress.cached_tokens = record.cached_tokens
            relay: StreamRelay
            relay = ResumableRelay(exchange, response, headers, on_begin, progress)
        else:
            relay = StreamRelay(exchange, response, headers, on_begin)
            if progress is not None:
                progress.lose(GaveUp.NO_TOKEN_IDS)
            exchange.connection.is_movable = False
        await relay.run()
        response.end()
        if not attempt.is_resumable:
            record.output_tokens = relay.told_output_tokens()

    def _answer_headers(self, exchange: Exchange, record: RequestRecord) -> Headers:
        headers = [
            header
            for header in exchange.connection.headers
            if header[0] in _FORWARDED_RESPONSE_HEADERS
        ]
        return headers + self.own_headers(record)

    async def _read_refusal(self, attempt: Attempt, exchange: Exchange) -> Refusal:
        """Raises ResumeRefused where the client has a part of its answer already."""
        body = await exchange.read(_MAX_ERROR_BYTES)
        has_secret = bool(attempt.decision.endpoint.origin.secret)
        refusal = Refusal(
            exchange.status,
            self._answer_headers(exchange, attempt.record),
            body,
            _concerns_the_request(exchange.status, has_secret),
        )
        if attempt.response.status:
            raise ResumeRefused(refusal.message or f"status {refusal.status}")
        return refusal


def _concerns_the_request(status: int, has_secret: bool) -> bool:
    """Whether every engine would say the same. 403 is about the secret, where there is one."""
    return 400 <= status < 500 and status != 429 and not (status == 403 and has_secret)
