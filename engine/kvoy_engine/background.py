"""Which prompts yield: those that are less important than others that have come lately.

A step cannot be interrupted, so who comes during one waits for its end, and who computes a prompt
in it waits for everything else in it. While more important requests come, less important prompts
therefore make steps only a little longer than their decodes, what more important ones take
included (`scheduler`). They cannot starve: one that has been passed over for long is served like
the more important ones, one after another. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvoy_engine.pace import PaceModel, StepShape
from kvoy_engine.sequence import Sequence, SequenceQueue

YIELD_S = 10.0
"""So long after a request of its importance came the next one is expected: traffic has gaps."""
PATIENCE_S = 10.0
"""A prompt of which nothing has been computed for so long is served like more important ones, but
no two of them within that time: they get a small share, whatever comes."""
_LOOK_S = 1.0
"""Between two looks for such a one."""
MEAN_RATIO = 2.5
"""Prompts that yield get nothing while steps take more than so many times their decodes on average,
more important prompts included: beyond that the others' answers take so much longer that their
number grows, and with it each step and the memory they hold."""
SAVED_S, MOST_DEBT_S = 0.25, 2.0
"""Bounds of that average's memory, in seconds of prefill: a long prompt more, or a burst."""


class Background:
    __slots__ = ("_debt_s", "_most_important", "_next_look_s", "_pace", "_ratio", "_until_s")

    def __init__(self, ratio: float, pace: PaceModel) -> None:
        """`ratio` is `CoreConfig.background_ratio`."""
        self._ratio = ratio
        self._pace = pace
        self._debt_s = 0.0
        """By how much the prompts of late steps have taken more than their share of time."""
        self._most_important = 0
        """The lowest priority number that has come lately."""
        self._until_s = -math.inf
        """When that is long ago."""
        self._next_look_s = -math.inf

    def on_arrival(self, priority: int, now_s: float) -> None:
        if priority <= self._most_important or now_s >= self._until_s:
            self._most_important = priority
            self._until_s = max(self._until_s, now_s + YIELD_S)

    def includes(self, seq: Sequence, now_s: float) -> bool:
        """Whether it yields now. In the order of service all behind such a one yield too."""
        return seq.key[0] > self._most_important and now_s < self._until_s

    def allowance_s(self, decodes: StepShape, left_s: float | None, spent_s: float) -> float | None:
        """Seconds that prompts that yield may add to these decodes, where others add `spent_s` and
        leave `left_s` to whoever comes behind them; None without a bound."""
        if not self._ratio:
            return left_s
        decode_s = self._decode_s(decodes)
        if not decode_s:
            return left_s  # nothing has streamed yet
        if decodes.num_decodes:
            bound_s = self._pace.allowance_s(decodes, self._ratio) - spent_s
            if self._debt_s + spent_s > 0.0:
                bound_s = min(bound_s, 0.0)
        else:
            bound_s = decode_s * (self._ratio - 1) - spent_s
        return bound_s if left_s is None else min(bound_s, left_s)

    def on_step(self, decodes: StepShape, prefill_s: float) -> None:
        """A step takes these decodes and so many seconds of prompts, whoever's they are."""
        if self._ratio and (prefill_s or self._debt_s > -SAVED_S):
            change_s = prefill_s - (MEAN_RATIO - 1) * self._decode_s(decodes)
            self._debt_s = min(max(self._debt_s + change_s, -SAVED_S), MOST_DEBT_S)

    def _decode_s(self, decodes: StepShape) -> float:
        """Of these decodes, or of the latest ones; 0.0 where nothing has streamed yet."""
        pace = self._pace
        return pace.estimate_s(decodes) if decodes.num_decodes else pace.step_time_s

    def passed_over(self, queues: Iterable[SequenceQueue], now_s: float) -> Sequence | None:
        """The one in these that has yielded too long and is to be served now, if any."""
        if now_s >= self._until_s or now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + _LOOK_S
        longest = min(
            (seq for queue in queues for seq in queue if self.includes(seq, now_s)),
            key=lambda seq: seq.served_s,
            default=None,
        )
        if longest is None or now_s - longest.served_s < PATIENCE_S:
            return None
        self._next_look_s = now_s + PATIENCE_S
        return longest

    def promote(self, seq: Sequence) -> None:
        """From now on it is as important as those it has yielded to; in no queue meanwhile."""
        seq.key = (self._most_important, *seq.key[1:])
