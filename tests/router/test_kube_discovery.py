"""Following pods and verifying whose they are, over an API that does what a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from kvoy_contract.fleet import Fleet, FleetService
from kvoy_contract.names import COMPONENT_LABEL
from kvoy_router import kube_discovery
from kvoy_router.errors import KubeError
from kvoy_router.found import FoundEngine
from kvoy_router.kube_discovery import KubeDiscovery
from kvoy_router.kube_objects import ObjectMeta
from kvoy_router.kube_testing import FakeApi, meta, reference
from kvoy_router.testing import eventually

SERVICE = FleetService(name="svc", uid="svc-uid", model="m", secret="s")
FLEET = Fleet(services=(SERVICE,))


class Watched:
    """A discovery that runs over a fake API, with what it published."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.published: list[Sequence[FoundEngine]] = []
        self.lost: set[str] = set()
        self.discovery = KubeDiscovery(
            "ns", api.open, self.published.append, self.lost.__contains__, time.monotonic
        )

    @property
    def pods(self) -> dict[str, bool]:
        """Name → whether it is draining, as published last."""
        latest = self.published[-1] if self.published else ()
        return {engine.origin.pod: engine.is_draining for engine in latest}


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """With its pauses shortened."""
    monkeypatch.setattr(kube_discovery, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kube_discovery, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(kube_discovery, "_SWEEP_S", 0.01)
    watched = Watched(FakeApi())
    task = asyncio.create_task(watched.discovery.run())
    yield watched
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def settled(watched: Watched, *names: str) -> None:
    await eventually(lambda: set(watched.pods) == set(names) and watched.api.num_watches == 1)


async def test_nothing_is_asked_before_the_fleet_is_known(watched: Watched) -> None:
    await asyncio.sleep(0)

    assert watched.api.num_lists == 0
    assert not watched.discovery.has_listed


async def test_pods_come_and_go_with_the_watch(watched: Watched) -> None:
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    watched.api.put("b", ip="10.0.0.2")
    await settled(watched, "a", "b")
    watched.api.delete("a")
    await settled(watched, "b")

    assert watched.api.num_lists == 1
    assert watched.discovery.error is None


async def test_a_leader_of_a_group_is_found_by_its_stateful_set(watched: Watched) -> None:
    api = watched.api
    group = "leaderworkerset.x-k8s.io/v1"
    api.owners["StatefulSet", "g"] = meta("g", reference("LeaderWorkerSet", "lws", group))
    service = reference("LLMService", "svc", "kvoy.dev/v1alpha1")
    api.owners["LeaderWorkerSet", "lws"] = meta("lws", service)
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    api.put("g-0", owner=reference("StatefulSet", "g"), labels={index: "0"})
    api.put("g-0-1", owner=reference("StatefulSet", "g-0"), ip="10.0.0.2", labels={index: "1"})

    watched.discovery.set_fleet(FLEET)

    await settled(watched, "g-0")


@pytest.mark.parametrize(
    ("owner", "owners"),
    [
        pytest.param(None, {}, id="no owner"),
        pytest.param(reference("Job", "j", "batch/v1"), {}, id="another kind"),
        pytest.param(reference("ReplicaSet", "none"), {}, id="an owner that is not there"),
        pytest.param(reference("ReplicaSet", "rs", uid="other"), {}, id="a namesake's uid"),
        pytest.param(
            reference("ReplicaSet", "x"), {("ReplicaSet", "x"): meta("x", None)}, id="chain ends"
        ),
        pytest.param(
            reference("ReplicaSet", "x"),
            {
                ("ReplicaSet", "x"): meta("x", reference("Deployment", "y")),
                ("Deployment", "y"): meta(
                    "y", reference("LLMService", "svc", "kvoy.dev/v1alpha1", uid="stranger")
                ),
            },
            id="a stranger's service",
        ),
        pytest.param(
            reference("ReplicaSet", "x"),
            {
                ("ReplicaSet", "x"): meta("x", reference("Deployment", "y")),
                ("Deployment", "y"): meta("y", reference("LLMService", "svc", "evil.dev/v1")),
            },
            id="a service of another group",
        ),
        pytest.param(
            reference("ReplicaSet", "x"),
            {("ReplicaSet", "x"): meta("x", reference("LLMService", "svc", "kvoy.dev/v1alpha1"))},
            id="a link is missing",
        ),
    ],
)
async def test_a_stranger_gets_nothing_and_is_named_once(
    watched: Watched, caplog: pytest.LogCaptureFixture, owner: Any, owners: dict[Any, ObjectMeta]
) -> None:
    watched.api.owners |= owners
    watched.api.put("stranger", owner=owner, labels={COMPONENT_LABEL: "engine"})
    watched.api.put("ours", ip="10.0.0.2")

    watched.discovery.set_fleet(FLEET)
    await settled(watched, "ours")
    await eventually(lambda: "none of ours" in caplog.text)
    for _ in range(3):
        watched.api.put("stranger", owner=owner, labels={COMPONENT_LABEL: "engine"})
    watched.api.put("later", ip="10.0.0.3")
    await settled(watched, "ours", "later")

    assert caplog.text.count("none of ours") == 1


async def test_pods_of_one_owner_cost_one_look(watched: Watched) -> None:
    for number in range(200):
        watched.api.put(f"p{number}", ip=f"10.0.1.{number}")

    watched.discovery.set_fleet(FLEET)
    await eventually(lambda: len(watched.pods) == 200)

    assert watched.api.num_lookups == 2


async def test_an_owner_that_cannot_be_looked_up_is_tried_again(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.api.refuses_owners = True
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await eventually(lambda: "owner cannot be looked up" in caplog.text)
    assert watched.pods == {}

    watched.api.refuses_owners = False
    watched.discovery.set_fleet(FLEET)  # looks again at once

    await settled(watched, "a")


async def test_verified_pods_stay_while_the_api_is_away(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    watched.api.is_away = True
    watched.api.end_watches(KubeError("reset"))
    await eventually(lambda: watched.discovery.error is not None)
    watched.api.put("b", ip="10.0.0.2")
    assert watched.pods == {"a": False}
    assert watched.discovery.has_listed
    watched.api.is_away = False
    await settled(watched, "a", "b")

    assert watched.discovery.error is None
    assert caplog.text.count("Kubernetes API fails") == 1
    assert caplog.text.count("Kubernetes API answers again") == 1


async def test_a_list_that_fails_slowly_has_failed_all_the_same(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_discovery, "_STEADY_S", -1.0)
    watched.discovery.set_fleet(FLEET)
    await eventually(lambda: watched.api.num_watches == 1)

    watched.api.end_watches(KubeError("reset"))
    await eventually(lambda: watched.api.num_lists == 2 and watched.api.num_watches == 1)
    assert watched.discovery.error is None
    watched.api.is_away = True
    watched.api.end_watches(KubeError("reset"))

    await eventually(lambda: watched.discovery.error is not None)


async def test_a_version_that_is_too_old_leads_to_a_new_list(watched: Watched) -> None:
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    del watched.api.pods["a"]  # nobody was told
    watched.api.put("b", ip="10.0.0.2")
    watched.api.end_watches(KubeError("too old resource version", 410))

    await settled(watched, "b")
    assert watched.api.num_lists == 2


async def test_a_watch_goes_on_from_the_last_bookmark_without_a_list(
    watched: Watched,
) -> None:
    watched.discovery.set_fleet(FLEET)
    await eventually(lambda: watched.api.num_watches == 1)

    watched.api.bookmark()
    watched.api.end_watches()
    await eventually(lambda: len(watched.api.watched_from) == 2)

    assert watched.api.watched_from[1] == str(watched.api.version)
    assert watched.api.num_lists == 1


async def test_a_watch_that_ends_at_once_is_not_tried_without_a_pause(
    watched: Watched,
) -> None:
    watched.discovery.set_fleet(FLEET)
    await eventually(lambda: watched.api.num_watches == 1)

    watched.api.end_watches()

    await eventually(lambda: watched.api.num_lists == 2)
    assert len(watched.api.watched_from) <= 2


async def test_a_pod_that_is_leaving_drains_until_its_engine_has_ended(watched: Watched) -> None:
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    watched.api.put("a", deletionTimestamp="2026-01-01T00:00:00Z")
    await eventually(lambda: watched.pods == {"a": True})
    watched.lost.add("10.0.0.1:8100")
    await eventually(lambda: watched.pods == {})
    watched.api.put("a", deletionTimestamp="2026-01-01T00:00:00Z", labels={"x": "y"})
    watched.api.put("b", ip="10.0.0.2")

    await settled(watched, "b")


async def test_a_lost_engine_that_is_not_leaving_stays(watched: Watched) -> None:
    watched.api.put("a")
    watched.lost.add("10.0.0.1:8100")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    watched.api.put("b", ip="10.0.0.2")

    await settled(watched, "a", "b")


async def test_an_address_goes_over_to_the_pod_that_has_it_now(watched: Watched) -> None:
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    watched.api.put("b")
    await settled(watched, "b")
    watched.api.delete("a")
    watched.api.put("c", ip="10.0.0.2")

    await settled(watched, "b", "c")


async def test_a_pod_that_a_workload_lets_go_gets_nothing_more(watched: Watched) -> None:
    watched.api.put("a")
    watched.api.put("b", ip="10.0.0.2")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a", "b")

    watched.api.put("a", owner=None)

    await settled(watched, "b")


async def test_only_the_services_pods_are_asked_for(watched: Watched) -> None:
    watched.discovery.set_fleet(FLEET)
    await eventually(lambda: watched.api.num_watches == 1)
    other = msgspec.structs.replace(SERVICE, name="b", uid="b-uid")

    watched.discovery.set_fleet(Fleet(services=(SERVICE, other)))
    await eventually(lambda: watched.api.num_lists == 2)
    watched.discovery.set_fleet(Fleet(services=()))
    await eventually(lambda: watched.api.num_lists == 3)

    engine = "kvoy.dev/component=engine"
    assert watched.api.selectors == [
        f"{engine},kvoy.dev/service in (svc)",
        f"{engine},kvoy.dev/service in (b,svc)",
        engine,
    ]


async def test_a_changed_secret_reaches_the_engines(watched: Watched) -> None:
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    changed = msgspec.structs.replace(SERVICE, secret="new")
    watched.discovery.set_fleet(Fleet(services=(changed,)))

    assert watched.published[-1][0].origin.secret == "new"


async def test_pods_of_a_service_that_left_the_fleet_are_out_at_once(watched: Watched) -> None:
    watched.api.put("a")
    watched.discovery.set_fleet(FLEET)
    await settled(watched, "a")

    watched.discovery.set_fleet(Fleet(services=()))

    assert watched.pods == {}
