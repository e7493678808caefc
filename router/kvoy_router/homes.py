"""Which engines are home to what is asked again and again, and how much of it each has.

What an engine runs at this moment says little about its load in a minute; how much of the traffic
has its home there says more. A prompt that is new to the whole fleet finds a home, from which so
and so many later uses are expected; each request that comes then tells what its engine is home to
in truth. What was counted fades as new requests come.
"""

from __future__ import annotations

EXPECTED_USES = 16.0
"""Of a new home: it counts as much as so many requests to an old one. Enough for chance in the
requests of its first half minute not to look like more or fewer homes."""
MEMORY_USES = 100.0
"""Uses for each engine of the fleet until what was counted has faded to 1/e."""
LITTLE_SHARE = 0.1
"""Of that memory: while less has been counted, shares say hardly anything."""
MOST_WEIGHT = 1e9
"""Where all sums are scaled down again, so that they stay far from the limits of a float."""


class Homes:
    """Of one model.

    Fading by growth: instead of all that is there becoming less with each use, the new one counts a
    little more. Only ratios are told, and they are the same.
    """

    __slots__ = ("_sum", "_uses", "_weight")

    def __init__(self) -> None:
        self._uses: dict[str, float] = {}
        """Endpoint id → weighted uses."""
        self._sum = 0.0
        self._weight = 1.0

    def share(self, endpoint_id: str) -> float:
        """Of the uses to come, how many are expected there ÷ on an average engine; 1.0 for an
        engine that nothing is known of.

        A new engine therefore counts as an average one. As an empty one it would be sent all that
        is new until it had caught up, whatever its queue.
        """
        uses = self._uses.get(endpoint_id)
        if uses is None:
            return 1.0
        little = LITTLE_SHARE * MEMORY_USES * self._weight
        return (uses + little) / (self._sum / len(self._uses) + little)

    def know(self, endpoint_id: str) -> None:
        """From now on it is one of those among whom shares are told, at first an average one."""
        if endpoint_id not in self._uses:
            mean = self._sum / len(self._uses) if self._uses else 0.0
            self._uses[endpoint_id] = mean
            self._sum += mean

    def forget(self, endpoint_id: str) -> None:
        """It is gone, or another process with an empty cache is in its place."""
        self._sum -= self._uses.pop(endpoint_id, 0.0)

    def count(self, endpoint_id: str, *, is_new: bool) -> None:
        """A request has been sent there; `is_new`: most of its prompt was held by nobody."""
        if endpoint_id not in self._uses:
            return
        uses = EXPECTED_USES if is_new else 1.0
        self._add(endpoint_id, uses * self._weight)
        self._weight *= 1.0 + uses / (MEMORY_USES * len(self._uses))
        if self._weight > MOST_WEIGHT:
            self._uses = {name: uses / self._weight for name, uses in self._uses.items()}
            self._sum = sum(self._uses.values())
            self._weight = 1.0

    def take_back(self, endpoint_id: str) -> None:
        """A new prompt has not been computed there after all."""
        if endpoint_id in self._uses:
            uses = min(EXPECTED_USES * self._weight, self._uses[endpoint_id])
            self._add(endpoint_id, -uses)

    def _add(self, endpoint_id: str, weighted: float) -> None:
        self._uses[endpoint_id] += weighted
        self._sum += weighted
