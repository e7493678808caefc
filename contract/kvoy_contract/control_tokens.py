"""Keeps what users write apart from the tokens that steer the model.

A chat template writes control tokens between the messages; a message that spells one must not
become one. So every control token in a user's text is broken by a sentinel character before the
template runs, the template's output is split at the control tokens that are whole (only the
template can have written those), and the sentinel is removed from the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from kvoy_contract.codec import AddedToken

_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")
# White space as the `tokenizers` library strips it beside a token; Python's own set differs.
_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACE_CHARS = "".join(chr(c) for c in range(0x3001) if re.match(f"[{_SPACE}]", chr(c)))


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A piece of a rendered prompt: either a control token, or text between two."""

    text: str
    control_id: int | None = None
    end: int = 0
    """Of a control token: where it ends in the rendered prompt."""


class ControlTokens:
    """The control tokens of one tokenizer: all special ones, and those in its chat template.

    `forgeable` text is what people write; an assistant's own earlier answers may hold tokens that
    are not special but that the template looks for, such as the end of its thinking.
    """

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        tokens = [
            token
            for token in added
            # A single character cannot be broken; no known model uses one to steer.
            if len(token.content) > 1
            and (token.is_special or (token.content in template and not token.content.isspace()))
        ]
        self._by_content = {token.content: token for token in tokens}
        self.ids = frozenset(token.id for token in tokens)
        self.are_separate = not any(
            one != other and one in other for one in self._by_content for other in self._by_content
        )
        """Whether none is a part of another: where one ends does not depend on what follows."""
        everything = [token.content for token in tokens]
        special = [token.content for token in tokens if token.is_special]
        self._split_pattern = _any_of(everything)
        self._guards = {False: _Guard(special), True: _Guard(everything)}

    def __iter__(self) -> Iterator[AddedToken]:
        return iter(self._by_content.values())

    def occur_in(self, text: str) -> bool:
        return self._split_pattern is not None and bool(self._split_pattern.search(text))

    def count(self, text: str) -> int:
        """Whole control tokens in it."""
        return sum(1 for _ in self._split_pattern.finditer(text)) if self._split_pattern else 0

    def ends_cleanly(self, segment: Segment) -> bool:
        """Whether it is a control token that leaves alone what follows it."""
        token = self._by_content.get(segment.text) if segment.control_id is not None else None
        return token is not None and not token.takes_right_space

    def shield(self, text: str, sentinel: str, *, forgeable: bool) -> str:
        """`text` with the sentinel inside every control token, and where one could form at its
        ends.
        """
        return self._guards[forgeable].shield(text, sentinel)

    def split(self, rendered: str, start: int = 0) -> list[Segment]:
        """The pieces of a rendered prompt in order, from `start` on, where a token has ended;
        sentinels are still in the text pieces.
        """
        if self._split_pattern is None:
            return [Segment(rendered[start:])] if rendered[start:] else []
        segments: list[Segment] = []
        for match in self._split_pattern.finditer(rendered, start):
            token = self._by_content[match.group()]
            text = rendered[start : match.start()]
            if token.takes_left_space:
                text = text.rstrip(_SPACE_CHARS)
            if text:
                segments.append(Segment(text))
            segments.append(Segment(token.content, token.id, match.end()))
            start = match.end()
            if token.takes_right_space:
                start = _after_space(rendered, start)
        if start < len(rendered):
            segments.append(Segment(rendered[start:]))
        return segments


class _Guard:
    """Breaks one set of tokens in texts."""

    def __init__(self, contents: list[str]) -> None:
        self._pattern = _any_of(contents)
        self._overlapping = _any_of(contents, lookahead=True)
        self._heads = frozenset(c[:k] for c in contents for k in range(1, len(c)))
        self._tails = frozenset(c[k:] for c in contents for k in range(1, len(c)))
        self._max_part = max((len(c) - 1 for c in contents), default=0)
        # Every head begins as some token does and every tail ends as one: most texts have no such
        # character near their ends, and one search tells.
        self._first = _one_of({c[0] for c in contents})
        self._last = _one_of({c[-1] for c in contents})

    def shield(self, text: str, sentinel: str) -> str:
        if self._pattern is None:
            return text
        if self._pattern.search(text):
            assert self._overlapping is not None
            text = self._overlapping.sub(lambda match: match.group() + sentinel, text)
        return self._shield_ends(text, sentinel)

    def _shield_ends(self, text: str, sentinel: str) -> str:
        """A token must not form together with what the template puts beside the text either."""
        bare = text.strip()
        size, reach = len(bare), self._max_part
        lengths = range(1, min(reach, size) + 1)
        if self._first.search(bare, max(0, size - reach)) and any(
            bare[-k:] in self._heads for k in lengths
        ):
            end = len(text.rstrip())
            text = text[:end] + sentinel + text[end:]
        if self._last.search(bare, 0, reach) and any(bare[:k] in self._tails for k in lengths):
            start = len(text) - len(text.lstrip())
            text = text[:start] + sentinel + text[start:]
        return text


def unused_sentinels(texts: Iterable[str], count: int) -> list[str]:
    """Private-use characters that occur in none of the texts. Raises ValueError when all occur."""
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(_PRIVATE_USE.findall(text))
    free = (char for char in map(chr, range(0xE000, 0xF900)) if char not in used)
    found = list(islice(free, count))
    if len(found) < count:
        raise ValueError("the text uses every private-use character")
    return found


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """JSON-like data with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def strings_in(value: Any) -> list[str]:
    """Every string in JSON-like data, keys included."""
    found: list[str] = []
    _collect_strings(value, found)
    return found


def _collect_strings(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            found.append(key)
            _collect_strings(item, found)
    elif isinstance(value, list):
        for item in value:
            _collect_strings(item, found)


def _after_space(text: str, start: int) -> int:
    while start < len(text) and text[start] in _SPACE_CHARS:
        start += 1
    return start


def _one_of(chars: set[str]) -> re.Pattern[str]:
    """Matches one of these characters; nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(chars))) or "(?!)")


def _any_of(contents: list[str], lookahead: bool = False) -> re.Pattern[str] | None:
    """Matches the longest of these strings at a position, or one character that begins one of them.

    The alternatives are folded into a trie: hundreds of tokens with a common beginning cost one
    comparison per character of a text, not hundreds.
    """
    if not contents:
        return None
    trie: dict[str, Any] = {}
    for content in contents:
        node = trie
        for char in content:
            node = node.setdefault(char, {})
        node[""] = {}
    pattern = _trie_pattern(trie)
    return re.compile(f"(?={pattern}).", re.DOTALL) if lookahead else re.compile(pattern)


def _trie_pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _trie_pattern(child) for char, child in node.items() if char]
    if not branches:
        return ""
    is_end = "" in node
    if len(branches) == 1 and not is_end:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if is_end else "")
