"""The bodies that servers of the OpenAI API answer with; `encode` makes their bytes.

`UNSET` fields are left out, `None` fields are `null`: the official client tells the two apart.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class CompletionUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> CompletionUsage:
    """The prompt counts once however many choices there are; completions are summed over them."""
    return CompletionUsage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
    )


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    """The token's own bytes; joined over a choice they are its text in UTF-8."""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    """Once per choice, in its first chunk."""
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    """Null until the last chunk of this choice."""


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    """Where the client asked for usage: null, and the numbers in a last chunk without choices."""
    system_fingerprint: str | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    """The first token of an echoed prompt has none."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Characters from the beginning of the choice's text to each token."""


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, and also each chunk of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvoy"
    root: str | None = None
    """The name that this one is an alias of."""
    max_model_len: int | None = None
    """Tokens, prompt and completion together."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: str = "list"


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


_encoder = msgspec.json.Encoder()


def encode(response: msgspec.Struct) -> bytes:
    """UTF-8 JSON without a newline in it, fit for one `data:` line."""
    return _encoder.encode(response)
