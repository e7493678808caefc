"""What a rollout reads from the cluster: workloads as rows of replicas, pools as revisions.

A row holds a workload's replicas in the order in which its controller keeps them when it scales
down: a ReplicaSet lets go of its unready pods first, a LeaderWorkerSet of its highest index
whatever its state. So "what is left at n replicas" is the row's first n. Pure; `rollout` decides
upon it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import NamedTuple

from kvoy_operator.failures import pod_failure
from kvoy_operator.observed import PodView, WorkloadView

LEADER_WORKER_SET = "LeaderWorkerSet"
ENGINE_CONTAINER = "engine"


class Replica(IntEnum):
    """A replica (a pod, or a group of pods); greater is kept longer by a ReplicaSet."""

    DEAD = 0
    """Fails, has no node, or does not exist yet: taking it away takes no capacity."""
    LOADING = 1
    """On its way to ready, beside others of its workload that have been there."""
    ALIVE = 2
    """Started but not ready, or not seen well enough: it may be serving, or be back in a moment."""
    READY = 3


class PoolRevision(NamedTuple):
    """Names one workload: there is exactly one for each pool and revision."""

    pool: str
    revision: str


@dataclass(frozen=True, slots=True)
class Row:
    """The replicas of one pool in one revision; no workload: an empty row."""

    key: PoolRevision
    replicas: tuple[Replica, ...] = ()
    workload: WorkloadView | None = None
    num_serving: int = 0
    """Ready replicas, those included that may be on their way out."""

    @property
    def size(self) -> int:
        return len(self.replicas)

    @property
    def num_ready(self) -> int:
        return self.ready_after(self.size)

    @property
    def may_serve(self) -> bool:
        return any(replica >= Replica.ALIVE for replica in self.replicas)

    def ready_after(self, size: int) -> int:
        """Ready replicas left once the workload has been scaled down to `size`."""
        return sum(replica is Replica.READY for replica in self.replicas[:size])

    def smallest_keeping(self, num_ready: int) -> int:
        """The smallest size that keeps so many ready replicas, or all that it has."""
        kept = min(num_ready, self.num_ready)
        return next(size for size in range(self.size + 1) if self.ready_after(size) >= kept)


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of a service: the wanted revision's row, and what other revisions still have."""

    name: str
    desired: int
    is_wanted: bool
    """False: the service no longer has this pool."""
    new: Row
    olds: tuple[Row, ...]
    """Those worth most come first."""

    @property
    def num_old(self) -> int:
        return sum(old.size for old in self.olds)

    @property
    def is_complete(self) -> bool:
        return self.num_old == 0 and self.new.size == self.new.num_ready == self.desired


def row_of(workload: WorkloadView, pods: Iterable[PodView]) -> Row:
    """`pods` are those of the workload's pool and revision."""
    key = PoolRevision(workload.pool, workload.revision)
    staying = [pod for pod in pods if not pod.is_terminating]
    if workload.kind == LEADER_WORKER_SET:
        replicas = _groups(workload.replicas, staying)
    else:
        replicas = sorted((_replica_of([pod]) for pod in staying), reverse=True)
    num_serving = min(replicas.count(Replica.READY), workload.ready_replicas)
    return Row(key, _agreed(replicas, workload), workload, num_serving)


def pools_of(
    wanted: str,
    current: str,
    desired: Mapping[str, int],
    workloads: Sequence[WorkloadView],
    pods: Sequence[PodView],
) -> tuple[Pool, ...]:
    """Every pool that is wanted or still has a workload. Strangers' workloads, and those that
    somebody is deleting, count for nothing."""
    rows = [
        row_of(workload, [pod for pod in pods if _is_pod_of(workload, pod)])
        for workload in workloads
        if workload.is_ours and not workload.is_deleting
    ]
    names = dict.fromkeys([*desired, *(row.key.pool for row in rows)])
    worth = _worth(rows, current)
    return tuple(_pool(name, wanted, desired, rows, worth) for name in names)


def moved_share(pools: Iterable[Pool]) -> Fraction:
    """How much of the service the wanted revision serves already: the least of its pools counts,
    since an engine of one pool is of full use only with engines of its own revision in the other.
    """
    shares = [
        Fraction(min(pool.new.ready_after(pool.desired), pool.desired), pool.desired)
        for pool in pools
        if pool.desired
    ]
    return min(shares, default=Fraction(1))


