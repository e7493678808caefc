"""The generating endpoints: a job goes to an engine, to another one while that helps, and its
answer back.

A failure is retried on another engine as long as the client has not seen a byte. What the engine
says of the request itself (4xx) is passed on; what it says of its own state (429, 5xx) is passed
on when no other engine is left. A client that goes away cancels this task, which closes the
connection to the engine and gives back the lease."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvoy_contract.errors import ApiError, BadRequest, DeadlineExceeded, UpstreamFailed
from kvoy_contract.names import (
    CACHED_TOKENS_HEADER,
    ENGINE_HEADER,
    ENVELOPE_CONTENT_TYPE,
    KVOY_HEADER_PREFIX,
    REQUEST_ID_HEADER,
    SECRET_HEADER,
)
from kvoy_contract.sse import error_event
from kvoy_router.decision import Decision
from kvoy_router.dispatch import Dispatcher, Job
from kvoy_router.errors import UpstreamError
from kvoy_router.http_client import ClientPool, Exchange
from kvoy_router.http_message import JSON_TYPE, Headers, Request, error_headers
from kvoy_router.http_response import Response
from kvoy_router.metrics import Metrics
from kvoy_router.record import RequestRecord
from kvoy_router.relay import StreamRelay, relay_whole
from kvoy_router.time_limit import TimeLimit

log = logging.getLogger(__name__)

_FORWARDED_REQUEST_HEADERS = frozenset(
    {b"authorization", b"accept", b"accept-language", b"traceparent", b"tracestate"}
)
_FORWARDED_RESPONSE_HEADERS = frozenset({b"content-type", b"cache-control", b"retry-after"})
_INTERNAL_PREFIX = KVOY_HEADER_PREFIX.encode()
_REQUEST_ID_NAME = REQUEST_ID_HEADER.encode()
_ENGINE_NAME = ENGINE_HEADER.encode()
_CACHED_TOKENS_NAME = CACHED_TOKENS_HEADER.encode()
_SECRET_NAME = SECRET_HEADER.encode()
_ENVELOPE_TYPE = (b"content-type", ENVELOPE_CONTENT_TYPE.encode())
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_MAX_ERROR_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    router_id: str
    response_headers: bool = True
    max_retries: int = 2
    request_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine's own error answer, kept in case that nobody else does better."""

    status: int
    headers: Headers
    body: bytes
    concerns_request: bool


def check_headers(request: Request) -> None:
    """Refuse what only a router may say, and bodies that are not plain JSON. Raises BadRequest."""
    for name, _ in request.headers:
        if name.startswith(_INTERNAL_PREFIX):
            raise BadRequest(f"The header {name.decode('latin-1')} is internal.")
    media_type = request.media_type
    if request.body and media_type not in ("application/json", ""):
        raise BadRequest(f"The content type must be application/json, not {media_type}.")
    coding = request.header(b"content-encoding")
    if coding is not None and coding.strip().lower() != b"identity":
        raise BadRequest("Content-Encoding is not supported.")


def request_id_of(request: Request) -> str:
    """The client's own x-request-id where it is printable and short, else a new one."""
    value = request.header(_REQUEST_ID_NAME)
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value.decode("ascii")
    return f"req-{random.getrandbits(96):024x}"


