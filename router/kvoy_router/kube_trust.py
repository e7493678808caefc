"""Which controllers of pods have been found to belong to which service, and when to look again.

Pure: time comes with each call, `kube_owners` does the looking. A trusted answer holds until the
service leaves the fleet, also while the API is away. Any other answer is looked up again, after a
pause that doubles: objects can be adopted, and a failed look says nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoy_contract.fleet import Fleet, FleetService
from kvoy_router.kube_objects import OwnerReference

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True, eq=False)
class _Answer:
    service_uid: str | None = None
    due_s: float = 0.0
    """When to look (again), while the answer is not one of the fleet's."""
    pause_s: float = FIRST_PAUSE_S
    has_failed: bool = False
    """At the last look."""
    was_found: bool = False
    """Whether the chain was walked to its end, wherever that was."""


class Trust:
    def __init__(self) -> None:
        self._services: dict[str, FleetService] = {}
        self._answers: dict[OwnerReference, _Answer] = {}
        """Only of controllers that have pods now."""

    def set_fleet(self, fleet: Fleet) -> None:
        """Whoever belongs to none of these services is looked up again at once."""
        self._services = {service.uid: service for service in fleet.services}
        for answer in self._answers.values():
            answer.due_s, answer.pause_s = 0.0, FIRST_PAUSE_S

    def keep_only(self, controllers: Iterable[OwnerReference]) -> None:
        """These have pods now; others are forgotten."""
        references = set(controllers)
        for reference in self._answers.keys() - references:
            del self._answers[reference]
        for reference in references - self._answers.keys():
            self._answers[reference] = _Answer()

    @property
    def has_unseen(self) -> bool:
        """Whether somebody has not been looked up even once."""
        return any(not (a.was_found or a.has_failed) for a in self._answers.values())

    def service_of(self, controller: OwnerReference | None) -> FleetService | None:
        answer = self._answers.get(controller) if controller is not None else None
        return None if answer is None else self._service(answer)

    def is_refused(self, controller: OwnerReference) -> bool:
        """Whether it was looked at, and belongs to none of the services."""
        answer = self._answers.get(controller)
        return answer is not None and answer.was_found and self._service(answer) is None

    def due(self, now_s: float) -> Sequence[OwnerReference]:
        """Whom to look up now."""
        return [
            reference
            for reference, answer in self._answers.items()
            if answer.due_s <= now_s and self._service(answer) is None
        ]

    def next_due_s(self) -> float | None:
        """When `due` has something next; None: not before anything changes."""
        waiting = [
            answer.due_s for answer in self._answers.values() if self._service(answer) is None
        ]
        return min(waiting, default=None)

    def on_found(self, controller: OwnerReference, service_uid: str | None, now_s: float) -> None:
        """`service_uid` is what the chain ended at; None: at no service."""
        if answer := self._answers.get(controller):
            answer.service_uid, answer.was_found = service_uid, True
            answer.has_failed = False
            self._postpone(answer, now_s)

    def on_failed(self, controller: OwnerReference, now_s: float) -> bool:
        """Whether it is the first failure in a row."""
        answer = self._answers.get(controller)
        if answer is None:
            return False
        is_first, answer.has_failed = not answer.has_failed, True
        self._postpone(answer, now_s)
        return is_first

    def _service(self, answer: _Answer) -> FleetService | None:
        return None if answer.service_uid is None else self._services.get(answer.service_uid)

    def _postpone(self, answer: _Answer, now_s: float) -> None:
        answer.due_s = now_s + answer.pause_s
        answer.pause_s = min(answer.pause_s * 2, LONGEST_PAUSE_S)
