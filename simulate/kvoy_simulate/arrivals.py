"""When requests of an open loop arrive: offsets in seconds that do not depend on any answer."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Literal

import msgspec


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rate, with a gentler one at first. Raises ValueError, naming the field."""

    rate: float
    """Per second."""
    warmup_rate: float | None = None
    """Per second until `warmup_s`, if that is less than `rate`: caches fill before the load that is
    to be measured."""
    warmup_s: float = 0.0
    spacing: Literal["poisson", "even"] = "poisson"

    def __post_init__(self) -> None:
        for name in ("rate", "warmup_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0 per second, not {value}")
        if self.warmup_s < 0:
            raise ValueError(f"warmup_s must be at least 0 seconds, not {self.warmup_s}")

    def at_rate(self, rate: float) -> Arrivals:
        return msgspec.structs.replace(self, rate=rate)

    def times(self, random: Random) -> Iterator[float]:
        """Ascending, without end.

        Time is measured in expected arrivals and turned into seconds, so the change of rate falls
        exactly on `warmup_s`.
        """
        first_rate = min(self.warmup_rate or self.rate, self.rate)
        first_arrivals = first_rate * self.warmup_s
        expected = 0.0
        while True:
            expected += random.expovariate(1.0) if self.spacing == "poisson" else 1.0
            if expected <= first_arrivals:
                yield expected / first_rate
            else:
                yield self.warmup_s + (expected - first_arrivals) / self.rate
