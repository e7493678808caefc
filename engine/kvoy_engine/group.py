"""Who belongs to a group of engine processes, and whether the group is whole. Pure.

Rank 0 serves for the group; every other rank joins it, with the settings that all must share. A
group that was whole and loses a rank is broken for good: whoever started its processes starts them
all anew.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, str]
"""Flag to value, of the flags on which the processes of a group must agree."""


class Refusal(enum.Enum):
    FOR_GOOD = "for good"
    FOR_NOW = "for now"
    """The rank is taken: perhaps by a process that is about to be found dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    refusal: Refusal
    reason: str


@dataclass(slots=True)
class Group:
    """Rank 0's knowledge of the others."""

    nnodes: int
    settings: Settings
    failure: str | None = None
    """Why the group is broken."""
    _joined: set[int] = field(default_factory=set)
    _was_complete: bool = False

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.nnodes) if rank not in self._joined]

    @property
    def is_complete(self) -> bool:
        return self.failure is None and not self.missing

    def refuse(self, rank: int, settings: Settings) -> Verdict | None:
        """Why this process cannot join now; None when it can."""
        if not 0 < rank < self.nnodes:
            reason = f"--node-rank {rank} is not in 1..{self.nnodes - 1}"
            return Verdict(Refusal.FOR_GOOD, reason)
        if (difference := differing(self.settings, settings)) is not None:
            return Verdict(Refusal.FOR_GOOD, difference)
        if self.failure is not None:
            return Verdict(Refusal.FOR_NOW, f"the group is broken: {self.failure}")
        if rank in self._joined:
            return Verdict(Refusal.FOR_NOW, f"rank {rank} has joined already")
        return None

    def on_joined(self, rank: int) -> None:
        self._joined.add(rank)
        self._was_complete = self._was_complete or not self.missing

    def on_lost(self, rank: int, why: str) -> None:
        """Before the group is whole a rank may come again; afterwards its loss breaks the group."""
        self._joined.discard(rank)
        if self._was_complete and self.failure is None:
            self.failure = f"rank {rank} of the group is lost: {why}"


def differing(ours: Settings, theirs: Settings) -> str | None:
    """The first setting that differs, for people."""
    for name in sorted({*ours, *theirs}):
        here, there = ours.get(name), theirs.get(name)
        if here != there:
            return f"{name} is {here} at rank 0 and {there} at the joining rank"
    return None
