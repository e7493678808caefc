"""Finding a knee: the highest rate at which a bound still holds. Pure; the caller measures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    rate: float
    figure: float
    is_within: bool


@dataclass(frozen=True, slots=True)
class Ladder:
    rungs: tuple[Rung, ...]

    @property
    def knee(self) -> float:
        """The highest rate within the bound below the lowest one beyond it; 0.0 where none is."""
        beyond = [rung.rate for rung in self.rungs if not rung.is_within]
        limit = min(beyond, default=float("inf"))
        return max((r.rate for r in self.rungs if r.is_within and r.rate < limit), default=0.0)


async def climb(
    measure: Callable[[float], Awaitable[float]],
    bound: float,
    start_rate: float,
    factor: float,
    num_refinements: int,
    max_rungs: int = 12,
) -> Ladder:
    """Raise the rate by `factor` until `measure` exceeds `bound`, then halve the last step.

    Starts downwards where already the first rate exceeds the bound.
    """
    rungs: list[Rung] = []

    async def step(rate: float) -> bool:
        figure = await measure(rate)
        rungs.append(Rung(rate, figure, figure <= bound))
        return rungs[-1].is_within

    rate = start_rate
    if await step(rate):
        while len(rungs) < max_rungs and await step(rate * factor):
            rate *= factor
    else:
        rate /= factor
        while len(rungs) < max_rungs and not await step(rate):
            rate /= factor
    low, high = rate, rate * factor
    for _ in range(num_refinements):
        if len(rungs) >= max_rungs:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if await step(middle) else (low, middle)
    return Ladder(tuple(rungs))
