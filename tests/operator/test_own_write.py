"""Which answers to own writes show what somebody else has done: those wake whoever has written."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_operator.kinds import (
    DEPLOYMENT,
    LLM_ROLE_SCALER,
    LLM_ROUTER,
    LLM_SERVICE,
    ROLE_BINDING,
    Kind,
)
from kvoy_operator.own_write import Write
from kvoy_operator.record import Key, record_of
from kvoy_operator.store import Store

_QWEN = Key("LLMService", "team", "qwen")
_REFERENCE = {"apiVersion": "kvoy.dev/v1alpha1", "kind": "LLMService", "name": "qwen", "uid": "u"}
_WORKLOAD_LABELS = {"kvoy.dev/component": "engine", "kvoy.dev/pool": "serving"}


def _object(kind: Kind, version: int, *, uid: str = "uid", **rest: Any) -> dict[str, Any]:
    metadata = {
        "name": "qwen",
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 1,
        "labels": _WORKLOAD_LABELS | {"kvoy.dev/revision": "abcde"},
        "ownerReferences": [{**_REFERENCE, "controller": True}],
        **rest.pop("metadata", {}),
    }
    spec = {"replicas": 1} | rest.pop("spec", {})
    return {"metadata": metadata, "spec": spec, **rest}


def _woken_by(kind: Kind, write: Write, **answer: Any) -> set[Key]:
    """Whom the answer to a write wakes, where an unchanged object was known before."""
    store = Store()
    store.put(record_of(kind, _object(kind, 1, status={"readyReplicas": 1})))
    answer = {"status": {"readyReplicas": 1}, **answer}
    return store.put_own(record_of(kind, _object(kind, 3, **answer)), write)


_EDITED: Any = {"metadata": {"generation": 2}, "spec": {"replicas": 2}}


@pytest.mark.parametrize(
    ("kind", "write", "answer"),
    [
        (DEPLOYMENT, Write.STATUS, {"status": {"readyReplicas": 2}}),
        (DEPLOYMENT, Write.REPLICAS, _EDITED),
        (DEPLOYMENT, Write.OWNERS, {"metadata": {"labels": _WORKLOAD_LABELS}}),
        (DEPLOYMENT, Write.CONTENT, {"metadata": {"generation": 2}, "spec": {"paused": True}}),
        (ROLE_BINDING, Write.CONTENT, {"subjects": [{"name": "qwen"}]}),
        (DEPLOYMENT, Write.DELETION, {"metadata": {"deletionTimestamp": "now", "generation": 2}}),
    ],
)
def test_the_answer_to_a_write_wakes_nobody_by_what_was_written(
    kind: Kind, write: Write, answer: dict[str, Any]
) -> None:
    assert _woken_by(kind, write, **answer) == set()


@pytest.mark.parametrize(
    ("write", "answer"),
    [
        (Write.STATUS, _EDITED),
        (Write.STATUS, {"metadata": {"deletionTimestamp": "now"}}),
        (Write.STATUS, {"metadata": {"annotations": {"by": "somebody"}}}),
        (Write.REPLICAS, {**_EDITED, "status": {"readyReplicas": 0}}),
        (Write.REPLICAS, {"metadata": {"generation": 3}, "spec": {"replicas": 2, "paused": True}}),
        (Write.OWNERS, _EDITED),
        (Write.CONTENT, {**_EDITED, "status": {"readyReplicas": 0}}),
        (Write.CONTENT, {"metadata": {"deletionTimestamp": "now"}}),
        (Write.DELETION, {**_EDITED, "status": {"readyReplicas": 0}}),
        (Write.NOTHING, _EDITED),
        (Write.STATUS, {"uid": "of another object of that name"}),
    ],
)
def test_the_answer_to_a_write_wakes_by_what_somebody_else_has_written(
    write: Write, answer: dict[str, Any]
) -> None:
    assert _woken_by(DEPLOYMENT, write, **answer) == {_QWEN}


@pytest.mark.parametrize("kind", [LLM_SERVICE, LLM_ROUTER, LLM_ROLE_SCALER])
def test_an_edit_that_the_answer_to_a_status_brings_is_not_lost_to_its_late_event(
    kind: Kind,
) -> None:
    store = Store()
    store.put(record_of(kind, _object(kind, 1)))
    edit, answer = (_object(kind, version, **_EDITED) for version in (2, 3))

    told = store.put_own(record_of(kind, answer), Write.STATUS)
    late = store.put(record_of(kind, edit))

    assert told != set()
    assert late == set()


def test_what_has_been_created_is_as_it_was_written() -> None:
    store = Store()

    assert store.put_own(record_of(DEPLOYMENT, _object(DEPLOYMENT, 3)), Write.CREATE) == set()


def test_an_own_write_still_wakes_others_whom_it_concerns() -> None:
    store = Store()
    store.put(record_of(LLM_ROUTER, _object(LLM_ROUTER, 1, uid="router")))
    behind: Any = {"spec": {"router": {"ref": "qwen"}}}
    store.put(record_of(LLM_SERVICE, _object(LLM_SERVICE, 2, **behind)))
    accepted: Any = {"status": {"conditions": [{"type": "Accepted", "status": "True"}]}}
    answer = record_of(LLM_SERVICE, _object(LLM_SERVICE, 3, **behind, **accepted))

    assert store.put_own(answer, Write.STATUS) == {Key("LLMRouter", "team", "qwen")}
