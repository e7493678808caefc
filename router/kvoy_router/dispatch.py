"""The one path of a request to an engine: parse once, encode once, pick; every surface uses it.

Knows models, prompts, the pool and the memory for requests; knows neither HTTP framing nor how an
answer travels back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import msgspec

from kvoy_contract import envelope as envelopes
from kvoy_contract.envelope import ResumeState
from kvoy_contract.errors import ApiError, Unavailable
from kvoy_contract.names import CHAT_COMPLETIONS_PATH
from kvoy_contract.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from kvoy_contract.prompt import PromptEncoder
from kvoy_router.access import ANYBODY, Client, with_client
from kvoy_router.affinity import affinity_of
from kvoy_router.body_cost import encoding_bytes, tokenizing_bytes
from kvoy_router.body_memory import SHORT_BODY_BYTES, SMALL_BODY_BYTES, BodyMemory
from kvoy_router.body_work import room_for, room_to_decode
from kvoy_router.breaker import Breakers, pick_around
from kvoy_router.decision import Decision
from kvoy_router.endpoint import Endpoint, EngineInfo
from kvoy_router.http_message import Request
from kvoy_router.loop_share import LoopShare
from kvoy_router.pool import Pool
from kvoy_router.prompts import EncodedPrompt, Hashing, Prompts, guess
from kvoy_router.request import InferenceRequest
from kvoy_router.stream_progress import StreamProgress

T = TypeVar("T")

_LARGE_BODY_BYTES = 64 * 1024
_HASH_BYTES = 65
"""Of a block hash and its place in a tuple."""
_UNUSED_STRIDE = 64
"""Of a request without hashes."""


class Job(msgspec.Struct, frozen=True, gc=False):
    """A client's request, ready to be sent to any engine of its model."""

    request_id: str
    path: str
    body: bytes
    """The client's own; with the cache salt that counts, where its client's tenant has one."""
    model: str
    is_stream: bool
    prompt: EncodedPrompt
    seed: int | None
    """Drawn here when the client gave none, so that every engine would draw the same tokens."""
    inference: InferenceRequest
    service: str = ""
    """Where several share the model's traffic, the one that the request falls to."""

    def envelope(
        self,
        router_id: str,
        decision: Decision,
        progress: StreamProgress | None = None,
        priority: int = 0,
    ) -> bytes:
        """What stands before the body for an engine that takes envelopes; with `progress` it says
        its token ids, and goes on where the progress says so."""
        envelope = envelopes.Envelope(
            router_id=router_id,
            number=decision.lease.number,
            settled_through=decision.lease.settled_through,
            # Two clients may use one id, and an engine tells its live requests apart by it.
            request_id=f"{self.request_id}.{router_id}.{decision.lease.number}",
            token_ids=self.prompt.packed,
            tokenizer_digest=self.prompt.digest,
            seed=self.seed,
            want_token_ids=progress is not None,
            resume=None if progress is None else progress.resume,
            answer_id="" if progress is None else progress.answer_id,
            created=0 if progress is None else progress.created,
            priority=priority or None,
        )
        return envelopes.encode_head(envelope)


