"""Amounts that fade with time, and how many tokens go on per second."""

from __future__ import annotations

import math

MEMORY_S = 10.0
"""What a rate saw so long ago counts for 1/e."""


class FadingSum:
    """A sum whose parts fade exponentially: what was added `memory_s` ago counts for 1/e."""

    __slots__ = ("_memory_s", "_updated_s", "value")

    def __init__(self, memory_s: float) -> None:
        self.value = 0.0
        """As of the last call."""
        self._memory_s = memory_s
        self._updated_s = 0.0

    def at(self, now_s: float) -> float:
        if self.value and now_s > self._updated_s:
            self.value *= math.exp((self._updated_s - now_s) / self._memory_s)
        self._updated_s = max(self._updated_s, now_s)
        return self.value

    def add(self, amount: float, now_s: float) -> None:
        self.value = self.at(now_s) + amount


class TokenRate:
    """An exponentially weighted mean that forgets its beginning: right from the first seconds."""

    __slots__ = ("_began_s", "_sum")

    def __init__(self) -> None:
        self._sum = FadingSum(MEMORY_S)
        self._began_s: float | None = None

    def add(self, tokens: float, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s
        self._sum.add(tokens, now_s)

    def per_s(self, now_s: float) -> float:
        """0 while nothing has gone on yet."""
        if self._began_s is None:
            return 0.0
        # Over a second at least: the very first request tells no rate.
        age_s = max(now_s - self._began_s, 1.0)
        return self._sum.at(now_s) / (MEMORY_S * -math.expm1(-age_s / MEMORY_S))
