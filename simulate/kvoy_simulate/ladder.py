"""The knee of a load: the highest rate at which a bound still holds. Pure; the caller measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_DOUBLINGS = 8


@dataclass(frozen=True, slots=True)
class Rung:
    rate: float
    figure: float

    def is_within(self, bound: float) -> bool:
        return self.figure <= bound


@dataclass(frozen=True, slots=True)
class Ladder:
    bound: float
    rungs: tuple[Rung, ...]
    """In the order in which they were measured."""

    @property
    def knee(self) -> float:
        """The highest rate within the bound below the lowest one beyond it; 0.0 where none is."""
        beyond = [rung.rate for rung in self.rungs if not rung.is_within(self.bound)]
        limit = min(beyond, default=float("inf"))
        within = [r.rate for r in self.rungs if r.is_within(self.bound) and r.rate < limit]
        return max(within, default=0.0)


def climb(
    measure: Callable[[float], float], *, bound: float, first_rate: float, tolerance: float
) -> Ladder:
    """Double or halve `first_rate` until the bound lies between two rates, then bisect until they
    are at most `tolerance` apart.

    Gives up the search for a bracket after eight steps in one direction; the ladder then ends on
    its side of the bound.
    """
    rungs: list[Rung] = []

    def is_within(rate: float) -> bool:
        rungs.append(Rung(rate, measure(rate)))
        return rungs[-1].is_within(bound)

    low = high = first_rate
    if is_within(first_rate):
        for _ in range(MAX_DOUBLINGS):
            high = low * 2
            if not is_within(high):
                break
            low = high
    else:
        for _ in range(MAX_DOUBLINGS):
            low = high / 2
            if is_within(low):
                break
            high = low
    has_bracket = rungs[-1].is_within(bound) != rungs[0].is_within(bound)
    while has_bracket and high - low > tolerance:
        middle = (low + high) / 2
        if is_within(middle):
            low = middle
        else:
            high = middle
    return Ladder(bound, tuple(rungs))
