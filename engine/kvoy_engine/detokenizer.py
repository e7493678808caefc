"""Token ids to text, as they come: no half characters, nothing beyond a stop string.

One `Detokenizer` belongs to one choice. Its output depends on the ids alone, not on how they were
grouped: the pieces of a stream join to the text of the same answer without streaming, and after
`replay` a sequence that began on another engine goes on exactly.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvoy_contract.codec import Codec
from kvoy_contract.prompt import PromptEncoder
from kvoy_engine.stop_strings import StopStrings

REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 6
"""Context before the first token, for tokenizers whose tokens look different at a text's beginning.
"""
_MAX_UNFINISHED_TOKENS = 8
"""A character has at most four bytes; after so many tokens an unfinished one is not one."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """One output token, for logprobs."""

    token_id: int
    text: str
    """The token by itself; U+FFFD stands for a part of a character."""
    data: bytes
    """What it adds to the text; joined over a choice they are the text in UTF-8."""
    offset: int
    """Characters of the choice's text before it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    """What can be shown now; an unfinished character or a possible stop string is held back."""
    tokens: tuple[TokenText, ...] = ()
    """The tokens that were taken; those behind a stop string are not."""
    stop_string: str | None = None
    """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None


class _TextSource(Protocol):
    def push(self, token_id: int, data: bytes) -> str:
        """The characters that this token completes; `data` are its bytes."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        ...


class Detokenizer:
    """The text of one choice."""

    def __init__(
        self,
        encoder: PromptEncoder,
        prompt_ids: Sequence[int],
        stop_strings: Sequence[str] | StopStrings = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """A stop string that ends within the first `min_tokens` output tokens does not count."""
        self._encoder = encoder
        self._hidden_ids = encoder.special_ids if skip_special_tokens else frozenset[int]()
        self._source = _text_source(encoder.codec, prompt_ids, self._hidden_ids)
        if not isinstance(stop_strings, StopStrings):
            stop_strings = StopStrings(stop_strings)
        self._stops = stop_strings
        self._strips_space = encoder.codec.strips_first_space and not prompt_ids
        self._state = StopStrings.START
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._num_told = 0
        """Of the held characters, those that another engine has shown."""
        self.num_chars = 0
        """Of the text of the tokens that were taken, shown or not."""
        self._ended = False
        self.num_tokens = 0
        """Output tokens that were taken so far."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next output tokens. After a stop string, nothing more is taken."""
        tokens: list[TokenText] = []
        shown: list[str] = []
        for token_id in token_ids:
            if self._ended:
                break
            token = self._describe(token_id)
            tokens.append(token)
            self.num_tokens += 1
            is_hidden = token_id in self._hidden_ids
            piece = "" if is_hidden else self._source.push(token_id, token.data)
            self.num_chars += len(piece)
            stop = self._find_stop(piece)
            if stop is not None:
                return TextDelta("".join(shown) + self._end_at(stop), tuple(tokens), stop)
            shown.append(self._release())
        return TextDelta("".join(shown), tuple(tokens))

    def replay(self, token_ids: Sequence[int], *, is_all_shown: bool = False) -> TextDelta:
        """Take tokens that another engine has told of; returns the text that it has shown.

        That is what these tokens alone allow to show, or, with `is_all_shown`, all their text:
        later tokens may have proved that its end is no stop string's beginning.
        """
        delta = self.push(token_ids)
        if not is_all_shown or delta.stopped:
            return delta
        self._num_told = len(self._held)
        return replace(delta, text=delta.text + self._held)

    def finish(self) -> TextDelta:
        """The text that was held back, once no token follows; empty after a stop string."""
        if self._ended:
            return TextDelta("")
        self._ended = True
        text = self._held + self._source.flush()
        self._held = ""
        return TextDelta(self._untold(text))

    def _describe(self, token_id: int) -> TokenText:
        data = self._encoder.token_bytes(token_id)
        text = data.decode("utf-8", "replace")
        if token_id in self._hidden_ids:
            return TokenText(token_id, text, b"", self.num_chars)
        if self._strips_space:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return TokenText(token_id, text, data, self.num_chars)

    def _find_stop(self, piece: str) -> str | None:
        """Add a piece to the held text, up to the end of the first stop string in it."""
        if not self._stops:
            self._held += piece
            return None
        state = self._state
        may_stop = self.num_tokens > self._min_tokens
        for index, char in enumerate(piece):
            state = self._stops.advance(state, char)
            length = self._stops.num_matched(state)
            if length and may_stop:
                self._held += piece[: index + 1]
                return self._held[-length:]
        self._state = state
        self._held += piece
        return None

    def _end_at(self, stop: str) -> str:
        self._ended = True
        text = self._held if self._include_stop else self._held[: -len(stop)]
        self._held = ""
        return self._untold(text)

    def _release(self) -> str:
        """The held text without the end that may become a stop string."""
        end = len(self._held) - self._stops.num_open(self._state)
        text, self._held = self._held[:end], self._held[end:]
        return self._untold(text)

    def _untold(self, text: str) -> str:
        """Of text that was held, what nobody has shown."""
        num_told = min(self._num_told, len(text))
        self._num_told -= num_told
        return text[num_told:]


def _text_source(
    codec: Codec, prompt_ids: Sequence[int], hidden_ids: frozenset[int]
) -> _TextSource:
    if codec.is_byte_exact:
        return _ByteText(codec, prompt_ids, hidden_ids)
    return _WindowText(codec, prompt_ids, hidden_ids)


class _ByteText:
    """For tokenizers whose tokens are bytes: decodes UTF-8 as it comes."""

    def __init__(self, codec: Codec, prompt_ids: Sequence[int], hidden_ids: frozenset[int]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt of token ids may end in the middle of a character that the output completes.
        tail = [i for i in prompt_ids[-_WINDOW_TOKENS:] if i not in hidden_ids]
        self._decoder.decode(b"".join(map(codec.token_bytes, tail)))

    def push(self, token_id: int, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowText:
    """For all other tokenizers: decodes a window of tokens with and without the new ones."""

    def __init__(self, codec: Codec, prompt_ids: Sequence[int], hidden_ids: frozenset[int]) -> None:
        self._codec = codec
        self._skips = bool(hidden_ids)
        self._ids = list(prompt_ids[-_WINDOW_TOKENS:])
        self._num_shown = len(self._ids)

    def push(self, token_id: int, data: bytes) -> str:
        self._ids.append(token_id)
        if len(self._ids) - self._num_shown >= _MAX_UNFINISHED_TOKENS:
            return self._take(self._new_text())
        text = self._new_text()
        return "" if text.endswith(REPLACEMENT) else self._take(text)

    def flush(self) -> str:
        return self._take(self._new_text()) if len(self._ids) > self._num_shown else ""

    def _new_text(self) -> str:
        before = self._codec.decode(self._ids[: self._num_shown], self._skips)
        return self._codec.decode(self._ids, self._skips)[len(before) :]

    def _take(self, text: str) -> str:
        # The tokens just shown are the context of the next ones.
        del self._ids[: self._num_shown]
        self._num_shown = len(self._ids)
        return text
