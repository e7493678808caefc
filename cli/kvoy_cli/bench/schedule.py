"""When requests start. Pure: offsets in seconds from the start of a run, fixed by a seed.

Open-loop load keeps to its schedule however slow the answers are, so a server that falls behind
shows it; a client that waits for answers first would hide it.
"""

from __future__ import annotations

import random


def poisson_offsets(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process in [0, duration_s), ascending."""
    _check(rate_per_s, duration_s)
    rng = random.Random(seed)
    offsets: list[float] = []
    now = rng.expovariate(rate_per_s)
    while now < duration_s:
        offsets.append(now)
        now += rng.expovariate(rate_per_s)
    return offsets


def even_offsets(rate_per_s: float, duration_s: float) -> list[float]:
    """Arrivals at a constant pace from 0 on."""
    _check(rate_per_s, duration_s)
    return [index / rate_per_s for index in range(int(rate_per_s * duration_s))]


def _check(rate_per_s: float, duration_s: float) -> None:
    if rate_per_s <= 0 or duration_s < 0:
        raise ValueError(f"a schedule needs a rate above 0 ({rate_per_s}) and no negative duration")