class Proxy:
    def __init__(
        self,
        dispatcher: Dispatcher,
        clients: ClientPool,
        metrics: Metrics,
        options: ProxyOptions,
        now_s: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._metrics = metrics
        self._options = options
        self._now_s = now_s

    async def serve(self, request: Request, response: Response) -> None:
        """Answer a request to a generating endpoint; every way ends in one log line."""
        record = RequestRecord(request_id_of(request), request.path, self._now_s())
        self._metrics.in_flight += 1
        try:
            with TimeLimit(self._options.request_timeout_s):
                check_headers(request)
                await self._dispatch(request, response, record)
        except ApiError as error:
            self._answer_error(response, record, error)
        except TimeoutError:
            limit_s = self._options.request_timeout_s
            overdue = DeadlineExceeded(f"The request took longer than {limit_s:g} s.")
            self._answer_error(response, record, overdue)
        except asyncio.CancelledError:
            record.outcome = "client_gone"
            raise
        except Exception:
            record.outcome = "internal_error"
            raise
        finally:
            self._metrics.in_flight -= 1
            record.status = response.status
            now_s = self._now_s()
            self._metrics.on_request(record, now_s)
            if log.isEnabledFor(logging.INFO):
                log.info("request", extra=record.log_fields(now_s))

    async def _dispatch(self, request: Request, response: Response, record: RequestRecord) -> None:
        job = await self._dispatcher.prepare(request.path, request.body, record.request_id)
        record.model = job.model
        record.is_stream = job.is_stream
        record.prompt_tokens = job.prompt.num_tokens
        tried: frozenset[str] = frozenset()
        refusal: Refusal | None = None
        failure: ApiError | None = None
        for _ in range(1 + self._options.max_retries):
            try:
                decision = self._dispatcher.pick(job, tried)
            except ApiError:
                if not tried:
                    raise
                break
            if tried:
                record.num_retries += 1
            self._note(decision, record)
            tried |= {decision.endpoint.id}
            try:
                refusal = await self._attempt(job, decision, request, response, record)
            except UpstreamError as error:
                failure, refusal = error.to_api_error(), None
                self._note_failure(error.outcome, decision, record)
                if response.status:
                    record.outcome = error.outcome
                    raise failure from None
                continue
            if refusal is None:
                return
            self._note_failure(f"status_{refusal.status}", decision, record)
        if refusal is not None:
            self._pass_on(refusal, response, record)
            return
        assert failure is not None
        raise failure

    def _note(self, decision: Decision, record: RequestRecord) -> None:
        record.engine = decision.endpoint.name
        record.policy = decision.policy
        record.predicted_cached_tokens = decision.cached_tokens
        record.decision = decision
        self._metrics.on_decision(decision)

    def _note_failure(self, why: str, decision: Decision, record: RequestRecord) -> None:
        self._metrics.on_engine_failure(record.model, decision.endpoint.name, why)
        log.warning(
            "engine failed a request",
            extra={
                "request_id": record.request_id,
                "engine": decision.endpoint.name,
                "reason": why,
            },
        )

    async def _attempt(
        self,
        job: Job,
        decision: Decision,
        request: Request,
        response: Response,
        record: RequestRecord,
    ) -> Refusal | None:
        """Try one engine. None: the client has its answer. Raises UpstreamError."""
        lease = decision.lease
        try:
            headers, body = self._upstream_request(job, decision, request)
            exchange = await self._clients.request(
                decision.endpoint.address,
                b"POST",
                job.path.encode(),
                headers,
                body,
                is_stream=job.is_stream,
            )
            with exchange:
                if exchange.status != 200:
                    has_secret = bool(decision.endpoint.origin.secret)
                    return await self._read_refusal(exchange, response, record, has_secret)
                await self._relay(job, decision, exchange, response, record)
                return None
        finally:
            lease.release(self._now_s())

    def _upstream_request(
        self, job: Job, decision: Decision, request: Request
    ) -> tuple[Headers, bytes]:
        headers = [header for header in request.headers if header[0] in _FORWARDED_REQUEST_HEADERS]
        headers.append((_REQUEST_ID_NAME, job.request_id.encode()))
        info, secret = decision.endpoint.info, decision.endpoint.origin.secret
        if info is None or not info.takes_envelope or not secret:
            return [JSON_TYPE, *headers], job.body
        headers.append(_ENVELOPE_TYPE)
        headers.append((_SECRET_NAME, secret.encode()))
        return headers, job.envelope(self._options.router_id, decision)

    async def _relay(
        self,
        job: Job,
        decision: Decision,
        exchange: Exchange,
        response: Response,
        record: RequestRecord,
    ) -> None:
        cached = exchange.header(_CACHED_TOKENS_NAME)
        if cached is not None and cached.isdigit():
            record.cached_tokens = int(cached)
        headers = self._answer_headers(exchange, record)

        def on_begin() -> None:
            record.first_byte_s = self._now_s()
            decision.lease.on_first_token(record.first_byte_s)

        if not job.is_stream:
            await relay_whole(exchange, response, headers, on_begin)
            return
        relay = StreamRelay(exchange, response, headers, on_begin)
        await relay.run()
        response.end()

    def _answer_headers(self, exchange: Exchange, record: RequestRecord) -> Headers:
        headers = [
            header
            for header in exchange.connection.headers
            if header[0] in _FORWARDED_RESPONSE_HEADERS
        ]
        return headers + self._own_headers(record)

    def _own_headers(self, record: RequestRecord) -> Headers:
        headers = [(_REQUEST_ID_NAME, record.request_id.encode())]
        if self._options.response_headers:
            if record.engine:
                headers.append((_ENGINE_NAME, record.engine.encode()))
            if record.cached_tokens is not None:
                headers.append((_CACHED_TOKENS_NAME, b"%d" % record.cached_tokens))
        return headers

    async def _read_refusal(
        self, exchange: Exchange, response: Response, record: RequestRecord, has_secret: bool
    ) -> Refusal | None:
        """Pass on what concerns the request; return what another engine may do better."""
        body = await exchange.read(_MAX_ERROR_BYTES)
        headers = self._answer_headers(exchange, record)
        concerns_request = _concerns_the_request(exchange.status, has_secret)
        refusal = Refusal(exchange.status, headers, body, concerns_request)
        if concerns_request:
            self._pass_on(refusal, response, record)
            return None
        return refusal

    def _pass_on(self, refusal: Refusal, response: Response, record: RequestRecord) -> None:
        """Send an engine's error answer; as our own 502 where it is no OpenAI error object."""
        record.outcome = "refused" if refusal.status < 500 else "engine_error"
        status = refusal.status
        message = _error_message(refusal.body)
        is_meant_for_client = status in (429, 503, 504) or refusal.concerns_request
        if is_meant_for_client and message is not None:
            response.send(status, refusal.headers, refusal.body)
            return
        error = UpstreamFailed(message or f"The engine answered with status {status}.")
        self._answer_error(response, record, error)

    def _answer_error(self, response: Response, record: RequestRecord, error: ApiError) -> None:
        if record.outcome == "ok":
            record.outcome = error.code or error.type
        if not response.status:
            headers = [*error_headers(error), *self._own_headers(record)]
            response.send(error.status, headers, error.to_json())
        elif not response.finished:
            # The stream has begun: tell it inside, and let closing mark that it is not complete.
            response.keep_alive = False
            response.write(error_event(error))
            response.end()


def _concerns_the_request(status: int, has_secret: bool) -> bool:
    """Whether every engine would say the same. 403 is about the secret, where there is one."""
    return 400 <= status < 500 and status != 429 and not (status == 403 and has_secret)


def _error_message(body: bytes) -> str | None:
    """The message of an OpenAI error object; None for anything else."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) else None
