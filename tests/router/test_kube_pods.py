"""From pods to engines, and whose they are, without any API."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvoy_contract.fleet import Fleet, FleetService
from kvoy_contract.names import POOL_LABEL, REVISION_LABEL
from kvoy_router.config import EngineAddress
from kvoy_router.endpoint import Origin
from kvoy_router.found import FoundEngine
from kvoy_router.kube_objects import OwnerReference, Pod
from kvoy_router.kube_owners import may_lead_to_service
from kvoy_router.kube_pods import (
    WORKER_INDEX_LABEL,
    PodTable,
    address_of,
    found_engine,
    is_candidate,
)
from kvoy_router.kube_trust import FIRST_PAUSE_S, LONGEST_PAUSE_S, Trust

SERVICE = FleetService(name="svc", uid="svc-uid", model="m", secret="s")
SET = OwnerReference("apps/v1", "ReplicaSet", "rs", "rs-uid", True)


def pod(
    name: str = "p",
    *,
    ip: str | None = "10.0.0.1",
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    containers: list[dict[str, Any]] | None = None,
    **metadata: Any,
) -> Pod:
    fields = {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels} | metadata,
        "spec": {"containers": containers or [{"name": "engine"}], "nodeName": "n1"},
        "status": {"phase": phase, "podIP": ip, "conditions": [{"type": "Ready"}]},
    }
    return msgspec.json.decode(msgspec.json.encode(fields), type=Pod)


def ports(**named: int) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": number} for name, number in named.items()]


@pytest.mark.parametrize(
    ("containers", "http", "telemetry"),
    [
        ([{"name": "engine"}], 8100, 9100),
        ([{"name": "engine", "ports": ports(http=1, telemetry=2)}], 1, 2),
        ([{"name": "engine", "ports": ports(http=1)}], 1, 9100),
        (
            [{"name": "x", "ports": ports(http=7)}, {"name": "engine", "ports": ports(http=1)}],
            1,
            9100,
        ),
        ([{"name": "engine"}, {"name": "x", "ports": ports(telemetry=7)}], 8100, 7),
    ],
)
def test_named_ports_win_over_the_usual_numbers(
    containers: list[dict[str, Any]], http: int, telemetry: int
) -> None:
    found = address_of(pod(containers=containers))

    assert found == EngineAddress(f"10.0.0.1:{http}", f"10.0.0.1:{telemetry}")


def test_an_address_of_ip_version_6_stands_in_brackets() -> None:
    assert address_of(pod(ip="fd00::7")).http == "[fd00::7]:8100"


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (pod(), True),
        (pod(phase="Pending"), True),
        (pod(deletionTimestamp="2026-01-01T00:00:00Z"), True),
        (pod(labels={WORKER_INDEX_LABEL: "0"}), True),
        (pod(labels={WORKER_INDEX_LABEL: "1"}), False),
        (pod(ip=None), False),
        (pod(ip=""), False),
        (pod(phase="Failed"), False),
        (pod(phase="Succeeded"), False),
    ],
)
def test_only_a_pod_at_which_an_engine_may_listen_is_a_candidate(
    candidate: Pod, expected: bool
) -> None:
    assert is_candidate(candidate) is expected


def test_a_pod_tells_its_pool_and_revision_and_whether_it_is_leaving() -> None:
    labels = {POOL_LABEL: "prefill", REVISION_LABEL: "abc123"}
    leaving = pod(labels=labels, deletionTimestamp="2026-01-01T00:00:00Z")

    assert found_engine(leaving, SERVICE) == FoundEngine(
        EngineAddress("10.0.0.1:8100", "10.0.0.1:9100"),
        Origin("svc", "p", "uid-p", "prefill", "abc123", "s"),
        is_draining=True,
    )
    assert "secret" not in repr(found_engine(leaving, SERVICE))


def holders(table: PodTable) -> set[str]:
    return {holder.metadata.name for holder in table.holders(table.by_uid.values())}


def test_an_address_belongs_to_who_claimed_it_last() -> None:
    table = PodTable()
    table.put(pod("late", ip=None))
    table.put(pod("first"))
    table.put(pod("elsewhere", ip="10.0.0.2"))
    assert holders(table) == {"first", "elsewhere"}

    table.put(pod("late"))
    table.put(pod("first", labels={"changed": "yes"}))
    assert holders(table) == {"late", "elsewhere"}
    table.put(pod("late", phase="Failed"))

    assert holders(table) == {"first", "elsewhere"}


def test_a_pod_that_is_leaving_has_lost_its_address_to_one_that_is_not() -> None:
    table = PodTable()
    table.put(pod("staying"))
    table.put(pod("leaving", deletionTimestamp="2026-01-01T00:00:00Z"))

    assert holders(table) == {"staying"}


def test_a_change_that_nobody_looks_at_is_no_news() -> None:
    table = PodTable()

    assert table.put(pod("a", resourceVersion="1"))
    assert not table.put(pod("a", resourceVersion="2", annotations={"a": "b"}))
    assert table.put(pod("a", resourceVersion="3", labels={"a": "b"}))
    assert table.put(pod("a", resourceVersion="4", phase="Failed"))
    assert not table.put(pod("a", resourceVersion="5", phase="Failed"))
    assert not table.remove(pod("a"))


def test_of_a_list_the_pod_that_started_last_has_the_address() -> None:
    def started(name: str, time: str) -> Pod:
        made = pod(name)
        status = msgspec.structs.replace(made.status, start_time=time)
        return msgspec.structs.replace(made, status=status)

    earlier = started("earlier", "2026-01-01T00:00:00Z")
    later = started("later", "2026-01-01T00:00:05Z")
    table = PodTable()

    table.replace([later, earlier])
    assert holders(table) == {"later"}
    table.replace([earlier])

    assert holders(table) == {"earlier"}


@pytest.mark.parametrize(
    ("group", "kind", "expected"),
    [
        ("apps/v1", "ReplicaSet", True),
        ("apps/v1", "StatefulSet", True),
        ("apps/v1", "DaemonSet", False),
        ("batch/v1", "Job", False),
        ("v1", "ReplicaSet", False),
        ("evil.dev/v1", "ReplicaSet", False),
    ],
)
def test_only_some_controllers_can_lead_to_a_service(group: str, kind: str, expected: bool) -> None:
    assert may_lead_to_service(OwnerReference(group, kind, "n", "u", True)) is expected
    assert not may_lead_to_service(None)


def test_an_owner_that_is_no_controller_counts_for_nothing() -> None:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-uid"}

    assert pod(ownerReferences=[owner]).metadata.controller is None
    assert pod(ownerReferences=[owner | {"controller": True}]).metadata.controller == SET


def trusted() -> Trust:
    trust = Trust()
    trust.set_fleet(Fleet(services=(SERVICE,)))
    trust.keep_only([SET])
    return trust


def test_a_controller_is_trusted_only_after_it_was_looked_up() -> None:
    trust = trusted()
    assert trust.service_of(SET) is None
    assert trust.due(0.0) == [SET]

    trust.on_found(SET, "svc-uid", 0.0)

    assert trust.service_of(SET) == SERVICE
    assert trust.due(1e9) == []
    assert trust.next_due_s() is None


def test_a_namesake_with_the_same_uid_is_looked_up_for_itself() -> None:
    trust = trusted()
    trust.on_found(SET, "svc-uid", 0.0)
    other = msgspec.structs.replace(SET, name="other")

    trust.keep_only([SET, other])

    assert trust.service_of(other) is None
    assert trust.due(0.0) == [other]


def test_an_answer_is_looked_up_again_after_pauses_that_grow() -> None:
    trust = trusted()
    now_s, pauses = 0.0, []
    for _ in range(9):
        trust.on_found(SET, None, now_s)
        due_s = trust.next_due_s()
        assert due_s is not None
        assert trust.due(due_s - 0.01) == []
        pauses.append(due_s - now_s)
        now_s = due_s

    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert trust.is_refused(SET)


def test_a_failed_look_refuses_nobody_and_is_told_once() -> None:
    trust = trusted()

    assert trust.on_failed(SET, 0.0)
    assert not trust.on_failed(SET, 1.0)
    assert not trust.is_refused(SET)
    trust.on_found(SET, "svc-uid", 2.0)

    assert trust.service_of(SET) == SERVICE


def test_who_was_adopted_by_a_new_service_is_looked_up_when_the_fleet_changes() -> None:
    trust = trusted()
    trust.on_found(SET, "svc-uid", 0.0)
    again = msgspec.structs.replace(SERVICE, uid="new-uid")

    trust.set_fleet(Fleet(services=(again,)))

    assert trust.service_of(SET) is None
    assert trust.due(0.0) == [SET]
    trust.on_found(SET, "new-uid", 0.0)
    assert trust.service_of(SET) == again


def test_a_look_counts_as_taken_however_it_ended() -> None:
    found, failed = trusted(), trusted()
    before = found.has_unseen, failed.has_unseen

    found.on_found(SET, None, 0.0)
    failed.on_failed(SET, 0.0)

    assert before == (True, True)
    assert (found.has_unseen, failed.has_unseen) == (False, False)


def test_controllers_without_pods_are_forgotten() -> None:
    trust = trusted()
    trust.on_found(SET, "svc-uid", 0.0)

    trust.keep_only([])
    trust.keep_only([SET])

    assert trust.service_of(SET) is None
