"""Rollouts on a simulated cluster with random delays, edits, failures, lost writes and restarts.

The cluster keeps the rules of Kubernetes that matter here: a ReplicaSet lets go of unready pods
first, groups go from the highest index, pods drain before they are gone, a full cluster leaves pods
pending, and what the operator sees of pods and workload status is late.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from kvoy_operator.observed import ContainerView, PodView, WorkloadView
from kvoy_operator.rollout import (
    Phase,
    Reported,
    RolloutInput,
    RolloutSettings,
    RolloutStep,
    Strategy,
    plan_rollout,
)
from kvoy_operator.rollout_state import PoolRevision

SETTINGS = RolloutSettings(surge_timeout_s=20, progress_deadline_s=200)
GROUPS = "LeaderWorkerSet"


@dataclass
class Pod:
    name: str
    key: PoolRevision
    created_s: float
    load_s: float
    drain_s: float
    group_index: int | None
    scheduled_s: float | None = None
    unscheduled_since_s: float | None = None
    gone_s: float | None = None
    """When its drain ends; None: not terminating."""
    is_bad: bool = False

    def is_ready(self, now_s: float) -> bool:
        if self.is_bad or self.scheduled_s is None or self.gone_s is not None:
            return False
        return now_s >= self.scheduled_s + self.load_s


@dataclass
class Workload:
    uid: str
    kind: str
    created_s: float
    replicas: int
    generation: int = 1
    observed_generation: int = 0


@dataclass
class Cluster:
    rng: random.Random
    capacity: int
    bad: set[str] = field(default_factory=set)
    grouped: set[str] = field(default_factory=set)
    """Revisions whose workloads are group workloads."""
    now_s: float = 1000.0
    workloads: dict[PoolRevision, Workload] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    num_made: int = 0

    def tick(self) -> None:
        self.now_s += self.rng.choice((0.5, 1, 2, 5))
        self.pods = [p for p in self.pods if p.gone_s is None or p.gone_s > self.now_s]
        for key, workload in self.workloads.items():
            if self.rng.random() < 0.7:
                self._control(key, workload)
        self._schedule()

    def num_ready(self, pool: str) -> int:
        return sum(p.is_ready(self.now_s) for p in self.pods if p.key.pool == pool)

    def num_ready_of(self, pool: str, revision: str) -> int:
        key = PoolRevision(pool, revision)
        return sum(p.is_ready(self.now_s) for p in self.pods if p.key == key)

    def kill_one(self) -> None:
        alive = [p for p in self.pods if p.gone_s is None]
        if alive:
            self.pods.remove(self.rng.choice(alive))

    def views(self) -> tuple[tuple[WorkloadView, ...], tuple[PodView, ...]]:
        workloads = tuple(self._workload_view(k, w) for k, w in self.workloads.items())
        return workloads, tuple(self._pod_view(p) for p in self.pods)

    def _control(self, key: PoolRevision, workload: Workload) -> None:
        workload.observed_generation = workload.generation
        own = [p for p in self.pods if p.key == key and p.gone_s is None]
        if workload.kind == GROUPS:
            missing = set(range(workload.replicas)) - {p.group_index for p in own}
            surplus = [p for p in own if (p.group_index or 0) >= workload.replicas]
            made: list[int | None] = list(missing)
        else:
            own.sort(key=lambda p: (p.is_ready(self.now_s), p.scheduled_s is not None))
            surplus = own[: max(0, len(own) - workload.replicas)]
            made = [None] * (workload.replicas - len(own))
        for pod in surplus:
            pod.gone_s = self.now_s + (0 if pod.scheduled_s is None else pod.drain_s)
        for index in made:
            self.num_made += 1
            self.pods.append(
                Pod(
                    name=f"pod-{self.num_made}",
                    key=key,
                    created_s=self.now_s,
                    load_s=self.rng.uniform(0, 60),
                    drain_s=self.rng.uniform(0, 30),
                    group_index=index,
                    is_bad=key.revision in self.bad,
                )
            )

    def _schedule(self) -> None:
        num_free = self.capacity - sum(p.scheduled_s is not None for p in self.pods)
        for pod in self.pods:
            if pod.scheduled_s is not None or pod.gone_s is not None:
                continue
            if num_free > 0:
                pod.scheduled_s, pod.unscheduled_since_s = self.now_s, None
                num_free -= 1
            elif pod.unscheduled_since_s is None:
                pod.unscheduled_since_s = self.now_s

    def _workload_view(self, key: PoolRevision, workload: Workload) -> WorkloadView:
        own = [p for p in self.pods if p.key == key and p.gone_s is None]
        return WorkloadView(
            kind=workload.kind,
            name=f"svc-{key.pool[0]}-{key.revision}",
            uid=workload.uid,
            pool=key.pool,
            revision=key.revision,
            created_s=workload.created_s,
            generation=workload.generation,
            observed_generation=workload.observed_generation,
            replicas=workload.replicas,
            current_replicas=len(own),
            ready_replicas=sum(p.is_ready(self.now_s) for p in own),
        )

    def _pod_view(self, pod: Pod) -> PodView:
        is_up = pod.is_ready(self.now_s)
        is_failing = pod.is_bad and pod.scheduled_s is not None
        container = ContainerView(
            "engine",
            is_ready=is_up,
            restart_count=5 if is_failing else 0,
            is_started=is_up,
            waiting_reason="CrashLoopBackOff" if is_failing else "",
            exit_code=1 if is_failing else None,
        )
        return PodView(
            name=pod.name,
            component="engine",
            pool=pod.key.pool,
            revision=pod.key.revision,
            phase="Pending" if pod.scheduled_s is None else "Running",
            is_ready=is_up,
            is_terminating=pod.gone_s is not None,
            created_s=pod.created_s,
            scheduled_s=pod.scheduled_s,
            unscheduled_since_s=pod.unscheduled_since_s,
            containers=(container,) if pod.scheduled_s is not None else (),
            group_index=pod.group_index,
            worker_index=None if pod.group_index is None else 0,
        )


@dataclass
class Operator:
    """Plans from late views, loses writes and dies between them, and remembers nothing."""

    cluster: Cluster
    settings: RolloutSettings
    wanted: str
    desired: dict[str, int]
    is_flaky: bool = True
    reported: Reported = field(default_factory=Reported)
    seen: tuple[tuple[WorkloadView, ...], tuple[PodView, ...]] | None = None
    step: RolloutStep | None = None

    def reconcile(self) -> None:
        cluster, rng = self.cluster, self.cluster.rng
        if self.seen is None or not self.is_flaky or rng.random() < 0.6:
            self.seen = cluster.views()
        workloads, pods = self.seen
        step = plan_rollout(
            RolloutInput(
                wanted=self.wanted,
                desired=dict(self.desired),
                workloads=tuple(self._with_own_writes(workloads)),
                pods=pods,
                settings=self.settings,
                now_s=cluster.now_s,
                reported=self.reported,
            )
        )
        self.step = step
        for write in self._writes(step):
            if self.is_flaky and rng.random() < 0.1:
                return
            write()
        if not self.is_flaky or rng.random() < 0.9:
            self.reported = Reported(step.phase, step.current, self.wanted)

    def _with_own_writes(self, views: tuple[WorkloadView, ...]) -> Iterator[WorkloadView]:
        """Late views, but with what the operator has written itself."""
        late = {view.uid: view for view in views}
        for key, workload in self.cluster.workloads.items():
            unseen = WorkloadView(
                kind=workload.kind,
                name=f"svc-{key.pool[0]}-{key.revision}",
                uid=workload.uid,
                pool=key.pool,
                revision=key.revision,
                created_s=workload.created_s,
                generation=workload.generation,
                observed_generation=0,
                replicas=workload.replicas,
                current_replicas=0,
                ready_replicas=0,
            )
            yield replace(
                late.get(workload.uid, unseen),
                replicas=workload.replicas,
                generation=workload.generation,
            )

    def _writes(self, step: RolloutStep) -> Iterator[Callable[[], object]]:
        for key, count in sorted(step.replicas.items(), key=self._is_growing):
            if key in step.create:
                yield partial(self._create, key, count)
            elif self.cluster.workloads[key].replicas != count:
                yield partial(self._scale, key, count)
        for key in step.delete:
            yield partial(self._delete, key)

    def _is_growing(self, item: tuple[PoolRevision, int]) -> bool:
        workload = self.cluster.workloads.get(item[0])
        return workload is None or item[1] > workload.replicas

    def _create(self, key: PoolRevision, replicas: int) -> None:
        kind = GROUPS if key.revision in self.cluster.grouped else "Deployment"
        self.cluster.num_made += 1
        uid = f"uid-{self.cluster.num_made}"
        self.cluster.workloads[key] = Workload(uid, kind, self.cluster.now_s, replicas)

    def _scale(self, key: PoolRevision, replicas: int) -> None:
        workload = self.cluster.workloads[key]
        workload.replicas = replicas
        workload.generation += 1

    def _delete(self, key: PoolRevision) -> None:
        left = [pod for pod in self.cluster.pods if pod.key == key]
        assert not left, f"{key} is deleted with pods"
        del self.cluster.workloads[key]


@dataclass
class Watch:
    """Holds the cluster to the promises after every tick."""

    operator: Operator
    max_missing: int
    ready: dict[str, int] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    lately: deque[dict[str, int]] = field(default_factory=lambda: deque(maxlen=24))
    """What was desired: a count that was asked for a moment ago may still be on its way."""

    def check(self) -> None:
        cluster = self.operator.cluster
        self.lately.append(dict(self.operator.desired))
        for pool, desired in self.operator.desired.items():
            lowest = min(each.get(pool, 0) for each in self.lately)
            ready, least = cluster.num_ready(pool), lowest - self.max_missing
            was = self.ready.get(pool, 0)
            assert ready >= min(was, least), f"{pool}: {was} -> {ready} ready, {least} promised"
            size = sum(w.replicas for k, w in cluster.workloads.items() if k.pool == pool)
            most = max(desired + 1 + self._num_holes(pool), self.size.get(pool, 0))
            assert size <= most, f"{pool}: {size} replicas, {most} allowed"
            self.ready[pool], self.size[pool] = ready, size

    def _num_holes(self, pool: str) -> int:
        """Groups that cannot be taken away before a ready one of a higher index."""
        return sum(
            max(0, workload.replicas - self.operator.cluster.num_ready_of(*key))
            for key, workload in self.operator.cluster.workloads.items()
            if key.pool == pool and workload.kind == GROUPS
        )

    def forget_ready(self) -> None:
        """After a failure from outside."""
        self.ready.clear()


def _random_world(seed: int, *, is_flaky: bool = True) -> tuple[Operator, Watch]:
    rng = random.Random(seed)
    desired = {"serving": rng.randint(1, 5)}
    if rng.random() < 0.5:
        desired["prefill"] = rng.randint(1, 4)
    max_unavailable = rng.randint(0, 2)
    strategy = rng.choice(list(Strategy))
    room = rng.choice((0, 0, 1, 2, 20)) if strategy is Strategy.AUTO else 20
    if not max_unavailable:
        room = 20
    settings = replace(SETTINGS, strategy=strategy, max_unavailable=max_unavailable)
    grouped = {name for name in "abcdefgh" if rng.random() < 0.3}
    cluster = Cluster(rng, sum(desired.values()) + room, grouped=grouped)
    operator = Operator(cluster, settings, "a", desired, is_flaky=is_flaky)
    missing = 0 if strategy is Strategy.SURGE else max_unavailable
    if strategy is Strategy.REPLACE:
        missing = max(1, max_unavailable)
    return operator, Watch(operator, missing)


def _run(operator: Operator, watch: Watch, num_ticks: int) -> None:
    for _ in range(num_ticks):
        operator.reconcile()
        watch.check()
        operator.cluster.tick()
        watch.check()


def _settle(operator: Operator, watch: Watch, num_ticks: int = 3000) -> None:
    for _ in range(num_ticks):
        _run(operator, watch, 1)
        is_settled = operator.step is not None and operator.step.phase is Phase.SETTLED
        if is_settled and {k.revision for k in operator.cluster.workloads} <= {operator.wanted}:
            return
    raise AssertionError(f"not settled: {operator.step}")


def _edit_at_random(seed: int) -> None:
    operator, watch = _random_world(seed)
    rng = operator.cluster.rng
    _settle(operator, watch)
    for _ in range(rng.randint(1, 6)):
        operator.wanted = rng.choice("abcdefgh")
        _run(operator, watch, rng.choice((1, 2, 5, 20, 60)))

    _settle(operator, watch)

    for pool, desired in operator.desired.items():
        assert operator.cluster.num_ready_of(pool, operator.wanted) == desired, seed


def test_random_edits_restarts_and_lost_writes_never_take_promised_capacity() -> None:
    for seed in range(12):
        _edit_at_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_hundreds_of_random_rollouts_never_take_promised_capacity(block: int) -> None:
    for seed in range(100 + block * 100, 200 + block * 100):
        _edit_at_random(seed)


@pytest.mark.slow
def test_scaling_works_in_both_directions_in_the_middle_of_rollouts() -> None:
    for seed in range(40):
        operator, watch = _random_world(seed)
        rng = operator.cluster.rng
        operator.cluster.capacity = 40
        _settle(operator, watch)
        for _ in range(rng.randint(2, 6)):
            operator.wanted = rng.choice(("a", "b", "c", operator.wanted))
            for pool in operator.desired:
                operator.desired[pool] = rng.randint(0, 6)
            _run(operator, watch, rng.choice((1, 2, 5, 20, 60)))

        _settle(operator, watch)

        for pool, desired in operator.desired.items():
            assert operator.cluster.num_ready(pool) == desired, seed


@pytest.mark.slow
def test_rollouts_end_although_pods_are_killed_meanwhile() -> None:
    for seed in range(40):
        operator, watch = _random_world(seed)
        rng = operator.cluster.rng
        _settle(operator, watch)
        operator.wanted = "b"
        for _ in range(60):
            if rng.random() < 0.1:
                operator.cluster.kill_one()
                watch.forget_ready()
            _run(operator, watch, 1)

        _settle(operator, watch)

        for pool, desired in operator.desired.items():
            assert operator.cluster.num_ready_of(pool, "b") == desired, seed


@pytest.mark.slow
def test_a_bad_revision_stops_while_the_old_serves_in_full_and_editing_back_cleans_up() -> None:
    for seed in range(20):
        operator, watch = _random_world(seed)
        cluster = operator.cluster
        _settle(operator, watch)
        cluster.bad.add("b")
        operator.wanted = "b"

        _run(operator, watch, 300)

        assert operator.step is not None
        assert operator.step.phase is Phase.STOPPED, (seed, operator.step)
        for pool, desired in operator.desired.items():
            assert cluster.num_ready_of(pool, "a") == desired, seed
        operator.wanted = "a"
        _settle(operator, watch)


@pytest.mark.slow
def test_a_third_revision_gets_past_a_bad_second_one() -> None:
    for seed in range(20):
        operator, watch = _random_world(seed)
        _settle(operator, watch)
        operator.cluster.bad.add("b")
        operator.wanted = "b"
        _run(operator, watch, operator.cluster.rng.randint(1, 200))

        operator.wanted = "c"
        _settle(operator, watch)

        for pool, desired in operator.desired.items():
            assert operator.cluster.num_ready_of(pool, "c") == desired, seed


@pytest.mark.slow
def test_a_revision_that_heals_goes_on_by_itself_where_its_trial_was_kept() -> None:
    for seed in range(20):
        operator, watch = _random_world(seed)
        operator.settings = replace(operator.settings, strategy=Strategy.SURGE)
        cluster, watch.max_missing, cluster.capacity = operator.cluster, 0, 40
        _settle(operator, watch)
        cluster.bad.add("b")
        operator.wanted = "b"
        _run(operator, watch, 200)

        cluster.bad.clear()
        for pod in cluster.pods:
            pod.is_bad = False
        _settle(operator, watch)


@pytest.mark.slow
def test_a_prefill_pool_can_be_added_and_taken_out() -> None:
    for seed in range(40):
        operator, watch = _random_world(seed)
        operator.desired = {"serving": 3}
        operator.cluster.capacity = 40
        _settle(operator, watch)
        operator.wanted, operator.desired = "b", {"serving": 3, "prefill": 2}
        _settle(operator, watch)

        operator.wanted, operator.desired = "c", {"serving": 3}
        _settle(operator, watch)

        assert operator.cluster.num_ready("serving") == 3, seed


def _pair_capacity(operator: Operator) -> float:
    """Which part of the service is served by engines with partners of their own revision."""
    return sum(
        min(
            operator.cluster.num_ready_of(pool, revision) / desired
            for pool, desired in operator.desired.items()
        )
        for revision in {key.revision for key in operator.cluster.workloads}
    )


@pytest.mark.slow
def test_both_pools_move_in_proportion_so_that_pairs_stay_whole() -> None:
    for seed in range(40):
        operator, watch = _random_world(seed)
        operator.settings = replace(operator.settings, strategy=Strategy.SURGE)
        operator.desired = {"serving": 1 + seed % 6, "prefill": 1 + seed % 4}
        operator.cluster.capacity, watch.max_missing = 40, 0
        _settle(operator, watch)
        operator.wanted = "b"

        while operator.reported != Reported(Phase.SETTLED, "b", "b"):
            _run(operator, watch, 1)
            assert _pair_capacity(operator) >= 0.999, seed


def test_one_replica_without_room_is_replaced_only_after_the_status_has_said_so() -> None:
    for seed in range(20):
        operator, watch = _random_world(seed)
        operator.settings = SETTINGS
        operator.desired = {"serving": 1}
        operator.cluster.capacity = 1
        watch.max_missing = 1
        _settle(operator, watch)
        operator.wanted = "b"

        while operator.cluster.workloads[PoolRevision("serving", "a")].replicas:
            said = operator.reported.phase
            _run(operator, watch, 1)

        assert said == Phase.OUTAGE_AHEAD, seed
        _settle(operator, watch)