def _pool(
    name: str,
    wanted: str,
    desired: Mapping[str, int],
    rows: Sequence[Row],
    worth: Mapping[str, tuple[bool, int, float]],
) -> Pool:
    mine = {row.key.revision: row for row in rows if row.key.pool == name}
    new = mine.pop(wanted, Row(PoolRevision(name, wanted)))
    olds = sorted(mine.values(), key=lambda row: worth[row.key.revision], reverse=True)
    return Pool(name, desired.get(name, 0), name in desired, new, tuple(olds))


def _worth(rows: Sequence[Row], current: str) -> dict[str, tuple[bool, int, float]]:
    """Of each revision: what it counts for when there are several old ones to choose from. The one
    that has served before leads, then what has most ready engines in its poorest pool, then age."""
    worth = {}
    for revision in {row.key.revision for row in rows}:
        own = [row for row in rows if row.key.revision == revision]
        created = min(row.workload.created_s for row in own if row.workload)
        worth[revision] = (revision == current, min(row.num_ready for row in own), -created)
    return worth


def _is_pod_of(workload: WorkloadView, pod: PodView) -> bool:
    return (pod.pool, pod.revision) == (workload.pool, workload.revision)


def _groups(num_groups: int, pods: Sequence[PodView]) -> list[Replica]:
    return [_replica_of([pod for pod in pods if pod.group_index == n]) for n in range(num_groups)]


def _replica_of(pods: Sequence[PodView]) -> Replica:
    """Of one pod, or of all pods of a group, which is as good as its worst one."""
    if not any(pod.worker_index in (None, 0) for pod in pods):
        return Replica.DEAD
    return min(state_of(pod) for pod in pods)


def state_of(pod: PodView) -> Replica:
    """Of one pod by itself."""
    if pod.is_ready:
        return Replica.READY
    if pod.scheduled_s is None or pod_failure(pod):
        return Replica.DEAD
    has_started = pod.phase == "Running" and all(
        container.is_started for container in pod.containers if container.name == ENGINE_CONTAINER
    )
    return Replica.ALIVE if has_started else Replica.LOADING


def _agreed(replicas: Sequence[Replica], workload: WorkloadView) -> tuple[Replica, ...]:
    """What pods and workload say together, as long as the spec's count.

    The two are watched apart and one may be late: ready is what both call ready, and alive is what
    either does. While the controller has not seen the last count, what is ready may be on its way
    out: it might have been asked for fewer and then for more again. What loads beside ready ones
    may be ready by now; where none is, the whole revision has yet to prove itself.
    """
    row = list(replicas[: workload.replicas])
    row += [Replica.DEAD] * (workload.replicas - len(row))
    is_late = workload.observed_generation < workload.generation
    num_doubted = row.count(Replica.READY) - (0 if is_late else workload.ready_replicas)
    num_unseen = workload.ready_replicas - sum(each >= Replica.ALIVE for each in row)
    loading = Replica.LOADING if Replica.READY in row else Replica.DEAD
    for n, replica in enumerate(row):
        if replica is Replica.READY and num_doubted > 0:
            row[n] = Replica.ALIVE
            num_doubted -= 1
        elif replica < Replica.ALIVE and num_unseen > 0:
            row[n] = Replica.ALIVE
            num_unseen -= 1
        elif replica is Replica.LOADING:
            row[n] = loading
    if workload.kind != LEADER_WORKER_SET:
        row.sort(reverse=True)
    return tuple(row)


def shrunk(rows: Sequence[Row], keep: int) -> dict[PoolRevision, int]:
    """Sizes of old revisions once only their `keep` best replicas are kept; ties go to the row that
    comes first. What never served is not kept at all."""
    best = sorted(
        (
            (-replica, order, index, row.key)
            for order, row in enumerate(rows)
            for index, replica in enumerate(row.replicas)
            if replica is not Replica.DEAD
        ),
    )[:keep]
    sizes = {row.key: 0 for row in rows}
    for _, _, index, key in best:
        sizes[key] = max(sizes[key], index + 1)
    return sizes
