"""The OpenAI routes on raw ASGI: from a request's bytes to an answer's, at the least cost per
token.

Response headers go out with the first token, so every failure before it is a plain HTTP status; a
later one is an error event, after which the stream ends without `[DONE]`. One step's chunks are one
write.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import UNSET, UnsetType

from kvoy_contract import envelope as envelopes
from kvoy_contract import names, sse
from kvoy_contract.envelope import Envelope
from kvoy_contract.errors import (
    ApiError,
    BadRequest,
    EngineFailed,
    Forbidden,
    MethodNotAllowed,
    Unavailable,
)
from kvoy_contract.openai_responses import CompletionUsage
from kvoy_contract.sse import ChoiceIds
from kvoy_contract.tracing import Tracing
from kvoy_engine import asgi, request_spans
from kvoy_engine.asgi import ClientGone, Headers, Receive, Scope, Send
from kvoy_engine.client_watch import fail_when_client_leaves
from kvoy_engine.config import EngineConfig
from kvoy_engine.generation import Generation
from kvoy_engine.health import Phase, Readiness
from kvoy_engine.link import OutputStream
from kvoy_engine.metrics import EngineMetrics, Outcome
from kvoy_engine.pieces import Piece
from kvoy_engine.request_reader import Endpoint, PreparedRequest
from kvoy_engine.responses import ChatResponder, CompletionResponder, Responder, ResponseHead
from kvoy_engine.service import TextService

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5.0
_ENVELOPE_TYPE: Final = names.ENVELOPE_CONTENT_TYPE.encode()
_SECRET_HEADER: Final = names.SECRET_HEADER.encode()
_KVOY_PREFIX: Final = names.KVOY_HEADER_PREFIX.encode()
_CACHED_TOKENS_HEADER: Final = names.CACHED_TOKENS_HEADER.encode()
_REQUEST_ID_HEADER: Final = names.REQUEST_ID_HEADER.encode()
_MAX_REQUEST_ID_CHARS: Final = 256
_ID_PREFIX: Final = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETIONS: "cmpl-"}


class StreamBroken(Exception):
    """The answer ended with an error event, after its headers had gone out."""


class OpenAiRoutes:
    """Handlers of the hot routes. `service` is there once the model is loaded."""

    def __init__(
        self,
        config: EngineConfig,
        readiness: Readiness,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._config = config
        self._readiness = readiness
        self._metrics = metrics
        self._clock = clock
        self.service: TextService | None = None
        self.num_open = 0
        """Requests whose answer is not complete."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(Endpoint.CHAT, scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(Endpoint.COMPLETIONS, scope, receive, send)

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve_text(lambda service: service.tokenize, scope, receive, send)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve_text(lambda service: service.detokenize, scope, receive, send)

    async def _serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever becomes of it, and account for it."""
        exchange = _Exchange(endpoint, scope, send, self._clock())
        self.num_open += 1
        self.idle.clear()
        outcome = Outcome.ERROR
        try:
            outcome = await self._answer(exchange, receive)
        except ClientGone:
            outcome = Outcome.ABORTED
        except StreamBroken:
            outcome = Outcome.ERROR
        except ApiError as error:
            outcome = outcome_of(error)
            await asgi.send_error(send, error, exchange.headers())
        except Exception:
            logger.exception("request failed request_id=%s", exchange.request_id)
            if exchange.is_streaming:
                raise  # the connection is cut: a half-written answer must not look whole
            failure = EngineFailed("The engine failed to answer this request.")
            await asgi.send_error(send, failure, exchange.headers())
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self.idle.set()
            if self.service is not None and not exchange.has_reached_core:
                self.service.settle(exchange.envelope)
            self._account(exchange, outcome)

    async def _answer(self, exchange: _Exchange, receive: Receive) -> Outcome:
        self._check_headers(exchange.scope)
        body = await self._read(exchange.scope, receive)
        body = self._open_envelope(exchange, body)
        service = self.require_service()
        if exchange.envelope is not None:
            service.note_envelope(exchange.envelope)
        prepared = await service.prepare(exchange.endpoint, body, exchange.envelope)
        generation = service.begin(prepared)
        exchange.begin(prepared, generation, service)
        with service.run(generation) as stream:
            exchange.has_reached_core = bool(generation.commands)
            async with fail_when_client_leaves(receive, stream):
                if prepared.request.stream:
                    await self._stream(exchange, generation, stream)
                else:
                    await self._collect(exchange, generation, stream)
        return Outcome.SUCCESS

    async def _stream(
        self, exchange: _Exchange, generation: Generation, stream: OutputStream
    ) -> None:
        pieces = generation.opening_pieces()
        if not generation.is_finished:
            pieces += await generation.next_pieces(stream)
        await exchange.start_stream()
        try:
            while not generation.is_finished:
                if pieces:
                    await exchange.send_pieces(pieces)
                pieces = await generation.next_pieces(stream)
        except ApiError as error:
            await asgi.send_part(exchange.send, sse.error_event(error), is_last=True)
            raise StreamBroken from error
        if pieces:
            await exchange.send_pieces(pieces)
        await asgi.send_part(exchange.send, exchange.encode_end(), is_last=True)

    async def _collect(
        self, exchange: _Exchange, generation: Generation, stream: OutputStream
    ) -> None:
        pieces = generation.opening_pieces()
        while not generation.is_finished:
            pieces += await generation.next_pieces(stream)
        await asgi.send_body(
            exchange.send, 200, exchange.encode_whole(pieces), headers=exchange.headers()
        )

    async def _serve_text(
        self,
        method: Callable[[TextService], Callable[[bytes], Awaitable[bytes]]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """`/tokenize` and `/detokenize`."""
        try:
            self._check_headers(scope)
            body = await self._read(scope, receive)
            answer = await method(self.require_service())(body)
        except ClientGone:
            return
        except ApiError as error:
            await asgi.send_error(send, error)
        else:
            await asgi.send_body(send, 200, answer)

    def _check_headers(self, scope: Scope) -> None:
        """Raises for another method than POST and for headers that only a router may send."""
        if scope["method"] != "POST":
            raise MethodNotAllowed(
                f"Method {scope['method']} is not allowed here; use POST.", allow="POST"
            )
        for key, value in scope["headers"]:
            if key == _SECRET_HEADER:
                if not envelopes.secret_matches(self._config.secret, value.decode("latin-1")):
                    raise Forbidden(f"The header `{names.SECRET_HEADER}` is wrong.")
            elif key.startswith(_KVOY_PREFIX):
                raise BadRequest(f"The header `{key.decode('latin-1')}` is reserved.")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        config = self._config
        return await asgi.read_body(
            scope, receive, config.max_body_bytes, config.request_read_timeout_s
        )

    def _open_envelope(self, exchange: _Exchange, body: bytes) -> bytes:
        """The client's own body; an envelope around it counts only with the secret."""
        if asgi.header(exchange.scope, b"content-type") != _ENVELOPE_TYPE:
            return body
        if asgi.header(exchange.scope, _SECRET_HEADER) is None:
            raise Forbidden(f"{names.ENVELOPE_CONTENT_TYPE} needs `{names.SECRET_HEADER}`.")
        exchange.envelope, body = envelopes.decode(body)
        if _is_request_id(exchange.envelope.request_id):
            exchange.request_id = exchange.envelope.request_id
        return body

    def require_service(self) -> TextService:
        """Raises Unavailable while the engine loads or drains."""
        if self._readiness.phase is Phase.DRAINING:
            raise Unavailable("This engine is shutting down.", retry_after_s=RETRY_AFTER_S)
        if self.service is None:
            raise Unavailable("The model is still loading.", retry_after_s=RETRY_AFTER_S)
        return self.service

    def _account(self, exchange: _Exchange, outcome: Outcome) -> None:
        duration_s = self._clock() - exchange.arrival_s
        self._metrics.on_request_end(exchange.endpoint.value, outcome)
        if outcome is Outcome.SUCCESS:
            self._metrics.duration.observe(duration_s)
        if self._tracing is not None:
            self._trace(self._tracing, exchange, outcome, duration_s)
        used = exchange.generation.usage if exchange.generation else None
        logger.info(
            "request ended request_id=%s endpoint=%s outcome=%s prompt_tokens=%d "
            "cached_tokens=%d completion_tokens=%d duration_s=%.3f",
            exchange.request_id,
            exchange.endpoint.value,
            outcome.value,
            used.prompt_tokens if used else 0,
            used.prompt_tokens_details.cached_tokens if used else 0,
            used.completion_tokens if used else 0,
            duration_s,
        )

    def _trace(
        self, tracing: Tracing, exchange: _Exchange, outcome: Outcome, duration_s: float
    ) -> None:
        request_spans.record(
            tracing,
            exchange.scope["path"],
            exchange.scope["headers"],
            start_s=exchange.arrival_s,
            end_s=exchange.arrival_s + duration_s,
            outcome=outcome.value,
            is_stream=exchange.is_streaming,
            request_id=exchange.request_id,
            model="" if self.service is None else self.service.model.names[0],
            generation=exchange.generation,
        )


