"""Whether a rollout may go on: has its new revision come to a stop, has the cluster no room for it.

Everything is judged from pods and workloads as they are now and from what the status last said;
times are seconds since the epoch and "now" is given. Pure; `rollout` decides upon it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvoy_operator.failures import FailureReason, is_hopeless, workload_failure
from kvoy_operator.observed import PodView, WorkloadView
from kvoy_operator.rollout_state import Replica, state_of

HOPELESS_GRACE_S = 120.0
"""A registry or a Secret may come back within it; after it a rollout does not wait for the deadline
with a pod that will hardly ever serve."""


@dataclass(frozen=True, slots=True)
class Health:
    is_stuck: bool = False
    """The new revision makes no progress."""
    has_no_room: bool = False
    """A new pod has found no place for the time limit."""
    stuck_subject: str = ""
    """The pod or workload that shows it."""
    recheck_after_s: float | None = None
    """When time alone may change the answer."""


def judge(
    workloads: Iterable[WorkloadView],
    pods: Iterable[PodView],
    *,
    progress_deadline_s: float,
    surge_timeout_s: float,
    is_replacing_old: bool,
    failing_since_s: float | None,
    now_s: float,
) -> Health:
    """`workloads` and `pods` are those of the new revision; `is_replacing_old`: an old one serves
    meanwhile, so that a hopeless pod need not be given the whole deadline. `failing_since_s`: since
    when the status says that these pods end; None: it does not."""
    workloads, pods = list(workloads), list(pods)
    waiting = [pod for pod in pods if not pod.is_ready and not pod.is_terminating]
    grace_s = min(HOPELESS_GRACE_S, progress_deadline_s)
    limits: list[tuple[float, str]] = []
    for pod in waiting:
        if state_of(pod) >= Replica.ALIVE:
            continue
        since_s = pod.scheduled_s if pod.scheduled_s is not None else pod.created_s
        is_soon = is_replacing_old and is_hopeless(pod)
        limits.append((since_s + (grace_s if is_soon else progress_deadline_s), pod.name))
    newest_s = max((pod.created_s for pod in pods), default=0.0)
    for workload in workloads:
        # One that has made pods before is asked for more of them, since when is not known.
        if workload_failure(workload) and (is_replacing_old or not pods):
            since_s = max(workload.created_s, newest_s)
            limits.append((since_s + progress_deadline_s, workload.name))
        if workload.group_size > 1 and failing_since_s is not None:
            # Its pods are made anew each time, so that none of them ever grows old.
            since_s = max(workload.created_s, failing_since_s)
            limit_s = grace_s if is_replacing_old else progress_deadline_s
            limits.append((since_s + limit_s, workload.name))
    room_limits = [
        pod.unscheduled_since_s + surge_timeout_s
        for pod in waiting
        if pod.unscheduled_since_s is not None
    ]
    passed = sorted(limit for limit in limits if limit[0] <= now_s)
    ahead = [at - now_s for at in (*room_limits, *(at for at, _ in limits)) if at > now_s]
    return Health(
        is_stuck=bool(passed),
        has_no_room=any(at <= now_s for at in room_limits) or _is_beyond_quota(workloads),
        stuck_subject=passed[0][1] if passed else "",
        recheck_after_s=min(ahead, default=None),
    )


def _is_beyond_quota(workloads: Iterable[WorkloadView]) -> bool:
    """A quota does not free itself: no time limit is worth waiting for."""
    failures = map(workload_failure, workloads)
    return any(each and each.reason is FailureReason.QUOTA_EXCEEDED for each in failures)
