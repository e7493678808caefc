"""When a stream whose first byte is late is asked of a second engine as well. Off unless asked for.

How late a first byte is counts from what was predicted at the decision, since a long prompt is not
late: the delay is that prediction and the 95th percentile of how much later than theirs the latest
streams of the model began (Dean and Barroso, *The Tail at Scale*, 2013, hedge at the 95th
percentile of the plain latency, for requests of one size). Pure: time comes with what is noted."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from kvoy_router.decision import Decision

QUANTILE = 0.95
WINDOW = 512
"""Streams of one model that are looked at: some minutes of a busy one."""
LEAST = 64
"""So many are needed to speak of a percentile."""
MAX_MODELS = 256
_RENEW_EVERY = 32


class HedgeMode(enum.StrEnum):
    OFF = "off"
    OBSERVED = "observed"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class HedgeOptions:
    mode: HedgeMode = HedgeMode.OFF
    after_s: float = 1.0
    """The delay of `fixed`; of `observed` the least."""


class Lateness:
    """How much later than predicted the latest streams of one model began, in seconds."""

    __slots__ = ("_num_new", "_quantile_s", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._num_new = 0
        self._quantile_s: float | None = None

    def note(self, late_s: float) -> None:
        self._values.append(late_s)
        self._num_new += 1
        if self._num_new >= _RENEW_EVERY and len(self._values) >= LEAST:
            self._num_new = 0
            ordered = sorted(self._values)
            self._quantile_s = ordered[int(QUANTILE * len(ordered))]

    @property
    def quantile_s(self) -> float | None:
        """None until enough is known."""
        return self._quantile_s


class Hedging:
    """One for a router; `options` may be replaced at any time."""

    def __init__(self, options: HedgeOptions) -> None:
        self.options = options
        self._models: dict[str, Lateness] = {}

    @property
    def is_on(self) -> bool:
        return self.options.mode is not HedgeMode.OFF

    def delay_s(self, decision: Decision) -> float | None:
        """How long to wait for the first byte before a second engine is asked; None: for ever."""
        options = self.options
        if not self.is_on:
            return None
        if options.mode is HedgeMode.FIXED:
            return options.after_s
        lateness = self._models.get(decision.model)
        late_s = None if lateness is None else lateness.quantile_s
        if late_s is None:
            return None
        return max((decision.predicted_ttft_s or 0.0) + late_s, options.after_s)

    def note(self, decision: Decision, first_byte_s: float) -> None:
        """A stream began then. For one that was given up because another was faster it is when
        that happened: it would have taken longer, so it stays among the latest."""
        if self.options.mode is HedgeMode.OBSERVED:
            late_s = first_byte_s - decision.now_s - (decision.predicted_ttft_s or 0.0)
            lateness = self._models.get(decision.model)
            if lateness is None:
                if len(self._models) >= MAX_MODELS:
                    del self._models[next(iter(self._models))]
                lateness = self._models[decision.model] = Lateness()
            lateness.note(late_s)
