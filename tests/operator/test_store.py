"""What the store keeps of watched objects, and whom it tells."""

from __future__ import annotations

from typing import Any

from kvoy_operator.kinds import (
    DEPLOYMENT,
    LLM_ROUTER,
    LLM_SERVICE,
    NETWORK_POLICY,
    POD,
    SERVICE,
    Kind,
)
from kvoy_operator.observed import ChildKey
from kvoy_operator.record import Key, Ref, record_of
from kvoy_operator.store import Store

_QWEN = Key("LLMService", "team", "qwen")


def _object(kind: Kind, name: str, *, version: int = 1, uid: str = "", **rest: Any) -> Any:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        **rest.pop("metadata", {}),
    }
    return {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata, **rest}


def _put(store: Store, kind: Kind, name: str, **rest: Any) -> set[Key]:
    return store.put(record_of(kind, _object(kind, name, **rest)))


def _owned_by(kind: str, name: str) -> dict[str, Any]:
    owner = {"apiVersion": "kvoy.dev/v1alpha1", "kind": kind, "name": name, "uid": "u"}
    return {"ownerReferences": [{**owner, "controller": True}]}


def test_an_object_concerns_its_controller_else_whom_its_labels_name() -> None:
    store = Store()

    owned = _put(store, SERVICE, "a", metadata=_owned_by("LLMService", "qwen"))
    labelled = _put(store, POD, "b", metadata={"labels": {"kvoy.dev/service": "qwen"}})
    of_router = _put(store, POD, "c", metadata={"labels": {"kvoy.dev/router": "all"}})
    nobodys = _put(store, POD, "d")

    assert owned == labelled == {_QWEN}
    assert of_router == {Key("LLMRouter", "team", "all")}
    assert nobodys == set()


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    _put(store, LLM_SERVICE, "qwen", version=10, spec={"replicas": 2})

    told = _put(store, LLM_SERVICE, "qwen", version=9, spec={"replicas": 1})

    assert told == set()
    body = store.custom(_QWEN)
    assert body is not None
    assert body["spec"] == {"replicas": 2}


def test_the_echo_of_an_own_write_tells_nobody() -> None:
    store = Store()
    _put(store, LLM_SERVICE, "qwen", version=10)

    assert _put(store, LLM_SERVICE, "qwen", version=10) == set()


def test_an_object_that_is_gone_does_not_come_back_by_a_late_event() -> None:
    store = Store()
    _put(store, LLM_SERVICE, "qwen", version=10)

    told = store.remove(Ref(*_QWEN), "uid-of-qwen")
    late = _put(store, LLM_SERVICE, "qwen", version=11)

    assert told == {_QWEN}
    assert late == set()
    assert store.custom(_QWEN) is None
    assert store.all_keys() == []


def test_the_end_of_an_object_is_not_the_end_of_its_namesake() -> None:
    store = Store()
    _put(store, LLM_SERVICE, "qwen", version=10, uid="first")
    _put(store, LLM_SERVICE, "qwen", version=20, uid="second")

    assert store.remove(Ref(*_QWEN), "first") == set()
    assert store.custom(_QWEN) is not None
    assert _put(store, LLM_SERVICE, "qwen", version=21, uid="first") == set()


def test_an_object_that_changes_hands_concerns_both() -> None:
    store = Store()
    _put(store, POD, "p", metadata={"labels": {"kvoy.dev/service": "qwen"}})

    told = _put(store, POD, "p", version=2, metadata={"labels": {"kvoy.dev/service": "llama"}})

    assert told == {_QWEN, Key("LLMService", "team", "llama")}
    assert not store.observed(_QWEN).pods


