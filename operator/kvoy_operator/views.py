"""Pods and workloads as values: what deciding and status read of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kvoy_contract.names import COMPONENT_LABEL, POOL_LABEL, REVISION_LABEL
from kvoy_operator.observed import Body, ContainerView, PodView, WorkloadView

_GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
_WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
_MAX_MESSAGE_CHARS = 1000
"""A termination message may hold 4 KiB of log; its beginning has to do in a status."""


def seconds(timestamp: str | None) -> float:
    """Seconds since the epoch of an RFC 3339 time; 0.0 for none."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def pod_view(body: Body) -> PodView:
    metadata, spec = body["metadata"], body.get("spec") or {}
    labels, status = metadata.get("labels") or {}, body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    is_unscheduled = scheduled.get("status") == "False"
    return PodView(
        name=metadata["name"],
        component=labels.get(COMPONENT_LABEL, ""),
        pool=labels.get(POOL_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        phase=status.get("phase", "Pending"),
        is_ready=(conditions.get("Ready") or {}).get("status") == "True",
        is_terminating="deletionTimestamp" in metadata,
        created_s=seconds(metadata.get("creationTimestamp")),
        node=spec.get("nodeName", ""),
        scheduled_s=(
            seconds(scheduled.get("lastTransitionTime"))
            if scheduled.get("status") == "True"
            else None
        ),
        unscheduled_since_s=(
            seconds(scheduled.get("lastTransitionTime")) if is_unscheduled else None
        ),
        unscheduled_message=scheduled.get("message", "") if is_unscheduled else "",
        containers=tuple(_containers(status)),
        group_index=_index(labels, _GROUP_INDEX_LABEL),
        worker_index=_index(labels, _WORKER_INDEX_LABEL),
        reason=status.get("reason") or "",
        message=(status.get("message") or "")[:_MAX_MESSAGE_CHARS],
    )


def _containers(status: Mapping[str, Any]) -> Iterable[ContainerView]:
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(name) or ():
            yield _container_view(container)


def _container_view(container: Mapping[str, Any]) -> ContainerView:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting = state.get("waiting") or {}
    terminated = state.get("terminated") or last.get("terminated") or {}
    return ContainerView(
        name=container["name"],
        is_ready=bool(container.get("ready")),
        restart_count=container.get("restartCount", 0),
        is_started=container.get("started") is not False,
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", "")[:_MAX_MESSAGE_CHARS],
        exit_code=terminated.get("exitCode"),
        exit_reason=terminated.get("reason", ""),
        exit_message=(terminated.get("message") or "").strip()[:_MAX_MESSAGE_CHARS],
    )


def workload_view(kind: str, body: Body) -> WorkloadView:
    """Of a Deployment or a LeaderWorkerSet, whose `replicas` are groups."""
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    labels, generation = metadata.get("labels") or {}, metadata.get("generation", 0)
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    failure = conditions.get("ReplicaFailure") or {}
    has_failed = failure.get("status") == "True"
    return WorkloadView(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        pool=labels.get(POOL_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        created_s=seconds(metadata.get("creationTimestamp")),
        generation=generation,
        # A LeaderWorkerSet does not say; its numbers count from its first status on.
        observed_generation=status.get("observedGeneration", generation if status else 0),
        replicas=spec.get("replicas", 1),
        current_replicas=status.get("replicas", 0),
        ready_replicas=status.get("readyReplicas", 0),
        group_size=(spec.get("leaderWorkerTemplate") or {}).get("size", 1),
        is_deadline_exceeded=(
            (conditions.get("Progressing") or {}).get("reason") == "ProgressDeadlineExceeded"
        ),
        failure_reason=failure.get("reason", "") if has_failed else "",
        failure_message=failure.get("message", "") if has_failed else "",
        is_deleting="deletionTimestamp" in metadata,
    )


def _index(labels: Mapping[str, str], label: str) -> int | None:
    text = labels.get(label, "")
    return int(text) if text.isdecimal() else None
