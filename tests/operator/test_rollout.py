from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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

NOW_S = 10_000.0
SETTINGS = RolloutSettings(surge_timeout_s=60, progress_deadline_s=600)
GROUPS = "LeaderWorkerSet"
SETTLED_ON_A = Reported(Phase.SETTLED, "a", "a")


def _workload(revision: str, size: int, ready: int, pool: str = "serving") -> WorkloadView:
    return WorkloadView(
        kind="Deployment",
        name=f"qwen-{pool[0]}-{revision}",
        uid=f"uid-{revision}",
        pool=pool,
        revision=revision,
        created_s=NOW_S - 1000 + ord(revision[0]),
        generation=1,
        observed_generation=1,
        replicas=size,
        current_replicas=size,
        ready_replicas=ready,
    )


def _pods(revision: str, size: int, ready: int, pool: str = "serving") -> tuple[PodView, ...]:
    """The first ones are ready, the others load since a moment."""
    return tuple(
        PodView(
            name=f"{pool[0]}{revision}{n}",
            component="engine",
            pool=pool,
            revision=revision,
            phase="Running",
            is_ready=n < ready,
            is_terminating=False,
            created_s=NOW_S - 10,
            scheduled_s=NOW_S - 10,
            containers=(ContainerView("engine", n < ready, 0, is_started=n < ready),),
        )
        for n in range(size)
    )


def _plan(
    wanted: str,
    *revisions: tuple[str, int, int] | tuple[str, int, int, str],
    desired: int | Mapping[str, int] = 4,
    reported: Reported = SETTLED_ON_A,
    settings: RolloutSettings = SETTINGS,
    pods: tuple[PodView, ...] | None = None,
    **others: Any,
) -> RolloutStep:
    """`revisions` are (revision, size, ready) and maybe the pool."""
    made = tuple(pod for each in revisions for pod in _pods(*each))
    return plan_rollout(
        RolloutInput(
            wanted=wanted,
            desired={"serving": desired} if isinstance(desired, int) else desired,
            workloads=tuple(_workload(*each) for each in revisions),
            pods=made if pods is None else pods,
            settings=settings,
            now_s=NOW_S,
            reported=reported,
            **others,
        )
    )


def _sizes(step: RolloutStep) -> dict[str, int]:
    return {key.revision: size for key, size in step.replicas.items()}


def test_a_first_deployment_is_made_at_once() -> None:
    step = _plan("a", reported=Reported())

    assert _sizes(step) == {"a": 4}
    assert step.create == (PoolRevision("serving", "a"),)
    assert step.phase is Phase.DEPLOYING


def test_a_rollout_adds_one_replica_and_takes_none() -> None:
    step = _plan("b", ("a", 4, 4))

    assert _sizes(step) == {"a": 4, "b": 1}
    assert step.phase is Phase.ROLLING_OUT


def test_an_old_replica_goes_for_each_new_one_that_is_ready() -> None:
    assert _sizes(_plan("b", ("a", 4, 4), ("b", 1, 1))) == {"a": 3, "b": 2}
    assert _sizes(_plan("b", ("a", 1, 1), ("b", 4, 4))) == {"a": 0, "b": 4}


def test_a_revert_in_the_middle_keeps_what_serves() -> None:
    step = _plan("a", ("a", 2, 2), ("b", 2, 2))

    assert _sizes(step) == {"a": 3, "b": 2}


def test_intermediates_that_never_served_go_first() -> None:
    step = _plan("d", ("a", 4, 4), ("b", 1, 0), ("c", 1, 0))

    assert _sizes(step) == {"a": 4, "b": 0, "c": 0, "d": 1}


def test_a_new_pod_without_a_place_switches_to_replacing_after_the_time_limit() -> None:
    waiting = _pods("b", 1, 0)[0]
    waiting = replace(waiting, phase="Pending", scheduled_s=None, containers=())
    early = replace(waiting, unscheduled_since_s=NOW_S - 20)
    late = replace(waiting, unscheduled_since_s=NOW_S - 60)

    soon = _plan("b", ("a", 4, 4), ("b", 1, 0), pods=(*_pods("a", 4, 4), early))
    then = _plan("b", ("a", 4, 4), ("b", 1, 0), pods=(*_pods("a", 4, 4), late))

    assert _sizes(soon) == {"a": 4, "b": 1}
    assert soon.requeue_after_s == 40
    assert _sizes(then) == {"a": 3, "b": 1}
    assert then.phase is Phase.REPLACING


def test_replacing_goes_on_to_its_end_once_begun() -> None:
    begun = Reported(Phase.REPLACING, "a", "b")

    assert _sizes(_plan("b", ("a", 3, 3), ("b", 1, 1), reported=begun)) == {"a": 2, "b": 2}


