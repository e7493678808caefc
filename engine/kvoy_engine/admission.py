"""Which of each router's numbered requests the load reports already include. Pure.

A router numbers its requests to an engine 1, 2, 3... and adds its own estimate of the load of those
that the reports do not include yet. Numbers arrive out of order, and some never arrive: the router
says through which number it no longer waits (`settled_through`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_BEYOND = 4096
"""After so many later ones a missing number will not come: its router has forgotten to settle it.
"""
MAX_ROUTERS = 256


@dataclass(slots=True)
class Admitted:
    """The numbers of one router: all up to `through`, and those in `beyond` (bounded)."""

    through: int = 0
    beyond: set[int] = field(default_factory=set)

    def admit(self, number: int) -> None:
        if number > self.through:
            self.beyond.add(number)
            if len(self.beyond) > MAX_BEYOND:
                self.through = min(self.beyond) - 1
            self._advance()

    def settle_through(self, number: int) -> None:
        if number > self.through:
            self.through = number
            self.beyond = {n for n in self.beyond if n > number}
            self._advance()

    def _advance(self) -> None:
        while self.through + 1 in self.beyond:
            self.through += 1
            self.beyond.remove(self.through)


class AdmissionLedger:
    """`Admitted` per router. Bounded: the longest silent routers go first."""

    def __init__(self, max_routers: int = MAX_ROUTERS) -> None:
        self._max_routers = max_routers
        self._routers: dict[str, Admitted] = {}

    def of(self, router_id: str) -> Admitted:
        """This router's numbers; using them makes it the most recent."""
        admitted = self._routers.pop(router_id, None) or Admitted()
        self._routers[router_id] = admitted
        while len(self._routers) > self._max_routers:
            del self._routers[next(iter(self._routers))]
        return admitted

    def admit(self, router_id: str, number: int) -> None:
        """Ignored for requests that no router numbered."""
        if router_id and number > 0:
            self.of(router_id).admit(number)

    def settle_through(self, router_id: str, number: int) -> None:
        if router_id and number > 0:
            self.of(router_id).settle_through(number)

    def __len__(self) -> int:
        return len(self._routers)
