"""The product of generation that both endpoints build their answers from."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoy_engine.detokenizer import TokenText
from kvoy_engine.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of an answer with its text and probability, where logprobs were asked for."""

    token: TokenText
    offset: int
    """Characters of the choice's text before it, an echoed prompt included."""
    logprob: TokenLogprob | None
    """None for the first token of an echoed prompt."""


@dataclass(slots=True)
class Piece:
    """What one choice has to say at a time: some text, and with the last piece why it ended."""

    index: int
    """Of the choice, in the answer."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Newly generated, whether or not their text is in this piece."""
    told_ids: list[int] = field(default_factory=list)
    """What this piece settles: with these another engine goes on behind it, saying nothing twice
    and leaving nothing out. Tokens whose logprobs are held back with their text are not in yet."""
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None
