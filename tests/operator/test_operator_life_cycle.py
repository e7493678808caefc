"""An operator with exactly its rights on a real API server: a service's life from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoy_cluster.api import MERGE_PATCH
from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.waiting import wait_for
from kvoy_operated import OperatorProcess, Site
from kvoy_operator.kinds import LLM_ROUTER, kind_of

pytestmark = pytest.mark.slow

_SURROUNDINGS = {
    "Deployment": ["qwen-router"],
    "NetworkPolicy": ["qwen-engines", "qwen-router"],
    "PodDisruptionBudget": ["qwen-router"],
    "RoleBinding": ["qwen-router-local"],
    "Secret": ["qwen-fleet", "qwen-internal"],
    "Service": ["qwen", "qwen-engines"],
    "ServiceAccount": ["qwen-router"],
}


@pytest.fixture
def site(api_server: ApiServer, kvoy_crds: None, tmp_path: Path) -> Iterator[Site]:
    site = Site(api_server, tmp_path)
    yield site
    site.close()


def _engines(site: Site, name: str = "qwen") -> list[dict[str, Any]]:
    return site.all("Deployment", f"kvoy.dev/service={name},kvoy.dev/component=engine")


def test_a_service_gets_its_children_becomes_ready_and_then_nothing_is_written(
    site: Site,
) -> None:
    operator = site.start_operator("--resync-s=10")
    site.start_kubelet()

    site.apply("qwen", replicas=2)

    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    site.wait_for_condition("qwen", "Progressing", "False", "Settled")
    for kind, names in _SURROUNDINGS.items():
        for name in names:
            assert site.exists(kind, name), f"{kind} {name}"
    (engine,) = _engines(site)
    assert engine["spec"]["replicas"] == 2
    status = site.get("LLMService", "qwen")["status"]
    assert status["url"] == f"http://qwen.{site.namespace}.svc/v1"
    # Controllers may have had something left to say of what has come.
    site.wait_until(lambda: not _writes_in_two_resyncs(site, operator), "nothing is written")
    metadata = site.get("LLMService", "qwen")["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata


def _writes_in_two_resyncs(site: Site, operator: OperatorProcess) -> float:
    writes = operator.writes()
    reconciles = operator.metric("kvoy_operator_reconcile_total")
    site.wait_until(
        lambda: operator.metric("kvoy_operator_reconcile_total") >= reconciles + 2, "two resyncs"
    )
    return operator.writes() - writes


def test_drift_is_repaired_and_what_others_add_stays(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()
    site.apply("qwen")
    site.wait_for_condition("qwen", "Ready", "True")
    service = kind_of("Service").path(site.namespace, "qwen")
    change = {
        "metadata": {"annotations": {"theirs": "1"}},
        "spec": {"selector": {"kvoy.dev/service": "other"}},
    }

    site.server.api.request("PATCH", service, change, MERGE_PATCH)
    site.delete("PodDisruptionBudget", "qwen-router")

    site.wait_until(
        lambda: site.get("Service", "qwen")["spec"]["selector"]["kvoy.dev/service"] == "qwen",
        "selector repaired",
    )
    site.wait_until(lambda: site.exists("PodDisruptionBudget", "qwen-router"), "budget is back")
    assert site.get("Service", "qwen")["metadata"]["annotations"]["theirs"] == "1"


def test_scaling_changes_the_count_and_no_pod_template(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()
    site.apply("qwen")
    site.wait_for_condition("qwen", "Ready", "True")
    (before,) = _engines(site)

    scale = {"spec": {"replicas": 3}}
    path = f"{kind_of('LLMService').path(site.namespace, 'qwen')}/scale"
    site.server.api.request("PATCH", path, scale, MERGE_PATCH)

    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    (after,) = _engines(site)
    assert after["spec"]["replicas"] == 3
    assert after["spec"]["template"] == before["spec"]["template"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_an_edited_service_rolls_to_a_new_revision_and_the_old_workload_goes(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()
    site.apply("qwen", replicas=2)
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    (old,) = _engines(site)

    site.apply("qwen", replicas=2, engine={"args": ["--max-num-seqs=64"]})

    site.wait_until(
        lambda: (
            old["metadata"]["name"] not in [each["metadata"]["name"] for each in _engines(site)]
        ),
        "old workload gone",
    )
    site.wait_for_condition("qwen", "Progressing", "False", "Settled")
    (new,) = _engines(site)
    assert new["spec"]["replicas"] == 2
    revision = site.get("LLMService", "qwen")["status"]["revision"]
    assert (
        revision["current"] == revision["update"] == new["metadata"]["labels"]["kvoy.dev/revision"]
    )


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_a_deleted_service_takes_everything_along(site: Site, policy: str) -> None:
    operator = site.start_operator()
    site.start_kubelet()
    site.apply("qwen")
    site.wait_for_condition("qwen", "Ready", "True")

    site.delete("LLMService", "qwen", policy)

    site.wait_until_gone("LLMService", "qwen")
    for kind, names in _SURROUNDINGS.items():
        for name in names:
            site.wait_until_gone(kind, name)
    site.wait_until(lambda: not _engines(site) and not site.all("Pod"), "engines gone")
    # What goes is not made again by an operator that hears of the children first.
    site.wait_until(
        lambda: operator.metric("kvoy_operator_pool_replicas_desired") == 0.0,
        "the operator has heard of the end",
    )
    assert not operator.lines("reconcile fails")


def test_orphans_of_a_deleted_service_are_taken_over_and_go_with_the_next_one(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()
    site.apply("qwen")
    site.wait_for_condition("qwen", "Ready", "True")
    (engine,) = _engines(site)

    site.delete("LLMService", "qwen", "Orphan")
    site.wait_until_gone("LLMService", "qwen")
    again = site.apply("qwen")
    site.wait_for_condition("qwen", "Ready", "True")

    (adopted,) = _engines(site)
    assert adopted["metadata"]["uid"] == engine["metadata"]["uid"]
    children = [adopted, *(site.get(k, n) for k, names in _SURROUNDINGS.items() for n in names)]
    for child in children:
        owners = [owner["uid"] for owner in child["metadata"]["ownerReferences"]]
        assert owners == [again["metadata"]["uid"]], child["kind"]
    site.delete("LLMService", "qwen")
    site.wait_until(lambda: not _engines(site), "engines gone")


def test_a_strangers_object_of_a_wanted_name_is_left_alone_and_named(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()
    spec = {"ports": [{"port": 1}], "selector": {"app": "theirs"}}
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "qwen"}, "spec": spec}
    site.server.api.request("POST", kind_of("Service").path(site.namespace), theirs)

    site.apply("qwen")

    refused = site.wait_for_condition("qwen", "Accepted", "False", "NameClash")
    assert "Service qwen" in refused["message"]
    assert site.get("Service", "qwen")["spec"]["selector"] == {"app": "theirs"}
    site.delete("Service", "qwen")
    site.server.api.request(
        "PATCH",
        kind_of("LLMService").path(site.namespace, "qwen"),
        {"metadata": {"labels": {"touched": "1"}}},
        MERGE_PATCH,
    )
    site.wait_for_condition("qwen", "Ready", "True")


def test_an_impossible_pod_template_is_refused_in_the_servers_own_words(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()

    site.apply("qwen", podTemplate={"spec": {"tolerations": [{"operator": "Sometimes"}]}})

    refused = site.wait_for_condition("qwen", "Accepted", "False", "InvalidSpec")
    assert "tolerations" in refused["message"]
    assert "Sometimes" in refused["message"]
    assert not _engines(site)
    site.apply("qwen", podTemplate={"spec": {"tolerations": [{"operator": "Exists"}]}})
    site.wait_for_condition("qwen", "Ready", "True")


def test_a_shared_router_serves_the_services_that_refer_to_it(site: Site) -> None:
    site.start_operator()
    site.start_kubelet()

    site.apply("qwen", router={"ref": "all"})
    site.wait_for_condition("qwen", "Accepted", "False", "RouterNotFound")
    site.apply("all", LLM_ROUTER, selector={"matchLabels": {"none": "such"}})

    site.wait_for_condition("all", "Ready", "True", kind="LLMRouter")
    site.wait_for_condition("qwen", "Ready", "True")
    status = site.get("LLMRouter", "all")["status"]
    assert [service["name"] for service in status["services"]] == ["qwen"]
    assert not site.exists("Deployment", "qwen-router")


@pytest.mark.parametrize("is_down", [False, True], ids=["watched", "operator down"])
def test_a_deleted_namespace_ends_without_lines_and_without_the_operators_help(
    site: Site, is_down: bool
) -> None:
    operator = site.start_operator()
    site.start_kubelet()
    for name in ("qwen", "llama"):
        site.apply(name)
        site.wait_for_condition(name, "Ready", "True")

    if is_down:
        operator.terminate()

    path = f"/api/v1/namespaces/{site.namespace}"
    site.server.api.request("DELETE", path)

    wait_for(lambda: not site.server.api.exists(path), "namespace gone", 240.0)
    assert not operator.lines("reconcile fails")
    assert not operator.lines("work failed")


def test_a_whole_life_needs_no_right_that_the_operator_lacks(site: Site) -> None:
    operator = site.start_operator()
    site.start_kubelet()
    site.apply("qwen", engine={"kind": "sim"}, prefill={"replicas": 2})
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    site.apply("qwen", engine={"kind": "sim"})
    site.wait_until_gone("LLMRoleScaler", "qwen-prefill")
    site.apply("qwen", engine={"kind": "sim"}, router={"ref": "all"})
    site.apply("all", LLM_ROUTER)
    site.wait_until_gone("Deployment", "qwen-router")
    site.wait_for_condition("qwen", "Ready", "True")
    site.delete("LLMService", "qwen")
    site.wait_until_gone("Deployment", "qwen-router")

    assert operator.metric("kvoy_operator_api_errors_total", code="403") == 0
    assert not operator.lines("watch refused")
    assert not operator.lines("reconcile fails")