def test_a_shared_router_hears_of_services_that_change_and_not_of_their_replicas() -> None:
    store = Store()
    _put(store, LLM_ROUTER, "all")
    router = Key("LLMRouter", "team", "all")

    created = _put(store, LLM_SERVICE, "qwen", version=2, metadata={"generation": 1})
    status = _put(
        store,
        LLM_SERVICE,
        "qwen",
        version=3,
        metadata={"generation": 1},
        status={"replicas": 1},
    )
    edited = _put(store, LLM_SERVICE, "qwen", version=4, metadata={"generation": 2})
    deleted = store.remove(Ref(*_QWEN), "uid-of-qwen")

    assert created == edited == deleted == {_QWEN, router}
    assert status == {_QWEN}


def test_services_hear_of_the_router_that_they_refer_to() -> None:
    store = Store()
    _put(store, LLM_SERVICE, "qwen", spec={"router": {"ref": "all"}})
    _put(store, LLM_SERVICE, "llama", spec={})

    told = _put(store, LLM_ROUTER, "all")

    assert told == {Key("LLMRouter", "team", "all"), _QWEN}


def test_what_nobody_reads_is_not_kept() -> None:
    store = Store()
    labels = {"kvoy.dev/service": "qwen", "kvoy.dev/component": "engine"}
    noise = {
        "labels": labels,
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": "{}",
            "mine": "1",
        },
    }
    spec = {"replicas": 3, "template": {"spec": {"containers": []}}}

    _put(store, DEPLOYMENT, "qwen-s-abcdef", metadata=noise, spec=spec)
    _put(store, NETWORK_POLICY, "p", metadata={"labels": labels}, status={"x": 1})

    observed = store.observed(_QWEN)
    deployment = observed.children[ChildKey("Deployment", "qwen-s-abcdef")]
    assert deployment["spec"] == {"replicas": 3}
    assert deployment["metadata"]["annotations"] == {"mine": "1"}
    assert "managedFields" not in deployment["metadata"]
    assert "status" not in observed.children[ChildKey("NetworkPolicy", "p")]
    assert [workload.replicas for workload in observed.workloads] == [3]


def test_of_managed_fields_only_the_owners_of_replicas_are_kept() -> None:
    replicas: Any = {"f:spec": {"f:replicas": {}, "f:gpus": {}}}
    managed = [
        {"manager": "hpa", "operation": "Update", "subresource": "scale", "fieldsV1": replicas},
        {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:spec": {"f:gpus": {}}}},
    ]
    store = Store()

    _put(store, LLM_SERVICE, "qwen", metadata={"managedFields": managed})

    body = store.custom(_QWEN)
    assert body is not None
    assert [entry["manager"] for entry in body["metadata"]["managedFields"]] == ["hpa"]


def test_a_pod_is_kept_as_what_is_asked_of_it() -> None:
    store = Store()
    status = {
        "phase": "Running",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": "1970-01-01T00:01:40Z",
            },
            {"type": "Ready", "status": "False"},
        ],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": False,
                "started": False,
                "restartCount": 4,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 1, "message": "ModelLoadFailed: no\n"}},
            }
        ],
    }
    labels = {
        "kvoy.dev/service": "qwen",
        "kvoy.dev/pool": "prefill",
        "kvoy.dev/component": "engine",
        "kvoy.dev/revision": "abcdef",
        "leaderworkerset.sigs.k8s.io/group-index": "2",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }

    _put(store, POD, "p", metadata={"labels": labels}, spec={"nodeName": "n1"}, status=status)

    (pod,) = store.observed(_QWEN).pods
    assert (pod.pool, pod.revision, pod.node, pod.phase) == ("prefill", "abcdef", "n1", "Running")
    assert (pod.group_index, pod.worker_index) == (2, 0)
    assert pod.scheduled_s == 100.0
    assert not pod.is_ready
    (container,) = pod.containers
    assert container.waiting_reason == "CrashLoopBackOff"
    assert container.exit_message == "ModelLoadFailed: no"
    assert not container.is_started
    assert container.restart_count == 4


def test_a_kind_that_the_cluster_forgets_is_forgotten() -> None:
    store = Store()
    _put(store, SERVICE, "a", metadata=_owned_by("LLMService", "qwen"))

    told = store.forget_kind("Service")

    assert told == {_QWEN}
    assert not store.observed(_QWEN).children
