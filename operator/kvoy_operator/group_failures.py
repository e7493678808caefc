"""What a crashing group says between two of its lives. Pure.

When one of its pods ends, a LeaderWorkerSet makes all pods of the group anew, so its failure is to
be seen for a second or two in each round. The status said it then and goes on saying it, until the
group is ready or has lived for longer than such a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvoy_operator.failures import Failure, FailureReason
from kvoy_operator.observed import Observed

ROUND_S: Final = 300.0
"""A pod of a group that is younger may be the next life of one that has failed; a container that
crashes alone waits as long at most."""

_TELLING: Final = (
    FailureReason.MODEL_LOAD_FAILED,
    FailureReason.OUT_OF_MEMORY,
    FailureReason.CRASH_LOOP,
    FailureReason.WORKER_LOST,
)
"""How a group's pod ends; the first says most about why, and makes its mates end otherwise."""


def lasting_failure(
    now: Failure | None,
    degraded: Mapping[str, Any],
    observed: Observed,
    generation: int,
    now_s: float,
) -> Failure | None:
    """What to tell: `now` is what is to be seen, `degraded` the condition as last written."""
    before = _told_before(degraded, generation)
    if before is None or not _is_between_lives(observed, now_s):
        return now
    if now is None:
        return before
    is_known = now.reason in _TELLING
    return before if is_known and _rank(before) < _rank(now) else now


def ends_pods(degraded: Mapping[str, Any]) -> bool:
    """Whether the condition tells of pods that have started and ended."""
    return degraded.get("status") == "True" and degraded.get("reason") in _TELLING


def _told_before(degraded: Mapping[str, Any], generation: int) -> Failure | None:
    """Of the same spec: another one may have mended it."""
    if not ends_pods(degraded) or degraded.get("observedGeneration") != generation:
        return None
    return Failure(FailureReason(degraded["reason"]), "", degraded["message"])


def _is_between_lives(observed: Observed, now_s: float) -> bool:
    """Some group is young, or has no pod at all for the moment."""
    for workload in observed.workloads:
        key = (workload.pool, workload.revision)
        own = [pod for pod in observed.pods if (pod.pool, pod.revision) == key]
        num_groups = len({pod.group_index for pod in own})
        is_young = any(not pod.is_ready and now_s - pod.created_s < ROUND_S for pod in own)
        if workload.group_size > 1 and (is_young or num_groups < workload.replicas):
            return True
    return False


def _rank(failure: Failure) -> int:
    return _TELLING.index(failure.reason)
