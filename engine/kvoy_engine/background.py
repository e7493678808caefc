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


class Background:
    __slots__ = ("_most_important", "_next_look_s", "_pace", "_ratio", "_until_s")

    def __init__(self, ratio: float, pace: PaceModel) -> None:
        """`ratio` is `CoreConfig.background_ratio`."""
        self._ratio = ratio
        self._pace = pace
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
        if decodes.num_decodes:
            bound_s = self._pace.allowance_s(decodes, self._ratio)
        elif self._pace.step_time_s:
            bound_s = self._pace.step_time_s * (self._ratio - 1)
        else:
            return left_s  # nothing has streamed yet
        bound_s -= spent_s
        return bound_s if left_s is None else min(bound_s, left_s)

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
