"""What the HTTP surface asks of a loaded engine, between bytes and pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

from kvoy_contract.envelope import Envelope
from kvoy_contract.errors import BadRequest
from kvoy_contract.openai_parse import parse_detokenize, parse_tokenize
from kvoy_contract.openai_responses import (
    DetokenizeResponse,
    ModelList,
    TokenizeResponse,
    encode,
)
from kvoy_engine.generation import Generation
from kvoy_engine.link import CoreLink, OutputStream
from kvoy_engine.metrics import EngineMetrics
from kvoy_engine.request_reader import CommandFactory, Endpoint, PreparedRequest, RequestReader
from kvoy_engine.served_model import ServedModel
from kvoy_engine.watch import WatchHub

T = TypeVar("T")

INLINE_BODY_BYTES: Final = 16 * 1024
"""A larger body is parsed and tokenised in a worker thread, so that running streams keep their
pace.
"""
NUM_WORKERS: Final = 2


class TextService:
    """One served model on one core."""

    def __init__(
        self,
        model: ServedModel,
        link: CoreLink,
        hub: WatchHub,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.link = link
        self._hub = hub
        self._metrics = metrics
        self._clock = clock
        self._reader = RequestReader(model, seed)
        self._factory = CommandFactory(clock)
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="kvoy-text")

    async def prepare(
        self, endpoint: Endpoint, body: bytes, envelope: Envelope | None
    ) -> PreparedRequest:
        """Raises an ApiError that names what is wrong with the request."""
        return await self._offload(body, lambda: self._reader.prepare(endpoint, body, envelope))

    def begin(self, prepared: PreparedRequest) -> Generation:
        return Generation(prepared, self.model, self._factory, self._metrics, self._clock)

    @contextmanager
    def run(self, generation: Generation) -> Iterator[OutputStream]:
        """The core computes a generation for as long as the context lasts."""
        try:
            with self.link.open(generation.commands) as stream:
                yield stream
        finally:
            for num_tokens in generation.started_prompt_lengths:
                self._metrics.prompt_tokens.inc(num_tokens)
                self._metrics.prompt_length.observe(num_tokens)
            self._metrics.cached_tokens.inc(generation.num_cached_tokens)
            self._metrics.generated_tokens.inc(generation.num_new_tokens)

    def note_envelope(self, envelope: Envelope) -> None:
        """Take over what a router says about its earlier requests."""
        self._hub.ledger.settle_through(envelope.router_id, envelope.settled_through)

    def settle(self, envelope: Envelope | None) -> None:
        """A router's request ended without reaching the core: no load report will include it."""
        if envelope is not None:
            self._hub.settle(envelope.router_id, envelope.number)

    async def tokenize(self, body: bytes) -> bytes:
        return await self._offload(body, lambda: self._tokenize(body))

    async def detokenize(self, body: bytes) -> bytes:
        return await self._offload(body, lambda: self._detokenize(body))

    def models(self) -> bytes:
        return encode(ModelList(data=self.model.cards()))

    def model_card(self, name: str) -> bytes:
        """Raises ModelNotFound."""
        self.model.check_name(name)
        return encode(next(card for card in self.model.cards() if card.id == name))

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _tokenize(self, body: bytes) -> bytes:
        request = parse_tokenize(body)
        if request.model is not None:
            self.model.check_name(request.model)
        encoder = self.model.encoder
        if request.prompt is None:
            token_ids = encoder.encode_chat(request.as_chat())
        else:
            token_ids = encoder.encode_text(request.prompt, request.add_special_tokens)
        strings = None
        if request.return_token_strs:
            strings = [encoder.token_text(token_id) for token_id in token_ids]
        return encode(
            TokenizeResponse(
                count=len(token_ids),
                max_model_len=self.model.limits.max_model_len,
                tokens=token_ids,
                token_strs=strings,
            )
        )

    def _detokenize(self, body: bytes) -> bytes:
        request = parse_detokenize(body)
        if request.model is not None:
            self.model.check_name(request.model)
        text = self.model.encoder.decode(request.tokens, skip_special_tokens=False)
        return encode(DetokenizeResponse(text))

    async def _offload(self, body: bytes, work: Callable[[], T]) -> T:
        try:
            if len(body) <= INLINE_BODY_BYTES:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        except RecursionError:
            raise BadRequest("The body is nested too deeply.") from None
