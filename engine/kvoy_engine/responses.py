"""Pieces of text to OpenAI's bodies and chunks, for both endpoints.

`ChatResponder` and `CompletionResponder` are the two shapes of an answer; neither knows where its
pieces come from. A stream's chunks of one moment are joined, so that they cost one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from kvoy_contract import sse
from kvoy_contract.openai_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    TokenLogprob,
    TopLogprob,
    encode,
)
from kvoy_engine.pieces import Piece, ScoredToken


class TokenTexts(Protocol):
    """How single tokens are shown."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ResponseHead:
    """The fields that every chunk and body of one answer repeats."""

    __slots__ = ("created", "id", "model")

    def __init__(self, response_id: str, created: int, model: str) -> None:
        """`created`: seconds since 1970."""
        self.id = response_id
        self.created = created
        self.model = model


class Responder(Protocol):
    def chunk(self, piece: Piece, usage: CompletionUsage | UnsetType | None) -> bytes:
        """One piece as a server-sent event; empty when it has nothing to say."""
        ...

    def usage_chunk(self, usage: CompletionUsage) -> bytes:
        """The chunk without choices that ends a stream whose client asked for usage."""
        ...

    def body(self, choices: Sequence[Piece], usage: CompletionUsage) -> bytes:
        """The whole answer; each choice is one piece with all its text."""
        ...


class ChatResponder:
    def __init__(
        self,
        head: ResponseHead,
        tokens: TokenTexts,
        with_logprobs: bool,
        resumed: frozenset[int] = frozenset(),
    ) -> None:
        """Choices in `resumed` began elsewhere, where their role was sent."""
        self._head = head
        self._tokens = tokens
        self._with_logprobs = with_logprobs
        self._begun = set(resumed)

    def chunk(self, piece: Piece, usage: CompletionUsage | UnsetType | None) -> bytes:
        is_first = piece.index not in self._begun
        if not is_first and not piece.text and not piece.scored and piece.finish_reason is None:
            return b""
        self._begun.add(piece.index)
        has_content = bool(piece.text) or is_first or bool(piece.scored)
        delta = ChatDelta(
            role="assistant" if is_first else UNSET,
            content=piece.text if has_content else UNSET,
        )
        choice = ChatChunkChoice(piece.index, delta, self._logprobs(piece), piece.finish_reason)
        return self._event([choice], usage)

    def usage_chunk(self, usage: CompletionUsage) -> bytes:
        return self._event([], usage)

    def body(self, choices: Sequence[Piece], usage: CompletionUsage) -> bytes:
        head = self._head
        return encode(
            ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=[
                    ChatChoice(
                        piece.index,
                        ChatMessage(piece.text),
                        piece.finish_reason or "length",
                        self._logprobs(piece),
                    )
                    for piece in choices
                ],
                usage=usage,
            )
        )

    def _event(
        self, choices: list[ChatChunkChoice], usage: CompletionUsage | UnsetType | None
    ) -> bytes:
        head = self._head
        chunk = ChatCompletionChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
        )
        return sse.data_event(encode(chunk))

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return ChatLogprobs([self._scored(token) for token in piece.scored])

    def _scored(self, token: ScoredToken) -> TokenLogprob:
        assert token.logprob is not None, "only echoed prompts have tokens without logprob"
        return TokenLogprob(
            token.token.text,
            token.logprob.logprob,
            list(token.token.data),
            [
                TopLogprob(
                    self._tokens.token_text(token_id),
                    logprob,
                    list(self._tokens.token_bytes(token_id)),
                )
                for token_id, logprob in token.logprob.top
            ],
        )


class CompletionResponder:
    def __init__(self, head: ResponseHead, tokens: TokenTexts, with_logprobs: bool) -> None:
        self._head = head
        self._tokens = tokens
        self._with_logprobs = with_logprobs

    def chunk(self, piece: Piece, usage: CompletionUsage | UnsetType | None) -> bytes:
        if not piece.text and not piece.scored and piece.finish_reason is None:
            return b""
        return sse.data_event(self._encode([self._choice(piece)], usage))

    def usage_chunk(self, usage: CompletionUsage) -> bytes:
        return sse.data_event(self._encode([], usage))

    def body(self, choices: Sequence[Piece], usage: CompletionUsage) -> bytes:
        return self._encode([self._choice(piece) for piece in choices], usage)

    def _encode(
        self, choices: list[CompletionChoice], usage: CompletionUsage | UnsetType | None
    ) -> bytes:
        head = self._head
        return encode(
            Completion(
                id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
            )
        )

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = self._logprobs(piece.scored) if self._with_logprobs else None
        return CompletionChoice(piece.index, piece.text, logprobs, piece.finish_reason)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token.token.text for token in scored],
            token_logprobs=[token.logprob.logprob if token.logprob else None for token in scored],
            top_logprobs=[self._top(token) for token in scored],
            text_offset=[token.offset for token in scored],
        )

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The alternatives, best first, and the sampled token itself where it is none of them."""
        if token.logprob is None:
            return None
        top = {self._tokens.token_text(token_id): value for token_id, value in token.logprob.top}
        top.setdefault(token.token.text, token.logprob.logprob)
        return top
