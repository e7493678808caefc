"""A limit per minute: tokens drip into a bucket, and whoever finds some may take from it."""

from __future__ import annotations


class TokenBucket:
    """Begins full. What is taken may be more than is there: the debt has to drip in first."""

    __slots__ = ("_level", "_updated_s", "per_minute")

    def __init__(self, per_minute: float, now_s: float) -> None:
        """It holds what drips in within a minute."""
        assert per_minute > 0.0, "a limit of nothing is no limit per minute"
        self.per_minute = per_minute
        self._level = per_minute
        self._updated_s = now_s

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """How long until `amount` is there, or until it is full where it never holds as much."""
        self._drip(now_s)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60.0 / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """`amount` may be below 0: what was taken too much."""
        self._drip(now_s)
        self._level = min(self._level - amount, self.per_minute)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Another limit, with the same share of it used up."""
        self._drip(now_s)
        self._level *= per_minute / self.per_minute
        self.per_minute = per_minute

    def _drip(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._updated_s)
        self._updated_s = max(now_s, self._updated_s)
        self._level = min(self.per_minute, self._level + passed_s * self.per_minute / 60.0)
