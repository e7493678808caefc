"""How many tokens go on per second, as a mean over the last moments."""

from __future__ import annotations

import math

MEMORY_S = 10.0
"""What went on so long ago counts for 1/e."""


class TokenRate:
    """An exponentially weighted mean that forgets its beginning: right from the first seconds."""

    __slots__ = ("_began_s", "_sum", "_updated_s")

    def __init__(self) -> None:
        self._sum = 0.0
        self._began_s: float | None = None
        self._updated_s = 0.0

    def add(self, tokens: float, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = self._updated_s = now_s
        self._fade(now_s)
        self._sum += tokens

    def per_s(self, now_s: float) -> float:
        """0 while nothing has gone on yet."""
        if self._began_s is None:
            return 0.0
        self._fade(now_s)
        # Over a second at least: the very first request tells no rate.
        age_s = max(now_s - self._began_s, 1.0)
        return self._sum / (MEMORY_S * -math.expm1(-age_s / MEMORY_S))

    def _fade(self, now_s: float) -> None:
        self._sum *= math.exp((self._updated_s - now_s) / MEMORY_S)
        self._updated_s = now_s
