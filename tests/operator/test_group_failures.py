from __future__ import annotations

from dataclasses import replace

import pytest

from kvoy_operator.failures import Failure, FailureReason
from kvoy_operator.group_failures import ROUND_S, lasting_failure
from kvoy_operator.observed import Observed, PodView, WorkloadView
from kvoy_operator.rollout_health import HOPELESS_GRACE_S, Health, judge
from kvoy_operator.status import reported_rollout

NOW_S = 10_000.0
POD = PodView(
    name="wide-s-aaaaa-0",
    component="engine",
    pool="serving",
    revision="aaaaa",
    phase="Running",
    is_ready=False,
    is_terminating=False,
    created_s=NOW_S - 5,
    group_index=0,
    worker_index=0,
)
GROUPS = WorkloadView(
    kind="LeaderWorkerSet",
    name="wide-s-aaaaa",
    uid="u",
    pool="serving",
    revision="aaaaa",
    created_s=NOW_S - 600,
    generation=1,
    observed_generation=1,
    replicas=1,
    current_replicas=1,
    ready_replicas=0,
    group_size=2,
)
MADE_ANEW = Observed(workloads=(GROUPS,), pods=(POD,))
DEGRADED = {
    "status": "True",
    "reason": "OOMKilled",
    "message": "pod wide-s-aaaaa-0: it ended",
    "observedGeneration": 4,
}
CRASH = Failure(FailureReason.CRASH_LOOP, "wide-s-aaaaa-0-1", "its leader left")
LOAD = Failure(FailureReason.MODEL_LOAD_FAILED, "wide-s-aaaaa-0", "no such model")
IMAGE = Failure(FailureReason.IMAGE_PULL, "wide-s-aaaaa-0", "no such image")


def _told(now: Failure | None, pod: PodView = POD, generation: int = 4) -> str | None:
    failure = lasting_failure(now, DEGRADED, replace(MADE_ANEW, pods=(pod,)), generation, NOW_S)
    return failure.reason if failure else None


@pytest.mark.parametrize("observed", [MADE_ANEW, replace(MADE_ANEW, pods=())])
def test_a_group_that_is_made_anew_goes_on_telling_why_it_ended(observed: Observed) -> None:
    failure = lasting_failure(None, DEGRADED, observed, 4, NOW_S)

    assert failure is not None
    assert (failure.reason, failure.message) == ("OOMKilled", DEGRADED["message"])


@pytest.mark.parametrize(
    "pod",
    [
        replace(POD, is_ready=True),
        replace(POD, created_s=NOW_S - ROUND_S - 1),
    ],
)
def test_it_stops_when_the_group_serves_or_lives_on(pod: PodView) -> None:
    assert _told(None, pod) is None


def test_another_spec_may_have_mended_it() -> None:
    assert _told(None, generation=5) is None


def test_what_says_more_is_told_and_what_follows_from_it_is_not() -> None:
    assert _told(CRASH) == "OOMKilled"
    assert _told(LOAD) == "ModelLoadFailed"
    assert _told(IMAGE) == "ImagePull"


def test_what_did_not_end_a_pod_is_not_kept() -> None:
    waiting = DEGRADED | {"reason": "Unschedulable"}

    assert lasting_failure(None, waiting, MADE_ANEW, 4, NOW_S) is None
    assert lasting_failure(None, {}, MADE_ANEW, 4, NOW_S) is None


def _judged(failing_since_s: float | None, *, is_replacing_old: bool = True) -> Health:
    return judge(
        [GROUPS],
        [],
        progress_deadline_s=2400.0,
        surge_timeout_s=60.0,
        is_replacing_old=is_replacing_old,
        failing_since_s=failing_since_s,
        now_s=NOW_S,
    )


def test_a_group_that_ends_again_and_again_stops_its_rollout() -> None:
    assert _judged(NOW_S - HOPELESS_GRACE_S - 1).stuck_subject == "wide-s-aaaaa"
    assert not _judged(NOW_S - HOPELESS_GRACE_S + 1).is_stuck
    assert not _judged(NOW_S - HOPELESS_GRACE_S - 1, is_replacing_old=False).is_stuck
    assert not _judged(None).is_stuck


def test_a_failure_that_is_older_than_the_group_is_not_held_against_it() -> None:
    young = replace(GROUPS, created_s=NOW_S - 10)

    health = judge(
        [young],
        [],
        progress_deadline_s=2400.0,
        surge_timeout_s=60.0,
        is_replacing_old=True,
        failing_since_s=NOW_S - 5000,
        now_s=NOW_S,
    )

    assert not health.is_stuck
    assert health.recheck_after_s == pytest.approx(HOPELESS_GRACE_S - 10)


@pytest.mark.parametrize(("reason", "is_told"), [("OOMKilled", True), ("ImagePull", False)])
def test_the_status_remembers_since_when_pods_end(reason: str, is_told: bool) -> None:
    condition = {"type": "Degraded", **DEGRADED, "reason": reason}
    condition["lastTransitionTime"] = "2027-01-15T08:00:00Z"

    reported = reported_rollout({"conditions": [condition]})

    assert reported.failing == (DEGRADED["message"] if is_told else "")
    assert reported.failing_since_s == (1_800_000_000.0 if is_told else 0.0)
