"""What the operator sees of one service: values that deciding reads and nothing changes.

`store` builds them from watched objects. Everything here is a fact of the cluster, never a memory
of the operator's own, so that a restarted operator decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Body = Mapping[str, Any]
"""A Kubernetes object as plain data."""


class ChildKey(NamedTuple):
    kind: str
    name: str


def child_key(body: Body) -> ChildKey:
    return ChildKey(body["kind"], body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class ContainerView:
    name: str
    is_ready: bool
    restart_count: int
    is_started: bool = True
    """Its startup probe has passed; until then it cannot have been ready since its last start."""
    waiting_reason: str = ""
    """`CrashLoopBackOff`, `ErrImagePull`, `CreateContainerConfigError`, ...; empty: not waiting."""
    waiting_message: str = ""
    exit_code: int | None = None
    """Of the last termination."""
    exit_reason: str = ""
    exit_message: str = ""


@dataclass(frozen=True, slots=True)
class PodView:
    name: str
    component: str
    """`engine`, `router` or `model-cache`."""
    pool: str
    """`serving` or `prefill`; empty for other components."""
    revision: str
    phase: str
    is_ready: bool
    is_terminating: bool
    created_s: float
    """Seconds since the epoch."""
    node: str = ""
    scheduled_s: float | None = None
    """When it got its node; None: not yet."""
    unscheduled_since_s: float | None = None
    """Since when the scheduler finds no place; None: scheduled, or not tried yet."""
    unscheduled_message: str = ""
    containers: tuple[ContainerView, ...] = ()
    """Init containers included."""
    group_index: int | None = None
    worker_index: int | None = None
    """Of a LeaderWorkerSet's pod; its leader has 0."""
    reason: str = ""
    """The pod's own status reason: `Evicted`, `NodeLost`, `UnexpectedAdmissionError`, ..."""
    message: str = ""
    """The pod's own status message, as after an eviction."""


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """One Deployment or LeaderWorkerSet: a pool in one revision."""

    kind: str
    name: str
    uid: str
    pool: str
    revision: str
    created_s: float
    generation: int
    observed_generation: int
    replicas: int
    """As its spec says; groups for a LeaderWorkerSet."""
    current_replicas: int
    ready_replicas: int
    group_size: int = 1
    """Pods of one replica; of a LeaderWorkerSet its leader and workers."""
    is_deadline_exceeded: bool = False
    failure_reason: str = ""
    """`ReplicaFailure` and the like: quota exceeded, forbidden by PodSecurity."""
    failure_message: str = ""
    is_deleting: bool = False
    is_ours: bool = True
    """False for a stranger's object of the wanted name."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known about one service (or shared router) at one moment."""

    children: Mapping[ChildKey, Body] = field(default_factory=dict)
    """Objects that carry our labels, and strangers of a wanted name."""
    workloads: tuple[WorkloadView, ...] = ()
    pods: tuple[PodView, ...] = ()
    has_lws: bool = True
    """Whether the cluster knows LeaderWorkerSets."""
