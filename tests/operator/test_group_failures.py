from __future__ import annotations

from dataclasses import replace

import pytest

from kvoy_operator.failures import Failure, FailureReason
from kvoy_operator.group_failures import ROUND_S, lasting_failure
from kvoy_operator.observed import Observed, PodView, WorkloadView

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
    failure = lasting_failure(now, DEGRADED, Observed(pods=(pod,)), generation, NOW_S)
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
        replace(POD, worker_index=None, group_index=None),
    ],
)
def test_it_stops_when_the_group_serves_or_lives_on_or_is_none(pod: PodView) -> None:
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
