"""Kubernetes Events for what has changed between two statuses of a resource. Pure.

Only transitions are told: a status that stays as it was tells nothing, however often it is written,
and neither does a message that changes while its reason stays. One transition is one Event and one
line of log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvoy_operator.conditions import ACCEPTED, DEGRADED, ORDER, PROGRESSING, READY, ROUTER_READY
from kvoy_operator.rollout import Phase

NORMAL: Final = "Normal"
WARNING: Final = "Warning"
MAX_NOTE: Final = 1024
"""Characters that the API server takes as an Event's message."""

_WARNED_OF: Final = frozenset({Phase.OUTAGE_AHEAD, Phase.STOPPED})
# What a condition is called when it holds again.
_GOOD_NEWS: Final = {
    ACCEPTED: "Accepted",
    READY: "Ready",
    ROUTER_READY: "RouterReady",
    DEGRADED: "Recovered",
}
_BAD_NEWS: Final = {READY: "NotReady", ROUTER_READY: "RouterNotReady"}


@dataclass(frozen=True, slots=True)
class Transition:
    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str


def transitions(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> tuple[Transition, ...]:
    """Both are the `conditions` of a status; `before` is empty for a resource without a status."""
    old = {condition["type"]: condition for condition in before}
    new = {condition["type"]: condition for condition in after}
    found = (_transition(old.get(name), new[name]) for name in ORDER if name in new)
    return tuple(each for each in found if each is not None)


def _transition(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Transition | None:
    if new["type"] == PROGRESSING:
        return _of_phase(old, new)
    if new["type"] in (ACCEPTED, DEGRADED):
        return _of_fault(old, new)
    return _of_readiness(old, new)


def _of_phase(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Transition | None:
    if old is not None and old["reason"] == new["reason"]:
        return None
    if new["reason"] not in set(Phase):
        # The spec is refused: the condition `Accepted` tells.
        return None
    return _told(WARNING if new["reason"] in _WARNED_OF else NORMAL, new["reason"], new)


def _of_fault(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Transition | None:
    """A refusal or a failure, each told under its own reason, also when one follows another."""
    is_fault = (new["status"] == "True") is (new["type"] == DEGRADED)
    if is_fault:
        is_known = old is not None and _is_same(old, new) and old["reason"] == new["reason"]
        return None if is_known else _told(WARNING, new["reason"], new)
    return None if old is None or _is_same(old, new) else _good(new)


def _of_readiness(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Transition | None:
    """What is not ready yet at its beginning is no news."""
    if old is not None and _is_same(old, new):
        return None
    if new["status"] == "True":
        return _good(new)
    return None if old is None else _told(WARNING, _BAD_NEWS[new["type"]], new)


def _is_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return bool(old["status"] == new["status"])


def _good(new: Mapping[str, Any]) -> Transition:
    return _told(NORMAL, _GOOD_NEWS[new["type"]], new)


def _told(kind: str, reason: str, condition: Mapping[str, Any]) -> Transition:
    message = str(condition["message"])
    note = message if len(message) <= MAX_NOTE else message[: MAX_NOTE - 1] + "…"
    return Transition(kind, reason, note)
