"""Finds stop strings in a text that arrives in pieces, in constant time per character."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An Aho-Corasick automaton over one request's stop strings.

    A state is the longest end of the text so far that begins some stop string. `num_open(state)` is
    its length: exactly so many characters may yet turn out to belong to a stop string. States are
    plain ints, so the choices of a request share one automaton.
    """

    START = 0

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._match = [0]
        for string in strings:
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = following
        self._match[state] = len(string)

    def _link(self) -> None:
        """Breadth first: a state falls back to the next shorter end that also begins a string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                queue.append(following)
                self._fallback[following] = self.advance(self._fallback[state], char)
            if not self._match[state]:
                self._match[state] = self._match[self._fallback[state]]

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def num_matched(self, state: int) -> int:
        """Length of the longest stop string that ends here; 0 when none does."""
        return self._match[state]

    def num_open(self, state: int) -> int:
        return self._depth[state]
