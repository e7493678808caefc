"""Whether the step loop makes progress, and whether the engine may be sent requests. Pure: no
clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvoy_engine.messages import Load

# How much longer than expected a full step may take, and a first one whose pace nobody knows yet.
STALL_FACTOR = 5.0
UNKNOWN_PACE_FACTOR = 12.0


@dataclass(slots=True)
class CoreWatch:
    """Watches the core from the server's side: while work is outstanding, answers must come."""

    stall_timeout_s: float
    token_budget: int
    """Tokens of the largest step."""
    failure: str | None = None
    """Why the core is gone for good."""
    _waiting_since_s: float | None = None
    _prefill_tokens_per_s: float = 0.0

    def on_submit(self, now_s: float) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def on_output(self, load: Load, now_s: float, *, is_outstanding: bool) -> None:
        """`is_outstanding`: whether some request still waits for tokens."""
        self._waiting_since_s = now_s if is_outstanding else None
        self._prefill_tokens_per_s = load.prefill_tokens_per_s

    def on_failed(self, reason: str) -> None:
        self.failure = reason

    def last_step_age_s(self, now_s: float) -> float:
        """Since the loop last made progress while it had work; else 0."""
        return 0.0 if self._waiting_since_s is None else max(0.0, now_s - self._waiting_since_s)

    def stall_limit_s(self) -> float:
        """A slow machine's longest step is no stall: the limit follows the measured pace."""
        if self._prefill_tokens_per_s <= 0:
            return UNKNOWN_PACE_FACTOR * self.stall_timeout_s
        full_step_s = self.token_budget / self._prefill_tokens_per_s
        return max(self.stall_timeout_s, STALL_FACTOR * full_step_s)

    def problem(self, now_s: float) -> str | None:
        """What is wrong, in one line; None while the loop is alive."""
        if self.failure is not None:
            return f"The engine's core failed: {self.failure}"
        age_s = self.last_step_age_s(now_s)
        if age_s > self.stall_limit_s():
            return f"The engine's core has made no progress for {age_s:.0f} s."
        return None


class Phase(enum.Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(slots=True)
class Readiness:
    """The engine's phase, and the rule that no engine is ready before routers know it.

    Once loaded, it waits until every router with a live watch stream has acknowledged its first
    snapshot; where routers are expected it waits for the first one to come, too. After
    `router_wait_s` it waits no longer, and readiness once granted is never withdrawn for a router's
    sake.
    """

    expect_router: bool
    router_wait_s: float
    phase: Phase = Phase.LOADING
    _loaded_at_s: float = 0.0
    _granted: bool = False
    _acknowledged: dict[int, bool] = field(default_factory=dict)
    """Live watch streams, and whether each has acknowledged a snapshot."""

    def on_loaded(self, now_s: float) -> None:
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING
            self._loaded_at_s = now_s

    def on_drain(self) -> None:
        self.phase = Phase.DRAINING

    def on_watch_started(self, stream_id: int) -> None:
        self._acknowledged[stream_id] = False

    def on_snapshot_acknowledged(self, stream_id: int) -> None:
        self._acknowledged[stream_id] = True

    def on_watch_ended(self, stream_id: int) -> None:
        self._acknowledged.pop(stream_id, None)

    def is_ready(self, now_s: float) -> bool:
        if self.phase is not Phase.SERVING:
            return False
        if not self._granted:
            waited = now_s - self._loaded_at_s >= self.router_wait_s
            self._granted = waited or self._routers_know_us()
        return self._granted

    def _routers_know_us(self) -> bool:
        if self.expect_router and not self._acknowledged:
            return False
        return all(self._acknowledged.values())
