"""Pods that the node cannot set up and groups whose pods cannot be made: only Events say why. Pure.

A Deployment's status says when its pods are refused. A StatefulSet's, which makes the pods of a
group, does not, and neither does the status of a pod whose volume cannot be mounted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from kvoy_operator.failures import SETUP_REASONS
from kvoy_operator.observed import Observed, PodView, WorkloadView
from kvoy_operator.views import seconds

PATIENCE_S: Final = 20.0
"""So long a pod may take to be made, or from its node to its first container."""
LOOK_S: Final = 30.0
"""Between two looks for what has happened to something that is stuck."""

_BEFORE_START: Final = frozenset({"ContainerCreating", "PodInitializing"})
_FAILED_CREATE: Final = "FailedCreate"


class Stuck(NamedTuple):
    """What Events are about."""

    kind: str
    name: str


class News(NamedTuple):
    """The last Event about something that is stuck."""

    reason: str
    message: str


def stuck_since(observed: Observed) -> dict[Stuck, float]:
    """What may be stuck, and since when (seconds since the epoch): no Event before is about it."""
    found = {
        Stuck("Pod", pod.name): pod.scheduled_s
        for pod in observed.pods
        if pod.scheduled_s is not None and _is_unmade(pod)
    }
    for workload in observed.workloads:
        found |= _unfilled(workload, observed.pods)
    return found


def latest_news(events: Iterable[Mapping[str, Any]], since_s: float) -> News | None:
    """The newest of the Events (events.k8s.io/v1) that tells why something does not go on."""
    told = [
        (at_s, News(event.get("reason", ""), event.get("note", "")))
        for event in events
        if event.get("reason") in SETUP_REASONS | {_FAILED_CREATE}
        and (at_s := _last_seen_s(event)) >= since_s
    ]
    return max(told)[1] if told else None


def with_news(observed: Observed, news: Mapping[Stuck, News]) -> Observed:
    """As if pods and workloads had said it themselves."""
    pods = tuple(_told_pod(pod, news.get(Stuck("Pod", pod.name))) for pod in observed.pods)
    workloads = tuple(_told_workload(each, observed.pods, news) for each in observed.workloads)
    return dataclasses.replace(observed, pods=pods, workloads=workloads)


def _is_unmade(pod: PodView) -> bool:
    if pod.is_terminating or pod.phase != "Pending" or not pod.containers:
        return False
    return all(container.waiting_reason in _BEFORE_START for container in pod.containers)


def _unfilled(workload: WorkloadView, pods: Iterable[PodView]) -> dict[Stuck, float]:
    """StatefulSets of a LeaderWorkerSet that lack pods: its own makes leaders, one that is named
    like a leader makes its workers. A pod that was made after an Event makes it history."""
    if workload.group_size < 2 or workload.is_deleting or not workload.is_ours:
        return {}
    own = [p for p in pods if (p.pool, p.revision) == (workload.pool, workload.revision)]
    found: dict[Stuck, float] = {}
    leaders = [pod for pod in own if pod.worker_index == 0]
    if len(leaders) < workload.replicas:
        newest_s = max((pod.created_s for pod in leaders), default=workload.created_s)
        found[Stuck("StatefulSet", workload.name)] = newest_s
    for leader in leaders:
        group = [pod for pod in own if pod.group_index == leader.group_index]
        if len(group) < workload.group_size and not leader.is_terminating:
            newest_s = max(pod.created_s for pod in group)
            found[Stuck("StatefulSet", leader.name)] = newest_s
    return found


def _told_pod(pod: PodView, news: News | None) -> PodView:
    if news is None:
        return pod
    containers = tuple(
        dataclasses.replace(each, waiting_reason=news.reason, waiting_message=news.message)
        if each.waiting_reason in _BEFORE_START
        else each
        for each in pod.containers
    )
    return dataclasses.replace(pod, containers=containers)


def _told_workload(
    workload: WorkloadView, pods: Iterable[PodView], news: Mapping[Stuck, News]
) -> WorkloadView:
    told = [news[stuck] for stuck in sorted(_unfilled(workload, pods)) if stuck in news]
    if not told:
        return workload
    return dataclasses.replace(
        workload, failure_reason=told[0].reason, failure_message=told[0].message
    )


def _last_seen_s(event: Mapping[str, Any]) -> float:
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
    )
    return max(seconds(time) for time in times)
