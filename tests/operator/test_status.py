from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvoy_operator.acceptance import Refusal
from kvoy_operator.conditions import PoolState, RouterState, accepted, degraded, ready
from kvoy_operator.observed import ChildKey, ContainerView, Observed, PodView, WorkloadView
from kvoy_operator.render_testing import make_router, make_service, service_body
from kvoy_operator.rollout import Phase, Reported, RolloutInput, RolloutSettings, plan_rollout
from kvoy_operator.router_state import own_router, shared_router
from kvoy_operator.scaling import pool_counts
from kvoy_operator.spec_status import LLMRouterStatus, LLMServiceStatus
from kvoy_operator.status import (
    facts_of,
    facts_of_refused,
    reported_rollout,
    router_status,
    scaler_status,
    service_status,
)

UP = RouterState(True, "RouterAvailable", "2 of 2 router pods ready.")
DOWN = RouterState(False, "RouterStarting", "0 of 2 router pods ready.")
REFUSED = Refusal("LWSNotInstalled", "spec.nodes: install it")
SPLIT: dict[str, Any] = {"engine": {"kind": "sim"}, "prefill": {"replicas": 1}}
NOW_S = 1_800_000_000.0
NOW = "2027-01-15T08:00:00Z"


def _workload(pool: str = "serving", *, ready: int = 1, replicas: int = 1) -> WorkloadView:
    return WorkloadView(
        kind="Deployment",
        name=f"qwen-{pool[0]}-aaaaaa",
        uid="u",
        pool=pool,
        revision="aaaaaa",
        created_s=NOW_S - 100,
        generation=1,
        observed_generation=1,
        replicas=replicas,
        current_replicas=replicas,
        ready_replicas=ready,
    )


def _pod(name: str, *, is_ready: bool = True, pool: str = "serving", **others: Any) -> PodView:
    return PodView(
        name=name,
        component="engine",
        pool=pool,
        revision="aaaaaa",
        phase="Running",
        is_ready=is_ready,
        is_terminating=False,
        created_s=NOW_S - 100,
        scheduled_s=NOW_S - 90,
        **others,
    )


def _crashing(name: str) -> PodView:
    engine = ContainerView("engine", False, 3, False, "CrashLoopBackOff", exit_code=1)
    return _pod(name, is_ready=False, containers=(engine,))


def _status(
    spec: Mapping[str, Any],
    observed: Observed,
    *,
    previous: Mapping[str, Any] | None = None,
    router: RouterState = UP,
    refusal: Refusal | None = None,
    now_s: float = NOW_S,
) -> dict[str, Any]:
    service = replace(make_service(spec, generation=7), status=previous or {})
    counts = pool_counts(service, None)
    step = plan_rollout(
        RolloutInput(
            wanted="aaaaaa",
            desired={name: count.desired for name, count in counts.items()},
            workloads=observed.workloads,
            pods=observed.pods,
            settings=RolloutSettings(),
            now_s=now_s,
            reported=reported_rollout(service.status),
        )
    )
    facts = facts_of(service, counts, "aaaaaa", is_tls=False)
    return service_status(facts, observed, None if refusal else step, router, refusal, now_s)


def _condition(status: Mapping[str, Any], name: str) -> tuple[str, str]:
    (found,) = (each for each in status["conditions"] if each["type"] == name)
    return found["status"], found["reason"]


SERVING = Observed(workloads=(_workload(),), pods=(_pod("one"),))


def test_a_serving_service_shows_everything() -> None:
    status = _status({}, SERVING)

    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert status["url"] == "http://qwen.default.svc/v1"
    assert status["model"] == "qwen"
    assert status["replicas"] == 1
    assert status["revision"] == {"current": "aaaaaa", "update": "aaaaaa"}
    assert status["selector"] == (
        "kvoy.dev/component=engine,kvoy.dev/pool=serving,kvoy.dev/service=qwen"
    )
    assert status["pools"] == [
        {
            "name": "serving",
            "desired": 1,
            "ready": 1,
            "updated": 1,
            "replicasOwner": "LLMService",
            "revision": "aaaaaa",
        }
    ]
    assert conditions == {
        "Accepted": ("True", "Accepted"),
        "Ready": ("True", "AllReady"),
        "Progressing": ("False", "Settled"),
        "Degraded": ("False", "AsExpected"),
        "RouterReady": ("True", "RouterAvailable"),
    }
    assert {each["observedGeneration"] for each in status["conditions"]} == {7}


