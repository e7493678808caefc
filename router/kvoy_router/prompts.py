"""Tokenizers by digest, and the turning of a request's prompt into token ids off the event loop.

Engines hand their tokenizer over gRPC; engines with an equal digest share one encoder here. What is
new of a prompt is encoded in a thread where it is long, because the event loop carries everybody
else's tokens meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard, TypeVar

import msgspec

from kvoy_contract import known_prefixes, segment_cache
from kvoy_contract.blocks import (
    BlockHash,
    pack_tokens,
    packed_block_hashes,
    seed_hash,
    stride_hashes,
)
from kvoy_contract.known_prefixes import KnownPrefix
from kvoy_contract.openai import ChatCompletionRequest, CompletionRequest
from kvoy_contract.prompt import BegunChat, PromptEncoder, TokenizerFiles
from kvoy_router.body_memory import SHORT_BODY_BYTES
from kvoy_router.router_memory import FreeMemory

T = TypeVar("T")

INLINE_BODY_BYTES = SHORT_BODY_BYTES
"""Up to so much, encoding takes less than switching to a thread and back."""
_RENDERED_BODY_BYTES = 64 * 1024
_RENDERED_MESSAGES = 64
"""A chat of no more of both is rendered at once, which takes about ten microseconds a message, to
see how much of it is new: a known conversation's next turn needs no thread."""
_INLINE_NEW_CHARS = 8 * 1024
"""Behind what is known: an answer and the next question."""
_LARGE_BODY_BYTES = 256 * 1024
"""To encode more leaves tens of megabytes free that the C library would keep."""
_NUM_THREADS = 2
_MAX_NOTES = 8
"""Tenants whose hashes are kept with one beginning of a prompt."""


class Hashing(msgspec.Struct, frozen=True, gc=False):
    """How the engines of a model turn prompts into block hashes."""

    model_identity: str
    block_size: int
    stride: int
    max_model_len: int | None
    """Longer prompts are refused before they are encoded."""


class EncodedPrompt(msgspec.Struct, frozen=True, gc=False):
    num_tokens: int
    """Of the longest prompt, where a request has several."""
    packed: bytes
    """`blocks.pack_tokens`; empty when the engine has to encode: several prompts, no tokenizer."""
    digest: str
    hashes: tuple[BlockHash, ...] = ()


