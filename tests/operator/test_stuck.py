"""What only Events tell: groups whose pods cannot be made, pods that a node cannot set up. The
texts are what Kubernetes 1.37 says, word by word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from kvoy_operator.api import Api
from kvoy_operator.cluster import Cluster
from kvoy_operator.failures import first_failure
from kvoy_operator.news import Newsroom
from kvoy_operator.observed import ContainerView, Observed, PodView, WorkloadView
from kvoy_operator.record import Key
from kvoy_operator.stuck import PATIENCE_S, News, Stuck, latest_news, stuck_since, with_news

KEY = Key("LLMService", "team", "wide")
ENGINE = ContainerView("engine", False, 0, False, waiting_reason="ContainerCreating")
LEADER = PodView(
    name="wide-s-aaaaa-0",
    component="engine",
    pool="serving",
    revision="aaaaa",
    phase="Pending",
    is_ready=False,
    is_terminating=False,
    created_s=110.0,
    scheduled_s=111.0,
    containers=(replace(ENGINE, waiting_reason=""),),
    group_index=0,
    worker_index=0,
)
WORKER = replace(LEADER, name="wide-s-aaaaa-0-1", worker_index=1, created_s=112.0)
GROUPS = WorkloadView(
    kind="LeaderWorkerSet",
    name="wide-s-aaaaa",
    uid="u",
    pool="serving",
    revision="aaaaa",
    created_s=100.0,
    generation=1,
    observed_generation=1,
    replicas=1,
    current_replicas=1,
    ready_replicas=0,
    group_size=2,
)
LEADERS, WORKERS = Stuck("StatefulSet", "wide-s-aaaaa"), Stuck("StatefulSet", "wide-s-aaaaa-0")
QUOTA = (
    "Create Pod wide-s-aaaaa-0-1 in StatefulSet wide-s-aaaaa-0 failed error: pods "
    '"wide-s-aaaaa-0-1" is forbidden: exceeded quota: tight, requested: pods=1, used: pods=2, '
    "limited: pods=2"
)
SECURITY = (
    "Create Pod wide-s-aaaaa-0 in StatefulSet wide-s-aaaaa failed error: pods "
    '"wide-s-aaaaa-0" is forbidden: violates PodSecurity "restricted:latest": host namespaces '
    "(hostNetwork=true)"
)


def _group(*pods: PodView, **workload: Any) -> Observed:
    return Observed(workloads=(replace(GROUPS, **workload),), pods=pods)


@pytest.mark.parametrize(
    ("observed", "stuck"),
    [
        (_group(), {LEADERS: 100.0}),
        (_group(LEADER), {WORKERS: 110.0}),
        (_group(LEADER, WORKER), {}),
        (_group(LEADER, WORKER, replicas=2), {LEADERS: 110.0}),
        (_group(replace(LEADER, is_terminating=True)), {}),
        (_group(is_deleting=True), {}),
        (_group(group_size=1), {}),
    ],
)
def test_a_group_that_lacks_pods_is_asked_about_since_its_last_one_was_made(
    observed: Observed, stuck: dict[Stuck, float]
) -> None:
    assert stuck_since(observed) == stuck


@pytest.mark.parametrize(
    ("pod", "is_stuck"),
    [
        (replace(LEADER, containers=(ENGINE,)), True),
        (replace(LEADER, containers=(replace(ENGINE, waiting_reason="PodInitializing"),)), True),
        (replace(LEADER, containers=(replace(ENGINE, waiting_reason="ErrImagePull"),)), False),
        (replace(LEADER, containers=()), False),
        (replace(LEADER, containers=(ENGINE,), is_terminating=True), False),
        (replace(LEADER, containers=(ENGINE,), scheduled_s=None), False),
    ],
)
def test_a_pod_is_asked_about_between_its_node_and_its_first_container(
    pod: PodView, is_stuck: bool
) -> None:
    assert (Stuck("Pod", pod.name) in stuck_since(Observed(pods=(pod,)))) is is_stuck


@pytest.mark.parametrize(
    ("stuck", "news", "pods", "reason"),
    [
        (WORKERS, News("FailedCreate", QUOTA), (LEADER,), "QuotaExceeded"),
        (LEADERS, News("FailedCreate", SECURITY), (), "PodSecurityForbidden"),
    ],
)
def test_a_group_says_why_its_pods_cannot_be_made(
    stuck: Stuck, news: News, pods: tuple[PodView, ...], reason: str
) -> None:
    told = with_news(_group(*pods), {stuck: news})

    failure = first_failure(told.pods, told.workloads)

    assert failure is not None
    assert failure.reason == reason
    assert "LeaderWorkerSet wide-s-aaaaa" in failure.message


@pytest.mark.parametrize(
    ("reason", "note", "expected"),
    [
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "v" : configmap "nope" not found',
            "MissingConfigMap",
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "v" : secret "nope" not found',
            "MissingSecret",
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "v" : references non-existent secret key: k',
            "MissingSecret",
        ),
        (
            "FailedAttachVolume",
            'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) other',
            "PodSetupFailed",
        ),
        ("FailedCreatePodSandBox", "Failed to create pod sandbox: no network", "PodSetupFailed"),
    ],
)
def test_a_pod_says_why_its_node_cannot_set_it_up(reason: str, note: str, expected: str) -> None:
    pod = replace(LEADER, containers=(ENGINE,))
    told = with_news(Observed(pods=(pod,)), {Stuck("Pod", pod.name): News(reason, note)})

    failure = first_failure(told.pods)

    assert failure is not None
    assert failure.reason == expected
    assert note.rstrip(".") in failure.message


def _event(note: str, at: str, reason: str = "FailedCreate") -> dict[str, Any]:
    return {"reason": reason, "note": note, "deprecatedLastTimestamp": at, "eventTime": None}


def test_the_newest_event_counts_and_none_from_before() -> None:
    events = [
        _event("first", "1970-01-01T00:02:00Z"),
        _event("second", "1970-01-01T00:03:00Z"),
        _event("Startup probe failed", "1970-01-01T00:04:00Z", "Unhealthy"),
    ]

    assert latest_news(events, since_s=100.0) == News("FailedCreate", "second")
    assert latest_news(events, since_s=181.0) is None


class _Server:
    def __init__(self) -> None:
        self.questions: list[str] = []
        self.items: list[dict[str, Any]] | None = [_event(QUOTA, "1970-01-01T00:02:30Z")]

    async def request(self, method: str, path: str, **options: Any) -> Any:
        assert (method, path) == ("GET", "/apis/events.k8s.io/v1/namespaces/team/events")
        self.questions.append(options["params"]["fieldSelector"])
        return {"items": self.items}


async def test_events_are_asked_for_rarely_and_what_is_no_longer_stuck_is_forgotten() -> None:
    server, now_s = _Server(), 111.0
    cluster = Cluster(cast(Api, server), lambda *_: None, lambda *_: None)
    newsroom = Newsroom(cluster, lambda: now_s)
    stuck = _group(LEADER)

    assert await newsroom.refresh(KEY, stuck) == PATIENCE_S - 1.0
    assert server.questions == []
    now_s = 160.0
    for _ in range(3):
        assert await newsroom.refresh(KEY, stuck) == 30.0
    assert server.questions == [
        "type=Warning,regarding.kind=StatefulSet,regarding.name=wide-s-aaaaa-0"
    ]
    assert newsroom.tell(KEY, stuck).workloads[0].failure_message == QUOTA

    whole = _group(LEADER, WORKER)
    assert await newsroom.refresh(KEY, whole) is None
    assert newsroom.tell(KEY, stuck) == stuck
