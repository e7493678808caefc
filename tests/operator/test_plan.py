from __future__ import annotations

import copy
from typing import Any

import pytest

from kvoy_operator.compare import digest_of, stamped
from kvoy_operator.identity import Manifest
from kvoy_operator.manifests import render_support, render_workload
from kvoy_operator.observed import ChildKey, Observed
from kvoy_operator.plan import Plan, key_of, make_plan
from kvoy_operator.render_testing import make_options, make_service
from kvoy_operator.resources import LLMService

CACHED = {"model": {"uri": "hf://a/b", "cache": {"pvc": {"size": "1Gi"}}}}


def _support(service: LLMService) -> list[Manifest]:
    return render_support(service, make_options())


def _live(manifests: list[Manifest]) -> dict[ChildKey, Manifest]:
    """As a cluster has them, without Secrets, which the operator cannot see."""
    stored = (copy.deepcopy(stamped(manifest)) for manifest in manifests)
    return {key_of(each): each for each in stored if each["kind"] != "Secret"}


def _written(manifests: list[Manifest]) -> dict[ChildKey, str]:
    return {
        key_of(each): digest_of(stamped(each)) for each in manifests if each["kind"] == "Secret"
    }


def _plan(
    service: LLMService, children: dict[ChildKey, Manifest], *, is_settled: bool = True
) -> Plan:
    desired = _support(service)
    return make_plan(service, desired, Observed(children), _written(desired), is_settled=is_settled)


def test_an_empty_cluster_gets_everything() -> None:
    service = make_service()
    desired = _support(service)

    plan = make_plan(service, desired, Observed(), {}, is_settled=True)

    made = [key_of(each) for each in (*plan.apply, *plan.create)]
    assert sorted(made) == sorted(map(key_of, desired))
    assert not plan.delete


def test_nothing_is_written_when_everything_is_there() -> None:
    service = make_service(CACHED)

    assert _plan(service, _live(_support(service))).is_empty


def test_what_somebody_changed_is_applied_again() -> None:
    service = make_service()
    children = _live(_support(service))
    key = ChildKey("Deployment", "qwen-router")
    children[key]["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"

    plan = _plan(service, children)

    assert [key_of(each) for each in plan.apply] == [key]


def test_a_field_that_the_manifest_lost_is_applied_away() -> None:
    service = make_service()
    more = _support(service)
    key = ChildKey("Service", "qwen-engines")
    next(each for each in more if key_of(each) == key)["metadata"]["labels"]["old"] = "label"

    plan = _plan(service, _live(more))

    assert [key_of(each) for each in plan.apply] == [key]


def test_a_secret_is_written_once_and_again_when_it_changes() -> None:
    service = make_service()
    desired = _support(service)
    children = _live(desired)

    first = make_plan(service, desired, Observed(children), {}, is_settled=True)
    second = make_plan(service, desired, Observed(children), _written(desired), is_settled=True)

    assert {each["kind"] for each in first.apply} == {"Secret"}
    assert second.is_empty


def test_a_strangers_object_is_a_conflict_and_left_alone() -> None:
    service = make_service()
    children = _live(_support(service))
    key = ChildKey("Service", "qwen")
    children[key] = {"kind": "Service", "metadata": {"name": "qwen"}, "spec": {"ports": []}}

    plan = _plan(service, children)

    assert plan.conflicts == (key,)
    assert plan.is_empty


def test_another_controllers_object_is_a_conflict_even_with_our_labels() -> None:
    service = make_service()
    children = _live(_support(service))
    key = ChildKey("Service", "qwen")
    owner = {"apiVersion": "v1", "kind": "Other", "name": "qwen", "uid": "x", "controller": True}
    children[key]["metadata"]["ownerReferences"] = [owner]

    assert _plan(service, children).conflicts == (key,)


@pytest.mark.parametrize("owners", ["none", "a deleted namesake"])
def test_orphans_are_adopted(owners: str) -> None:
    before = make_service(CACHED, uid="old")
    service = make_service(CACHED, uid="new")
    workload = render_workload(before, "serving", "bcdfgh", make_options())
    children = _live([*_support(before), workload])
    for child in children.values():
        if owners == "none":
            del child["metadata"]["ownerReferences"]

    plan = _plan(service, children)

    assert not plan.conflicts
    assert not plan.delete
    reowned = {key.kind for key, _ in plan.reown}
    assert reowned == {"Deployment", "Job"}
    assert all(reference["uid"] == "new" for _, reference in plan.reown)
    applied = {key_of(each) for each in plan.apply}
    assert applied | {key for key, _ in plan.reown} == set(children)


def test_surplus_goes_but_what_old_pods_mount_stays_until_they_have_gone() -> None:
    service = make_service()
    children = _live([*_support(make_service(CACHED)), *_support(make_service())])
    shared = make_service({"router": {"ref": "shared"}})

    meanwhile = _plan(service, children, is_settled=False)
    afterwards = _plan(service, children)
    without_router = _plan(shared, children)

    assert not meanwhile.delete
    assert {key.kind for key in afterwards.delete} == {"PersistentVolumeClaim", "Job"}
    assert ChildKey("Deployment", "qwen-router") in without_router.delete
    assert ChildKey("Service", "qwen") in without_router.delete


def test_engines_are_neither_applied_again_nor_deleted() -> None:
    service = make_service()
    workload: dict[str, Any] = render_workload(service, "serving", "bcdfgh", make_options())
    changed = copy.deepcopy(workload)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "engine:of-an-older-operator"

    plan = _plan(service, _live([*_support(service), changed]))

    assert plan.is_empty