class Prompts:
    """All encoders of this router. `add` and `close` are the only writers."""

    def __init__(self, max_known_bytes: int = known_prefixes.DEFAULT_MAX_BYTES) -> None:
        """`max_known_bytes`: for beginnings of chats of each encoder, and half as much for pieces,
        where their own bounds are not lower."""
        self._known_bytes = min(max_known_bytes, known_prefixes.DEFAULT_MAX_BYTES)
        self._segment_bytes = min(max_known_bytes // 2, segment_cache.DEFAULT_MAX_BYTES)
        self._encoders: dict[str, PromptEncoder] = {}
        self._pending: dict[str, asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts")
        self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._free_memory = FreeMemory()

    @property
    def digests(self) -> set[str]:
        return set(self._encoders)

    @property
    def segment_bytes(self) -> int:
        """Memory of the remembered pieces of prompts, of all encoders."""
        return sum(encoder.cache.num_bytes for encoder in self._encoders.values())

    @property
    def known_prefix_bytes(self) -> int:
        """Likewise of the remembered beginnings of chats."""
        return sum(encoder.known_prefixes.num_bytes for encoder in self._encoders.values())

    def get(self, digest: str) -> PromptEncoder | None:
        return self._encoders.get(digest)

    def lock(self, digest: str) -> asyncio.Lock:
        """Held while a digest's files are fetched, so that a fleet fetches them once."""
        return self._pending.setdefault(digest, asyncio.Lock())

    async def add(self, files: TokenizerFiles, vocab_size: int | None) -> None:
        """Make an encoder of the files; ids are checked against the model's `vocab_size`.

        Raises ValueError when the files are not a tokenizer.
        """
        encoder = await self.in_thread(
            lambda: PromptEncoder(
                files,
                vocab_size=vocab_size,
                cache_bytes=self._segment_bytes,
                known_bytes=self._known_bytes,
            )
        )
        self._encoders[files.digest] = encoder

    def keep_only(self, digests: set[str]) -> None:
        """Forget the tokenizers of models that are gone."""
        for digest in self._encoders.keys() - digests:
            del self._encoders[digest]
            self._pending.pop(digest, None)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def aside(self, work: Callable[[], T]) -> T:
        """As `in_thread`, for what is no request to an engine: prompts find their threads free."""

        def clean_work() -> T:
            try:
                return work()
            finally:
                self._free_memory.give_back()

        return await asyncio.get_running_loop().run_in_executor(self._side_thread, clean_work)

    async def encode(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        digest: str,
        hashing: Hashing,
        body_bytes: int,
    ) -> EncodedPrompt:
        """Token ids and hashes of the request's prompt. Raises BadRequest as `PromptEncoder`
        does."""
        encoder = self._encoders.get(digest)
        if encoder is None:
            return guess(body_bytes)
        if body_bytes <= INLINE_BODY_BYTES:
            return encode(request, encoder, digest, hashing)
        begun: BegunChat | None = None
        if body_bytes <= _RENDERED_BODY_BYTES and _has_few_messages(request):
            begun = encoder.begin_chat(request, hashing.max_model_len)
            if begun.known is not None and begun.num_new_chars <= _INLINE_NEW_CHARS:
                return encode(request, encoder, digest, hashing, begun)
        else:
            encoder.check_length(request, hashing.max_model_len)  # before it waits for a thread

        def work() -> EncodedPrompt:
            try:
                return encode(request, encoder, digest, hashing, begun)
            finally:
                if body_bytes > _LARGE_BODY_BYTES:
                    self._free_memory.give_back()

        return await self.in_thread(work)

    def check_length(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        digest: str,
        hashing: Hashing,
    ) -> None:
        """Raises ContextLengthExceeded for what is far too long."""
        if (encoder := self._encoders.get(digest)) is not None:
            encoder.check_length(request, hashing.max_model_len)

    def close(self) -> None:
        for threads in (self._threads, self._side_thread):
            threads.shutdown(wait=False, cancel_futures=True)


def _has_few_messages(
    request: ChatCompletionRequest | CompletionRequest,
) -> TypeGuard[ChatCompletionRequest]:
    return (
        isinstance(request, ChatCompletionRequest) and len(request.messages) <= _RENDERED_MESSAGES
    )


def guess(body_bytes: int) -> EncodedPrompt:
    """Without a tokenizer: about four bytes a token, and no hashes."""
    return EncodedPrompt(max(1, body_bytes // 4), b"", "")


def encode(
    request: ChatCompletionRequest | CompletionRequest,
    encoder: PromptEncoder,
    digest: str,
    hashing: Hashing,
    begun: BegunChat | None = None,
) -> EncodedPrompt:
    """`begun`: of this very request, where that is done.

    Of several prompts the first stands for all in the hashes: they go to one engine together."""
    known: KnownPrefix | None = None
    if isinstance(request, ChatCompletionRequest):
        chat = encoder.finish_chat(begun or encoder.begin_chat(request, hashing.max_model_len))
        prompts: Sequence[Sequence[int]] = [chat.ids]
        known = chat.known
    else:
        prompts = encoder.encode_prompts(request, hashing.max_model_len)
    seed = seed_hash(hashing.model_identity, cache_salt=request.cache_salt or "")
    packed = pack_tokens(prompts[0])
    return EncodedPrompt(
        num_tokens=max(map(len, prompts)),
        packed=packed if len(prompts) == 1 else b"",
        digest=digest,
        hashes=_hash(packed, seed, hashing, known),
    )


def _hash(
    packed: bytes, seed: BlockHash, hashing: Hashing, known: KnownPrefix | None
) -> tuple[BlockHash, ...]:
    """Of each full stride. Those of a known beginning are kept with it, under whatever else they
    depend on."""
    key = (seed, hashing.block_size, hashing.stride)
    kept = known.notes.get(key) if known else None
    begun: tuple[BlockHash, ...] = kept if isinstance(kept, tuple) else ()
    blocks_per_stride = hashing.stride // hashing.block_size
    rest = packed_block_hashes(
        begun[-1] if begun else seed, packed, hashing.block_size, len(begun) * blocks_per_stride
    )
    hashes = begun + tuple(stride_hashes(rest, hashing.block_size, hashing.stride))
    if known and (key in known.notes or len(known.notes) < _MAX_NOTES):
        whole = hashes[: len(known.ids) // hashing.stride]
        if len(whole) > len(begun):
            known.notes[key] = whole
    return hashes
