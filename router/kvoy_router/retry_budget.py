"""How much extra work failing engines may cause: a token bucket, filled by the traffic itself.

Every request puts a share of a token in, every further attempt takes a whole one out. So extra
attempts stay a share of the traffic, while the bucket's content covers the sudden loss of an engine
with all its streams. A slow drip refills it where there is little traffic.

The idea is Finagle's retry budget (twitter.github.io/finagle/guide/Clients.html#retries)."""

from __future__ import annotations


class RetryBudget:
    """Time is seconds on the caller's clock."""

    __slots__ = ("_tokens", "_updated_s", "burst", "num_refused", "per_s", "share")

    def __init__(self, share: float, burst: float, per_s: float = 1.0) -> None:
        """`share`: tokens per request; `burst`: the most that it holds, and what it begins with;
        `per_s`: tokens per second that come without traffic. All may be replaced at any time."""
        self.share = share
        self.burst = burst
        self.per_s = per_s
        self._tokens = burst
        self._updated_s: float | None = None
        self.num_refused = 0

    def on_request(self) -> None:
        self._tokens = min(self.burst, self._tokens + self.share)

    def take(self, now_s: float) -> bool:
        """Whether one further attempt may be made; it is counted."""
        if self._updated_s is not None:
            self._tokens += max(0.0, now_s - self._updated_s) * self.per_s
        self._updated_s = now_s
        self._tokens = min(self.burst, self._tokens)
        if self._tokens < 1:
            self.num_refused += 1
            return False
        self._tokens -= 1
        return True

    @property
    def tokens(self) -> float:
        """Attempts that are left, as of the last event."""
        return self._tokens