def test_every_field_is_one_that_the_schema_keeps() -> None:
    LLMServiceStatus.model_validate(_status(SPLIT, SERVING))
    LLMServiceStatus.model_validate(_status({}, Observed(), refusal=REFUSED))


def test_an_unchanged_status_is_the_very_same_later() -> None:
    first = _status({}, SERVING)

    assert _status({}, SERVING, previous=first, now_s=NOW_S + 500) == first


def test_a_transition_time_changes_with_the_status_alone() -> None:
    first = _status({}, SERVING)
    broken = Observed(workloads=(_workload(ready=0),), pods=(_crashing("one"),))

    second = _status({}, broken, previous=first, now_s=NOW_S + 60)

    since = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert since["Accepted"] == since["RouterReady"] == NOW
    assert since["Ready"] == since["Degraded"] == "2027-01-15T08:01:00Z"


def test_a_service_that_was_ready_and_crashes_is_ready_no_more() -> None:
    before = _status({}, SERVING)
    broken = Observed(workloads=(_workload(ready=0),), pods=(_crashing("one"),))

    status = _status({}, broken, previous=before)

    ready = next(each for each in status["conditions"] if each["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "CrashLoop")
    assert "pod one" in ready["message"]
    assert _condition(status, "Degraded") == ("True", "CrashLoop")
    assert _condition(status, "Progressing") == ("True", "Scaling")


def test_an_empty_cluster_is_loading() -> None:
    status = _status({}, Observed(), router=DOWN)

    assert _condition(status, "Ready") == ("False", "Loading")
    assert _condition(status, "Progressing") == ("True", "Deploying")
    assert _condition(status, "Degraded") == ("False", "AsExpected")
    assert _condition(status, "RouterReady") == ("False", "RouterStarting")


def test_engines_without_a_router_are_not_ready() -> None:
    assert _condition(_status({}, SERVING, router=DOWN), "Ready") == ("False", "RouterNotReady")


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (4, ("True", "AllReady")),
        (3, ("True", "MinimumReady")),
        (2, ("False", "Loading")),
        (0, ("False", "Loading")),
    ],
)
def test_a_pool_may_lack_as_many_as_the_rollout_may_take(
    ready: int, expected: tuple[str, str]
) -> None:
    pods = tuple(_pod(f"p{n}", is_ready=n < ready) for n in range(4))
    observed = Observed(workloads=(_workload(ready=ready, replicas=4),), pods=pods)

    assert _condition(_status({"replicas": 4}, observed), "Ready") == expected


def test_zero_wanted_replicas_are_not_ready_and_not_degraded() -> None:
    status = _status({"replicas": 0}, Observed())

    assert _condition(status, "Ready") == ("False", "ScaledToZero")
    assert _condition(status, "Degraded") == ("False", "AsExpected")


def test_a_pool_that_is_taken_out_vanishes_from_the_status() -> None:
    both = Observed(
        workloads=(_workload(), _workload("prefill")),
        pods=(_pod("one"), _pod("two", pool="prefill")),
    )
    before = _status(SPLIT, both)

    after = _status({}, both, previous=before)

    assert [pool["name"] for pool in before["pools"]] == ["serving", "prefill"]
    assert [pool["name"] for pool in after["pools"]] == ["serving"]
    assert "prefill" not in str(after["conditions"])


def test_a_refused_service_reports_what_still_runs_beside_the_refusal() -> None:
    before = _status({}, SERVING)

    status = _status({}, SERVING, previous=before, refusal=REFUSED)

    assert _condition(status, "Accepted") == ("False", "LWSNotInstalled")
    assert _condition(status, "Ready") == ("True", "AllReady")
    assert _condition(status, "Progressing") == ("False", "LWSNotInstalled")


def test_a_refused_service_that_runs_nothing_says_why_it_is_not_ready() -> None:
    status = _status({}, Observed(), refusal=REFUSED)

    assert _condition(status, "Ready") == ("False", "LWSNotInstalled")
    assert _condition(status, "Degraded") == ("False", "AsExpected")


def test_a_spec_that_cannot_be_read_keeps_what_was_known() -> None:
    before = _status({}, SERVING)
    body = service_body({"unknown": 1}, generation=8) | {"status": before}
    refusal = Refusal("InvalidSpec", "spec.unknown: is not a field")

    status = service_status(facts_of_refused(body), SERVING, None, UP, refusal, NOW_S)

    assert status["url"] == before["url"]
    assert status["pools"] == before["pools"]
    assert status["revision"] == before["revision"]
    assert status["observedGeneration"] == 8
    assert _condition(status, "Accepted") == ("False", "InvalidSpec")
    assert _condition(status, "Ready") == ("True", "AllReady")