def test_a_quota_is_no_room_at_once() -> None:
    workload = replace(
        _workload("b", 1, 0),
        created_s=NOW_S - 10,
        current_replicas=0,
        failure_reason="FailedCreate",
        failure_message='pods "x" is forbidden: exceeded quota: gpus, requested: pods=1',
    )
    step = plan_rollout(
        RolloutInput(
            wanted="b",
            desired={"serving": 4},
            workloads=(_workload("a", 4, 4), workload),
            pods=_pods("a", 4, 4),
            settings=SETTINGS,
            now_s=NOW_S,
            reported=SETTLED_ON_A,
        )
    )

    assert step.phase is Phase.REPLACING


def test_the_last_replica_is_replaced_only_after_the_status_has_said_so() -> None:
    settings = replace(SETTINGS, strategy=Strategy.REPLACE)
    announced = Reported(Phase.OUTAGE_AHEAD, "a", "b")

    first = _plan("b", ("a", 1, 1), desired=1, settings=settings)
    second = _plan("b", ("a", 1, 1), desired=1, settings=settings, reported=announced)

    assert first.phase is Phase.OUTAGE_AHEAD
    assert _sizes(first) == {"a": 1}
    assert first.create == ()
    assert first.requeue_after_s == 1
    assert "no ready engine" in first.message
    assert second.phase is Phase.REPLACING
    assert _sizes(second) == {"a": 0, "b": 1}


def test_an_outage_announced_for_another_revision_does_not_count() -> None:
    settings = replace(SETTINGS, strategy=Strategy.REPLACE)
    announced = Reported(Phase.OUTAGE_AHEAD, "a", "b")

    step = _plan("c", ("a", 1, 1), desired=1, settings=settings, reported=announced)

    assert step.phase is Phase.OUTAGE_AHEAD


def test_a_pod_that_loads_beyond_the_deadline_stops_the_rollout_at_full_count() -> None:
    slow = replace(_pods("b", 1, 0)[0], scheduled_s=NOW_S - 600)
    begun = Reported(Phase.REPLACING, "a", "b")

    surging = _plan("b", ("a", 4, 4), ("b", 1, 0), pods=(*_pods("a", 4, 4), slow))
    replacing = _plan("b", ("a", 3, 3), ("b", 1, 0), pods=(*_pods("a", 3, 3), slow), reported=begun)

    assert surging.phase is replacing.phase is Phase.STOPPED
    assert _sizes(surging) == {"a": 4, "b": 1}
    assert _sizes(replacing) == {"a": 4, "b": 0}
    assert "sb0" in surging.message
    assert "revision a goes on serving" in surging.message


def test_a_pod_that_waited_long_for_its_node_has_the_whole_deadline_to_load() -> None:
    pod = replace(_pods("b", 1, 0)[0], created_s=NOW_S - 5000, scheduled_s=NOW_S - 10)

    step = _plan("b", ("a", 4, 4), ("b", 1, 0), pods=(*_pods("a", 4, 4), pod))

    assert step.phase is Phase.ROLLING_OUT
    assert step.requeue_after_s == 590


def test_a_stop_is_remembered_until_the_spec_changes() -> None:
    stopped = Reported(Phase.STOPPED, "a", "b")

    still = _plan("b", ("a", 4, 4), ("b", 0, 0), reported=stopped)
    edited = _plan("c", ("a", 4, 4), ("b", 0, 0), reported=stopped)

    assert still.phase is Phase.STOPPED
    assert _sizes(still) == {"a": 4, "b": 0}
    assert edited.phase is Phase.ROLLING_OUT


def test_a_first_deployment_that_is_late_goes_on_when_it_comes() -> None:
    slow = replace(_pods("a", 1, 0)[0], scheduled_s=NOW_S - 600)
    stopped = Reported(Phase.STOPPED, "", "a")

    late = _plan("a", ("a", 1, 0), desired=1, pods=(slow,), reported=Reported())
    there = _plan("a", ("a", 1, 1), desired=1, reported=stopped)

    assert late.phase is Phase.STOPPED
    assert _sizes(late) == {"a": 1}
    assert there.phase is Phase.SETTLED


def test_scaling_in_a_stopped_rollout_scales_what_serves() -> None:
    stopped = Reported(Phase.STOPPED, "a", "b")

    up = _plan("b", ("a", 4, 4), ("b", 1, 0), desired=6, reported=stopped)
    down = _plan("b", ("a", 4, 4), ("b", 1, 0), desired=2, reported=stopped)

    assert _sizes(up) == {"a": 6, "b": 1}
    assert _sizes(down) == {"a": 2, "b": 1}


def test_scaling_up_in_the_middle_of_a_rollout_grows_the_new_revision() -> None:
    assert _sizes(_plan("b", ("a", 2, 2), ("b", 2, 2), desired=8)) == {"a": 2, "b": 7}


def test_scaling_to_zero_takes_everything() -> None:
    step = _plan("b", ("a", 2, 2), ("b", 2, 2), desired=0)

    assert _sizes(step) == {"a": 0, "b": 0}


def test_a_new_model_waits_for_the_cache_while_the_old_one_serves_and_scales() -> None:
    step = _plan("b", ("a", 4, 4), desired=5, is_model_ready=False)

    assert step.phase is Phase.WAITING_FOR_MODEL
    assert _sizes(step) == {"a": 5}
    assert step.create == ()


