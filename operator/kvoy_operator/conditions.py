"""The conditions of a service: recomputed from its children each time, never latched.

    Accepted      the operator can do what the spec asks for
    Ready         requests are answered
    Progressing   the operator is changing something; the reason is the rollout's phase
    Degraded      something that should serve does not; its first failure's reason and message
    RouterReady   the endpoint that clients talk to is up

Pure: the time of a transition comes from the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvoy_contract.names import SERVING_POOL
from kvoy_operator.failures import Failure, FailureReason
from kvoy_operator.rollout import Phase

ACCEPTED: Final = "Accepted"
READY: Final = "Ready"
PROGRESSING: Final = "Progressing"
DEGRADED: Final = "Degraded"
ROUTER_READY: Final = "RouterReady"
ORDER: Final = (ACCEPTED, READY, PROGRESSING, DEGRADED, ROUTER_READY)

_RESTING: Final = frozenset({Phase.SETTLED, Phase.STOPPED})
_SURPLUS_MAY_WAIT: Final = frozenset(
    {FailureReason.UNSCHEDULABLE, FailureReason.GPU_INSUFFICIENT, FailureReason.QUOTA_EXCEEDED}
)


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    holds: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool in numbers, as the status shows it."""

    name: str
    desired: int
    ready: int
    updated: int
    owner: str
    """Kind of the object that says `desired`."""
    revision: str
    """Of most replicas."""
    is_new: bool = False
    """The revision that serves until now does without this pool."""

    @property
    def is_full(self) -> bool:
        return self.ready >= self.desired


@dataclass(frozen=True, slots=True)
class RouterState:
    is_ready: bool
    reason: str
    message: str


def accepted(refusal_reason: str = "", message: str = "") -> Condition:
    """Without a reason: accepted."""
    if refusal_reason:
        return Condition(ACCEPTED, False, refusal_reason, message)
    return Condition(ACCEPTED, True, "Accepted", "The spec is being served.")


def ready(
    pools: Sequence[PoolState],
    max_unavailable: int,
    router: RouterState,
    failure: Failure | None,
    refusal: Condition,
) -> Condition:
    """Whether requests are answered: by a router and by pools that lack no more than they may.
    The serving pool answers; the other ones only help it."""
    shown = _in_numbers(pools)
    short = [
        pool
        for pool in pools
        if pool.ready < _least(pool.desired, max_unavailable) and not pool.is_new
    ]
    if not any(pool.desired for pool in pools if pool.name == SERVING_POOL) and refusal.holds:
        return Condition(READY, False, "ScaledToZero", "No replica is wanted.")
    if short or not any(pool.ready for pool in pools):
        return Condition(READY, False, *_why_short(shown, failure, refusal))
    if not router.is_ready:
        return Condition(READY, False, "RouterNotReady", router.message)
    if all(pool.is_full for pool in pools):
        return Condition(READY, True, "AllReady", f"{shown} ready.")
    return Condition(READY, True, "MinimumReady", f"{shown} ready.")


def progressing(phase: Phase, message: str, failure: Failure | None) -> Condition:
    said = message if failure is None or phase is Phase.SETTLED else f"{message} {failure.message}"
    return Condition(PROGRESSING, phase not in _RESTING, phase, said)


def not_progressing(refusal: Condition) -> Condition:
    """Of a service whose spec is refused: what runs is left as it is."""
    return Condition(
        PROGRESSING, False, refusal.reason, "Nothing is changed until the spec is accepted."
    )


def degraded(
    pools: Sequence[PoolState],
    phase: Phase | None,
    failure: Failure | None,
    message: str,
    router: RouterState,
) -> Condition:
    """A replica beyond the desired ones may well wait for room; all other failures count. A
    router's counts when none of its pods serves."""
    is_short = phase is Phase.STOPPED or not all(pool.is_full for pool in pools)
    if failure is not None and (is_short or failure.reason not in _SURPLUS_MAY_WAIT):
        return Condition(DEGRADED, True, failure.reason, failure.message)
    if phase is Phase.STOPPED:
        return Condition(DEGRADED, True, Phase.STOPPED, message)
    if not router.is_ready and router.reason in set(FailureReason):
        return Condition(DEGRADED, True, router.reason, f"Router: {router.message}")
    return Condition(DEGRADED, False, "AsExpected", "Nothing fails.")


def router_ready(router: RouterState) -> Condition:
    return Condition(ROUTER_READY, router.is_ready, router.reason, router.message)


def as_status(
    conditions: Iterable[Condition],
    previous: Sequence[Mapping[str, Any]],
    generation: int,
    now_s: float,
) -> list[dict[str, Any]]:
    """As the API has them; a time of transition changes only with `status`."""
    before = {condition["type"]: condition for condition in previous}
    return [
        _as_plain(condition, before.get(condition.type, {}), generation, now_s)
        for condition in conditions
    ]


def timestamp(now_s: float) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes times."""
    return datetime.fromtimestamp(int(now_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _as_plain(
    condition: Condition, before: Mapping[str, Any], generation: int, now_s: float
) -> dict[str, Any]:
    status = "True" if condition.holds else "False"
    since = before.get("lastTransitionTime") if before.get("status") == status else None
    return {
        "type": condition.type,
        "status": status,
        "reason": str(condition.reason),
        "message": condition.message,
        "lastTransitionTime": since or timestamp(now_s),
        "observedGeneration": generation,
    }


def _least(desired: int, max_unavailable: int) -> int:
    """Ready replicas that a pool needs; at least one where any is wanted."""
    return min(desired, max(1, desired - max_unavailable))


def _in_numbers(pools: Iterable[PoolState]) -> str:
    return ", ".join(f"{pool.name} {pool.ready} of {pool.desired}" for pool in pools)


def _why_short(shown: str, failure: Failure | None, refusal: Condition) -> tuple[str, str]:
    if not refusal.holds:
        return refusal.reason, refusal.message
    if failure is not None:
        return failure.reason, f"{shown} ready. {failure.message}"
    return "Loading", f"{shown} ready."