class Dispatcher:
    """Turns bodies into jobs and jobs into decisions, and remembers the latest decisions."""

    def __init__(
        self,
        pool: Pool,
        prompts: Prompts,
        breakers: Breakers,
        now_s: Callable[[], float],
        memory: BodyMemory,
        decisions_kept: int = 1000,
    ) -> None:
        self._pool = pool
        self._prompts = prompts
        self._breakers = breakers
        self._now_s = now_s
        self._decisions: deque[Decision] = deque(maxlen=decisions_kept)
        self._large_bodies = LoopShare()
        self._memory = memory
        self.num_not_encoded = 0
        """Prompts that are too long for the memory there is: their engines encode them."""

    def room_to_decode(self, path: str, body: bytes) -> AbstractAsyncContextManager[None]:
        """See `body_work`."""
        return room_to_decode(self._memory, body, has_ids=path != CHAT_COMPLETIONS_PATH)

    def room_to_tokenize(self, body: bytes) -> AbstractAsyncContextManager[None]:
        """Likewise, for the token ids of all of it and an answer with them."""
        if len(body) <= SMALL_BODY_BYTES:
            return nullcontext()
        return room_for(self._memory.encoding, tokenizing_bytes(body))

    async def decode(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Raises as `parse`. Large bodies take turns, see `LoopShare`."""
        if len(body) <= _LARGE_BODY_BYTES:
            return parse(body)
        return await self._large_bodies.run(lambda: parse(body))

    def prepare(
        self, path: str, body: bytes, request_id: str, client: Client = ANYBODY
    ) -> Awaitable[Job]:
        """Raises BadRequest, Forbidden, ModelNotFound, PayloadTooLarge or Unavailable."""
        if len(body) <= SHORT_BODY_BYTES:
            return self._prepare(path, body, request_id, client)
        return self._prepare_in_room(path, body, request_id, client)

    async def _prepare_in_room(
        self, path: str, body: bytes, request_id: str, client: Client
    ) -> Job:
        async with self.room_to_decode(path, body):
            return await self._prepare(path, body, request_id, client)

    def settled(self, job: Job, request: Request) -> Job:
        """The client's `request` counts from now on as what is held to its end. Where the token ids
        find no room in memory, its engine encodes the prompt again."""
        body, packed = request.body, job.prompt.packed
        if len(body) <= SHORT_BODY_BYTES:
            return job
        held = 0 if job.body is body else len(job.body)
        held += _HASH_BYTES * len(job.prompt.hashes)
        # The token ids are in the envelope too.
        if self._hold(request, held + 2 * len(packed)):
            return job
        self._hold(request, held)
        prompt = msgspec.structs.replace(job.prompt, packed=b"", digest="")
        return msgspec.structs.replace(job, prompt=prompt)

    def _hold(self, request: Request, num_bytes: int) -> bool:
        """Count so much besides its body; False where there is no room."""
        if request.claim is not None:
            return request.claim.resize(len(request.body) + num_bytes)
        request.extra_bytes = self._memory.exchange(request.extra_bytes, num_bytes)
        return request.extra_bytes == num_bytes

    async def _prepare(self, path: str, body: bytes, request_id: str, client: Client) -> Job:
        request: ChatCompletionRequest | CompletionRequest
        if path == CHAT_COMPLETIONS_PATH:
            request = await self.decode(parse_chat, body)
        else:
            request = await self.decode(parse_completion, body)
        client.check_model(request.model)
        if client.priority is not None:
            # What counts for an engine is the client's tenant, not what a body claims.
            salt = client.salt_of(request.cache_salt)
            request = msgspec.structs.replace(request, cache_salt=salt)
            body = with_client(body, salt, None)
        affinity, service = b"", None
        if self._pool.is_shared(request.model):
            affinity = affinity_of(request)
            service = self._pool.first_service(request.model, affinity)
        info = self._pool.usual_info(request.model, service)
        prompt = await self._encode(request, info, len(body))
        num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        return Job(
            request_id=request_id,
            path=path,
            body=body,
            model=request.model,
            is_stream=request.stream,
            prompt=prompt,
            seed=random.getrandbits(63) if request.seed is None else None,
            inference=InferenceRequest(
                request_id=request_id,
                model=request.model,
                num_prompt_tokens=prompt.num_tokens,
                hashes=prompt.hashes,
                stride=info.hash_stride if info else _UNUSED_STRIDE,
                max_tokens=request.output_limit,
                num_choices=request.n * num_prompts,
                priority=client.priority_of(request.priority),
                salt=request.cache_salt or "",
                prompt_field="messages" if path == CHAT_COMPLETIONS_PATH else "prompt",
                affinity=affinity,
            ),
            service=service or "",
        )

    async def _encode(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        info: EngineInfo | None,
        body_bytes: int,
    ) -> EncodedPrompt:
        if info is None:
            return guess(body_bytes)
        hashing = Hashing(
            info.model_identity, info.block_size, info.hash_stride, info.max_model_len or None
        )
        digest = info.tokenizer_digest
        if body_bytes <= SMALL_BODY_BYTES or self._prompts.get(digest) is None:
            return await self._prompts.encode(request, digest, hashing, body_bytes)
        self._prompts.check_length(request, digest, hashing)  # before it waits
        num_bytes = encoding_bytes(request, body_bytes)
        if num_bytes > self._memory.encoding.max_bytes:
            self.num_not_encoded += 1
            return guess(body_bytes)
        async with room_for(self._memory.encoding, num_bytes):
            return await self._prompts.encode(request, digest, hashing, body_bytes)

    def pick(self, job: Job, exclude: frozenset[str]) -> Decision:
        """Raises as `Pool.pick`; whoever called it releases the decision's lease."""
        return self._pick(job.inference, exclude)

    def pick_to_resume(
        self, job: Job, exclude: frozenset[str], began: EngineInfo, resume: ResumeState
    ) -> Decision:
        """An engine that goes on with what `began` has said so far, exactly if there is one.

        Raises as `pick`.
        """
        inference, num_tokens = job.inference, max(map(len, resume.output_ids))
        limit = inference.max_tokens
        inference = msgspec.structs.replace(
            inference,
            num_prompt_tokens=inference.num_prompt_tokens + num_tokens,
            max_tokens=None if limit is None else max(limit - num_tokens, 1),
        )
        unable, inexact = set(exclude), set(exclude)
        for endpoint in self._pool.endpoints_of(job.model):
            if not _can_resume(endpoint, began):
                unable.add(endpoint.id)
            elif endpoint.info is None or endpoint.info.numerics != began.numerics:
                inexact.add(endpoint.id)
        try:
            return self._pick(inference, frozenset(unable | inexact))
        except ApiError:
            return self._pick(inference, frozenset(unable))

    def _pick(self, inference: InferenceRequest, exclude: frozenset[str]) -> Decision:
        decision = pick_around(self._pool, self._breakers, inference, exclude, self._now_s())
        self._decisions.append(decision)
        return decision

    def encoder_for(self, model: str) -> tuple[PromptEncoder, EngineInfo]:
        """Raises ModelNotFound, or Unavailable while the model's tokenizer is not here."""
        info = self._pool.usual_info(model)
        encoder = self._prompts.get(info.tokenizer_digest) if info else None
        if info is None or encoder is None:
            raise Unavailable(f"The tokenizer of `{model}` is not known yet.", retry_after_s=2)
        return encoder, info

    def decisions(self, request_id: str | None, limit: int) -> list[dict[str, Any]]:
        """The latest first."""
        found = (
            decision
            for decision in reversed(self._decisions)
            if request_id is None or decision.request_id == request_id
        )
        return [decision.to_dict() for decision, _ in zip(found, range(limit), strict=False)]


def says_token_ids(endpoint: Endpoint) -> bool:
    """Whether its streams can be continued elsewhere."""
    info = endpoint.info
    return (
        info is not None
        and info.takes_envelope
        and info.gives_token_ids
        and info.can_resume
        and bool(endpoint.origin.secret)
    )


def _can_resume(endpoint: Endpoint, began: EngineInfo) -> bool:
    info = endpoint.info
    return (
        info is not None
        and says_token_ids(endpoint)
        and info.model_identity == began.model_identity
        and info.tokenizer_digest == began.tokenizer_digest
    )
