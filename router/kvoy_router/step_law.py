"""How long a decode step takes, learnt from reports: a base, and a part per context token."""

from __future__ import annotations

MIN_SPREAD_TOKENS = 1_000
"""Reports closer together than this in context say nothing about the slope."""


class StepLaw:
    """The line through the shortest step that was ever reported and the latest one.

    Until two reports lie far enough apart, reading a full KV cache is assumed to take as long as
    the rest of the step: engines are commonly sized so that weights and cache are of the same
    order."""

    __slots__ = ("_base_s", "_base_tokens", "_slope")

    def __init__(self) -> None:
        self._base_s = 0.0
        self._base_tokens = 0
        self._slope: float | None = None

    def learn(self, step_s: float, context_tokens: int) -> None:
        """`step_s` of 0 means that the engine has not measured any."""
        if step_s <= 0.0:
            return
        if self._base_s == 0.0 or step_s < self._base_s:
            self._base_s = step_s
            self._base_tokens = context_tokens
        elif context_tokens > 2 * self._base_tokens + MIN_SPREAD_TOKENS:
            self._slope = (step_s - self._base_s) / (context_tokens - self._base_tokens)

    def at(
        self, context_tokens: int, default_step_s: float, total_tokens: int
    ) -> tuple[float, float]:
        """(seconds of a step that reads so much context, seconds per further token)."""
        base_s = self._base_s or default_step_s
        slope = self._slope
        if slope is None:
            slope = base_s / total_tokens if total_tokens else 0.0
        return max(base_s, base_s + slope * (context_tokens - self._base_tokens)), slope
