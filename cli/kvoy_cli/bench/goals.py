"""A goal compares one measured figure with a stated bound. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Relation = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Goal:
    """`figure relation bound` must hold. A figure that is NaN (not measured) misses every goal."""

    name: str
    figure: float
    relation: Relation
    bound: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        if math.isnan(self.figure):
            return False
        if self.relation == "<=":
            return self.figure <= self.bound
        if self.relation == ">=":
            return self.figure >= self.bound
        return self.figure == self.bound

    @property
    def verdict(self) -> str:
        return "met" if self.is_met else "MISSED"

    def text(self) -> str:
        """One line: the goal, what was measured, what was asked."""
        return (
            f"{self.name}: {number(self.figure)}{self.unit} "
            f"(goal {self.relation} {number(self.bound)}{self.unit}) {self.verdict}"
        )


def number(value: float) -> str:
    """Four significant digits, without an exponent for what people read."""
    if math.isnan(value):
        return "not measured"
    if math.isinf(value):
        return "never" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