class _Exchange:
    """One request and its answer: identity, headers, and how pieces become bytes."""

    def __init__(self, endpoint: Endpoint, scope: Scope, send: Send, arrival_s: float) -> None:
        self.endpoint = endpoint
        self.scope = scope
        self.send = send
        self.arrival_s = arrival_s
        self.request_id = _request_id(scope)
        self.envelope: Envelope | None = None
        self.has_reached_core = False
        self.is_streaming = False
        self.generation: Generation | None = None
        self._prepared: PreparedRequest | None = None
        self._responder: Responder | None = None

    def begin(
        self, prepared: PreparedRequest, generation: Generation, service: TextService
    ) -> None:
        self._prepared = prepared
        self.generation = generation
        answer_id, created = self.request_id, 0
        if self.envelope is not None:
            answer_id, created = self.envelope.answer_id or answer_id, self.envelope.created
        head = ResponseHead(
            _ID_PREFIX[self.endpoint] + answer_id,
            created or int(time.time()),
            service.model.names[0],
        )
        with_logprobs = prepared.request.num_logprobs is not None
        encoder = service.model.encoder
        if self.endpoint is Endpoint.CHAT:
            self._responder = ChatResponder(head, encoder, with_logprobs, generation.resumed)
        else:
            self._responder = CompletionResponder(head, encoder, with_logprobs)

    def headers(self) -> Headers:
        headers = [(_REQUEST_ID_HEADER, self.request_id.encode("latin-1"))]
        if self.generation is not None:
            headers.append((_CACHED_TOKENS_HEADER, b"%d" % self.generation.num_cached_tokens))
        return headers

    async def start_stream(self) -> None:
        self.is_streaming = True
        await asgi.start_stream(self.send, self.headers())

    async def send_pieces(self, pieces: list[Piece]) -> None:
        """Events for these pieces; with the ids that close them, where asked, in a part of their
        own: both leave in one write of the socket."""
        assert self._prepared is not None
        assert self._responder is not None
        usage = self._chunk_usage()
        chunks = [self._responder.chunk(piece, usage) for piece in pieces]
        await asgi.send_part(self.send, b"".join(chunks))
        if self._prepared.wants_token_ids:
            said = sse.token_ids_event(
                ChoiceIds(piece.index, piece.told_ids, piece.finish_reason is not None)
                for piece in pieces
            )
            await asgi.send_part(self.send, said)

    def encode_end(self) -> bytes:
        assert self._prepared is not None
        assert self._responder is not None
        assert self.generation is not None
        if not self._prepared.request.wants_usage:
            return sse.DONE
        return self._responder.usage_chunk(self.generation.usage) + sse.DONE

    def encode_whole(self, pieces: list[Piece]) -> bytes:
        assert self._responder is not None
        assert self.generation is not None
        return self._responder.body(merge_pieces(pieces), self.generation.usage)

    def _chunk_usage(self) -> CompletionUsage | UnsetType | None:
        assert self._prepared is not None
        assert self.generation is not None
        request = self._prepared.request
        if not request.wants_usage:
            return UNSET
        return self.generation.usage if request.wants_continuous_usage else None


def merge_pieces(pieces: list[Piece]) -> list[Piece]:
    """One piece per choice with all that its pieces say, in the order of their indexes."""
    texts: dict[int, list[str]] = {}
    merged: dict[int, Piece] = {}
    for piece in pieces:
        whole = merged.setdefault(piece.index, Piece(piece.index))
        texts.setdefault(piece.index, []).append(piece.text)
        whole.token_ids += piece.token_ids
        whole.scored += piece.scored
        whole.finish_reason = piece.finish_reason or whole.finish_reason
    for index, whole in merged.items():
        whole.text = "".join(texts[index])
    return [merged[index] for index in sorted(merged)]


def outcome_of(error: ApiError) -> Outcome:
    if error.status in (429, 503):
        return Outcome.UNAVAILABLE
    return Outcome.REFUSED if error.status < 500 else Outcome.ERROR


def _request_id(scope: Scope) -> str:
    """The client's own id where it sent a usable one."""
    given = asgi.header(scope, _REQUEST_ID_HEADER)
    if given is not None and _is_request_id(text := given.decode("latin-1")):
        return text
    return uuid.uuid4().hex


def _is_request_id(text: str) -> bool:
    """Whether it can stand in a header and in a log line."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= _MAX_REQUEST_ID_CHARS