def test_the_old_revision_is_kept_empty_until_the_new_one_is_complete() -> None:
    serving = Reported(Phase.REPLACING, "a", "b")

    kept = _plan("b", ("a", 0, 0), ("b", 1, 0), desired=1, reported=serving)
    complete = _plan("b", ("a", 0, 0), ("b", 1, 1), desired=1, reported=serving)

    assert kept.delete == ()
    assert complete.delete == (PoolRevision("serving", "a"),)
    assert complete.phase is Phase.SETTLED
    assert complete.current == "b"


def test_nothing_is_deleted_while_its_pods_drain() -> None:
    draining = replace(_pods("a", 1, 1)[0], is_terminating=True)

    step = _plan("b", ("a", 0, 0), ("b", 4, 4), pods=(*_pods("b", 4, 4), draining))

    assert step.delete == ()


def test_pools_step_together_and_only_with_engines_of_both_that_are_ready() -> None:
    desired = {"serving": 4, "prefill": 2}
    olds: Any = (("a", 4, 4), ("a", 2, 2, "prefill"))

    alone = _plan("b", *olds, ("b", 1, 1), ("b", 1, 0, "prefill"), desired=desired)
    paired = _plan("b", *olds, ("b", 1, 1), ("b", 1, 1, "prefill"), desired=desired)

    assert alone.replicas[PoolRevision("serving", "a")] == 4
    assert alone.replicas[PoolRevision("prefill", "a")] == 2
    assert paired.replicas[PoolRevision("serving", "a")] == 3
    assert paired.replicas[PoolRevision("serving", "b")] == 2
    assert paired.replicas[PoolRevision("prefill", "a")] == 2
    assert paired.replicas[PoolRevision("prefill", "b")] == 1


def test_a_pool_that_is_taken_out_serves_until_the_others_have_moved() -> None:
    olds: Any = (("a", 2, 2), ("a", 1, 1, "prefill"))

    begun = _plan("b", *olds, desired=2)
    moved = _plan("b", ("a", 0, 0), ("a", 1, 1, "prefill"), ("b", 2, 2), desired=2)

    assert begun.replicas[PoolRevision("prefill", "a")] == 1
    assert moved.replicas[PoolRevision("prefill", "a")] == 0


def test_groups_leave_from_the_highest_index_so_a_ready_one_there_is_kept() -> None:
    groups = replace(_workload("a", 3, 2), kind=GROUPS)
    pods = tuple(
        replace(pod, group_index=n, worker_index=0, is_ready=n > 0)
        for n, pod in enumerate(_pods("a", 3, 3))
    )
    step = plan_rollout(
        RolloutInput(
            wanted="b",
            desired={"serving": 3},
            workloads=(groups, _workload("b", 1, 1)),
            pods=(*pods, *_pods("b", 1, 1)),
            settings=SETTINGS,
            now_s=NOW_S,
            reported=SETTLED_ON_A,
        )
    )

    assert _sizes(step)["a"] == 3


def test_readiness_that_may_be_of_the_past_takes_nothing_away() -> None:
    asked_again = replace(_workload("b", 2, 2), generation=3, observed_generation=1)
    step = plan_rollout(
        RolloutInput(
            wanted="b",
            desired={"serving": 2},
            workloads=(_workload("a", 2, 2), asked_again),
            pods=(*_pods("a", 2, 2), *_pods("b", 2, 2)),
            settings=SETTINGS,
            now_s=NOW_S,
            reported=SETTLED_ON_A,
        )
    )

    assert _sizes(step)["a"] == 2


@pytest.mark.parametrize(
    "taken",
    [
        replace(_workload("a", 4, 4), is_ours=False),
        replace(_workload("a", 4, 4), is_deleting=True),
    ],
)
def test_what_is_not_ours_or_is_being_deleted_is_neither_scaled_nor_made_again(
    taken: WorkloadView,
) -> None:
    step = plan_rollout(
        RolloutInput(
            wanted="a",
            desired={"serving": 4},
            workloads=(taken,),
            pods=(),
            settings=SETTINGS,
            now_s=NOW_S,
        )
    )

    assert step.replicas == {}
    assert step.create == ()


def test_a_hanging_old_engine_does_not_hold_the_rollout() -> None:
    hung = tuple(
        replace(pod, is_ready=False, containers=(ContainerView("engine", False, 0),))
        for pod in _pods("a", 2, 2)
    )

    step = _plan("b", ("a", 2, 0), ("b", 1, 1), desired=2, pods=(*hung, *_pods("b", 1, 1)))

    assert _sizes(step) == {"a": 1, "b": 2}


def test_a_crashed_old_revision_is_replaced_at_once() -> None:
    engine = ContainerView("engine", False, 5, False, "CrashLoopBackOff", exit_code=1)
    crashed = tuple(replace(pod, containers=(engine,)) for pod in _pods("a", 2, 0))

    step = _plan("b", ("a", 2, 0), desired=2, pods=crashed)

    assert _sizes(step) == {"a": 0, "b": 2}