def test_one_replica_too_many_may_wait_for_room_without_degrading_the_service() -> None:
    waiting = _pod("new", is_ready=False, unscheduled_since_s=NOW_S, unscheduled_message="full")
    observed = Observed(
        workloads=(_workload(), replace(_workload(ready=0), revision="bbbbbb")),
        pods=(_pod("one"), replace(waiting, phase="Pending", revision="bbbbbb")),
    )

    assert _condition(_status({}, observed), "Degraded") == ("False", "AsExpected")


def test_pods_that_ended_tell_nothing_once_others_serve_in_their_place() -> None:
    ended = replace(_pod("old", is_ready=False), phase="Failed", reason="Evicted")
    observed = Observed(workloads=(_workload(),), pods=(_pod("one"), ended))

    assert _condition(_status({}, observed), "Degraded") == ("False", "AsExpected")


def test_autoscalers_of_groups_see_the_leaders_alone() -> None:
    group = replace(_workload(), kind="LeaderWorkerSet")

    status = _status({}, Observed(workloads=(group,)))

    assert status["selector"].endswith("leaderworkerset.sigs.k8s.io/worker-index=0")


def test_the_next_step_reads_what_the_status_says() -> None:
    assert reported_rollout({}) == Reported()
    assert reported_rollout(_status({}, SERVING)) == Reported(Phase.SETTLED, "aaaaaa", "aaaaaa")


def test_a_scale_in_progress_does_not_make_a_ready_service_unready() -> None:
    asked = replace(_workload(), replicas=3, generation=2)

    status = _status({"replicas": 3}, Observed(workloads=(asked,), pods=(_pod("one"),)))

    assert status["pools"][0]["ready"] == 1


def test_a_scaler_shows_its_own_pool() -> None:
    workloads = (_workload(), _workload("prefill", replicas=3))
    scaler = {"metadata": {"generation": 2}}

    status = scaler_status(scaler, "qwen", "prefill", Observed(workloads=workloads))

    assert status == {
        "observedGeneration": 2,
        "replicas": 3,
        "selector": "kvoy.dev/component=engine,kvoy.dev/pool=prefill,kvoy.dev/service=qwen",
    }


def test_a_shared_router_lists_models_and_weights() -> None:
    one, two = make_service(name="one"), make_service({"model": {"uri": "hf://a/b", "name": "m"}})

    status = router_status(make_router(), [(two, 20), (one, 100)], UP, (2, 2), None, NOW_S)

    LLMRouterStatus.model_validate(status)
    assert status["models"] == ["m", "one"]
    assert [each["name"] for each in status["services"]] == ["one", "qwen"]
    assert _condition(status, "Ready") == ("True", "RouterAvailable")


def test_a_weight_for_no_service_is_named() -> None:
    router = make_router(
        {"weights": [{"service": "qwen", "weight": 1}, {"service": "typo", "weight": 9}]}
    )

    status = router_status(router, [(make_service(), 1)], UP, (2, 2), None, NOW_S)

    (told,) = (each for each in status["conditions"] if each["type"] == "Accepted")
    assert told["status"] == "True"
    assert "spec.weights" in told["message"]
    assert "typo" in told["message"]
    assert "qwen" not in told["message"]


def test_a_shared_router_without_services_is_not_ready() -> None:
    status = router_status(make_router(), [], UP, (2, 2), None, NOW_S)

    assert _condition(status, "Ready") == ("False", "NoServices")
    assert _condition(status, "RouterReady") == ("True", "RouterAvailable")


def _router_deployment(available: int) -> Observed:
    body = {
        "metadata": {"name": "qwen-router", "uid": "1", "generation": 1},
        "spec": {"replicas": 2},
        "status": {"availableReplicas": available, "observedGeneration": 1},
    }
    return Observed(children={ChildKey("Deployment", "qwen-router"): body})


def test_a_router_is_up_with_its_first_pod_and_says_why_not() -> None:
    failing = replace(_crashing("r"), component="router", pool="")

    assert own_router("qwen", _router_deployment(1)).is_ready
    assert own_router("qwen", _router_deployment(0)).reason == "RouterStarting"
    assert own_router("qwen", Observed()).reason == "RouterStarting"
    assert own_router("qwen", replace(Observed(), pods=(failing,))).reason == "CrashLoop"


