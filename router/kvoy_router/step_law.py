"""How long a decode step takes, learnt from reports: a part per context token, and the rest."""

from __future__ import annotations

KEEP = 0.998
"""Share of the old knowledge about the slope that is left after each report: the last 500 count."""
LEVEL_MOVE = 0.2
"""How far one report moves the level: an engine that slows down is seen within a few."""
SPREAD_SHARE = 0.02
"""The assumed slope counts as much as reports whose contexts are spread by so much of the cache."""


class StepLaw:
    """A line through the reports: least squares for its slope, the latest ones for its level.

    A reported time is that of the last steps that only decoded. While many prompts arrive there are
    few of those, and the report's context has grown beyond what they read: an engine that is being
    flooded looks faster than it is. A slope from the latest report alone would therefore call for
    more of the flood, so it comes from many, and a report that repeats its step time, without a new
    measurement, teaches nothing.

    Where reports do not differ in context, reading a full KV cache is assumed to take as long as
    the rest of the step: engines are commonly sized so that weights and cache are of the same
    order.
    """

    __slots__ = (
        "_covariance",
        "_last_s",
        "_level_s",
        "_level_tokens",
        "_mean_s",
        "_mean_tokens",
        "_num",
        "_shortest_s",
        "_variance",
    )

    def __init__(self) -> None:
        self._num = 0.0
        """Reports, faded."""
        self._mean_tokens = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        """Of the context, in tokens², and of it and the step, in tokens x seconds."""
        self._level_tokens = self._level_s = 0.0
        """A point of the line now."""
        self._last_s = 0.0
        self._shortest_s = 0.0

    def learn(self, step_s: float, context_tokens: int) -> None:
        """`step_s` of 0 means that the engine has not measured any."""
        if step_s <= 0.0 or step_s == self._last_s:
            return
        self._last_s = step_s
        if self._num == 0.0:
            self._level_tokens, self._level_s = context_tokens, step_s
            self._shortest_s = step_s
        self._shortest_s = min(self._shortest_s, step_s)
        self._level_tokens += LEVEL_MOVE * (context_tokens - self._level_tokens)
        self._level_s += LEVEL_MOVE * (step_s - self._level_s)
        self._num = self._num * KEEP + 1.0
        part = 1.0 / self._num
        tokens, seconds = context_tokens - self._mean_tokens, step_s - self._mean_s
        self._mean_tokens += part * tokens
        self._mean_s += part * seconds
        self._variance = (1.0 - part) * (self._variance + part * tokens * tokens)
        self._covariance = (1.0 - part) * (self._covariance + part * tokens * seconds)

    def at(
        self, context_tokens: int, default_step_s: float, total_tokens: int
    ) -> tuple[float, float]:
        """(seconds of a step that reads so much context, seconds per further token)."""
        shortest_s = self._shortest_s or default_step_s
        slope = shortest_s / total_tokens if total_tokens else 0.0
        if self._variance > 0.0:
            assumed = (SPREAD_SHARE * total_tokens) ** 2
            slope = (self._covariance + assumed * slope) / (self._variance + assumed)
            slope = max(slope, 0.0)
        level_s = self._level_s or default_step_s
        return max(shortest_s, level_s + slope * (context_tokens - self._level_tokens)), slope