def test_a_new_router_pod_that_cannot_start_is_told_while_old_ones_serve() -> None:
    observed = _router_deployment(2)
    (deployment,) = (dict(each) for each in observed.children.values())
    deployment["status"] = {"replicas": 3, "availableReplicas": 2, "updatedReplicas": 1}
    waiting = ContainerView(
        "router", False, 0, waiting_reason="FailedMount", waiting_message='secret "k" not found'
    )
    new = replace(_pod("new"), component="router", is_ready=False, containers=(waiting,))
    observed = replace(
        observed, children={ChildKey("Deployment", "qwen-router"): deployment}, pods=(new,)
    )

    state = own_router("qwen", observed)

    assert state.is_ready
    assert state.message.startswith("2 of 2 router pods ready. pod ")
    assert 'secret "k" not found. Create the Secret' in state.message


def test_the_url_says_whether_the_router_speaks_tls() -> None:
    service = make_service()
    counts = pool_counts(service, None)
    router = make_router({"tlsSecretRef": {"name": "certificate"}})

    assert facts_of(service, counts, "r", is_tls=False).url == "http://qwen.default.svc/v1"
    assert facts_of(service, counts, "r", is_tls=True).url == "https://qwen.default.svc/v1"
    told = router_status(router, [], UP, (2, 2), None, NOW_S)
    assert told["url"] == "https://shared.default.svc/v1"


def _ready(*pools: PoolState) -> tuple[bool, str]:
    condition = ready(pools, 1, UP, None, accepted())
    return condition.holds, condition.reason


def test_a_prefill_pool_alone_answers_nothing() -> None:
    prefill = PoolState("prefill", 1, 1, 1, "LLMRoleScaler", "r1")

    assert _ready(PoolState("serving", 0, 0, 0, "LLMService", "r1"), prefill) == (
        False,
        "ScaledToZero",
    )
    assert _ready(PoolState("serving", 1, 1, 1, "LLMService", "r1"), prefill) == (True, "AllReady")


def test_a_pool_that_is_being_added_is_not_missed_yet() -> None:
    split = make_service(SPLIT)
    before = [_workload(), _workload("prefill", ready=0)]
    before[1] = replace(before[1], revision="bbbbbb", name="qwen-p-bbbbbb")
    observed = Observed(workloads=tuple(before), pods=(_pod("serving"),))
    facts = replace(
        facts_of(split, pool_counts(split, None), "bbbbbb", is_tls=False),
        previous={"revision": {"current": "aaaaaa", "update": "aaaaaa"}},
    )

    status = service_status(facts, observed, None, UP, None, NOW_S)

    assert _condition(status, "Ready") == ("True", "MinimumReady")


def test_a_router_whose_pods_are_refused_says_by_whom_and_what_to_do() -> None:
    observed = _router_deployment(0)
    (deployment,) = (dict(each) for each in observed.children.values())
    condition = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": 'pods "qwen-router-1" is forbidden: failed quota: tight: must specify '
        "limits.cpu for: router",
    }
    deployment["status"] = {"replicas": 0, "conditions": [condition]}
    observed = replace(observed, children={ChildKey("Deployment", "qwen-router"): deployment})

    state = own_router("qwen", observed)

    assert (state.is_ready, state.reason) == (False, "QuotaExceeded")
    assert "router.resources" in state.message


def test_a_router_that_may_not_be_made_says_why() -> None:
    refusal = Refusal("NameClash", "metadata.name: taken")

    state = own_router("qwen", Observed(), refusal)

    assert (state.reason, state.message) == ("NameClash", "metadata.name: taken")


def test_a_failing_router_degrades_its_service() -> None:
    failing = replace(_crashing("r"), component="router", pool="")
    router = own_router("qwen", replace(_router_deployment(0), pods=(failing,)))
    full = (PoolState("serving", 1, 1, 1, "LLMService", "r1"),)

    condition = degraded(full, Phase.SETTLED, None, "", router)

    assert (condition.holds, condition.reason) == (True, "CrashLoop")
    assert not degraded(full, Phase.SETTLED, None, "", own_router("qwen", Observed())).holds


def test_a_shared_routers_readiness_is_that_of_its_object() -> None:
    condition = {"type": "Ready", "status": "True", "reason": "RouterAvailable", "message": "up"}

    assert shared_router("shared", {"status": {"conditions": [condition]}}).is_ready
    assert not shared_router("shared", {}).is_ready
    assert shared_router("shared", None).reason == "RouterNotFound"
