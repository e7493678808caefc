"""What an operator survives: its own end at any moment, another one beside it, missing kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoy_cluster import build
from kvoy_cluster.api_server import ApiServer
from kvoy_cluster.go_modules import LWS
from kvoy_operated import Site
from kvoy_operator.kinds import DEPLOYMENT, LEASE

pytestmark = pytest.mark.slow

_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def site(api_server: ApiServer, kvoy_crds: None, tmp_path: Path) -> Iterator[Site]:
    site = Site(api_server, tmp_path)
    yield site
    site.close()


def _engines(site: Site) -> list[dict[str, Any]]:
    return site.all("Deployment", "kvoy.dev/service=qwen,kvoy.dev/component=engine")


def _num_ready(site: Site) -> int:
    return sum((each.get("status") or {}).get("readyReplicas", 0) for each in _engines(site))


def _lease_holder(site: Site) -> str:
    """Empty: nobody."""
    lease = site.server.api.get(LEASE.path(site.home, "kvoy-operator"))
    return str(lease["spec"].get("holderIdentity", ""))


def test_a_terminated_leader_gives_its_lease_up_and_a_killed_one_is_followed_too(
    site: Site,
) -> None:
    first = site.start_operator()
    first.wait_until_leading()
    second = site.start_operator()
    second.wait_until_ready()
    assert second.metric("kvoy_operator_leader") == 0.0

    holder = _lease_holder(site)
    assert first.terminate() == 0
    # Released by the first one itself: nobody waits for the Lease's end.
    assert _lease_holder(site) != holder
    second.wait_until_leading()
    third = site.start_operator()
    third.wait_until_ready()
    second.kill()

    third.wait_until_leading()
    site.start_kubelet()
    site.apply("qwen")
    site.wait_for_condition("qwen", "Ready", "True")


def test_an_operator_killed_in_the_middle_of_a_creation_leaves_what_the_next_one_finishes(
    site: Site,
) -> None:
    first = site.start_operator()
    first.wait_until_leading()
    site.start_kubelet()

    site.apply("qwen", engine={"kind": "sim"}, prefill={"replicas": 1})
    site.wait_until(lambda: site.exists("Service", "qwen-engines"), "the first children")
    first.kill()
    site.start_operator()

    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    assert len(_engines(site)) == 2


def test_an_operator_killed_in_a_rollout_leaves_capacity_and_the_next_one_finishes(
    site: Site,
) -> None:
    first = site.start_operator()
    kubelet = site.start_kubelet()
    site.apply("qwen", replicas=3)
    site.wait_for_condition("qwen", "Ready", "True", "AllReady")
    (old,) = _engines(site)
    revision = old["metadata"]["labels"]["kvoy.dev/revision"]
    kubelet.is_good = lambda pod: (
        pod["metadata"]["labels"].get("kvoy.dev/revision") in (None, revision)
    )

    site.apply("qwen", replicas=3, engine={"args": ["--max-num-seqs=64"]})
    newer = f"kvoy.dev/revision,kvoy.dev/revision!={revision}"
    site.wait_until(lambda: site.all("Pod", newer), "a pod of the new revision")
    first.kill()
    ready_between = _num_ready(site)
    site.start_operator()
    kubelet.is_good = lambda pod: True

    least = [ready_between]

    def settled() -> bool:
        least.append(_num_ready(site))
        return (
            len(_engines(site)) == 1
            and site.condition("qwen", "Progressing")["reason"] == "Settled"
        )

    site.wait_until(settled, "rollout finished")
    assert min(least) >= 2
    assert _engines(site)[0]["metadata"]["name"] != old["metadata"]["name"]


def test_groups_wait_for_their_kind_alone_and_begin_when_it_is_installed(site: Site) -> None:
    operator = site.start_operator()
    site.start_kubelet()
    definitions = list(yaml.safe_load_all(build.build((LWS,)).program("crd.yaml").read_text()))

    site.apply("single")
    site.apply("grouped", engine={"kind": "sim"}, nodes=2)
    site.wait_for_condition("single", "Ready", "True")
    refused = site.wait_for_condition("grouped", "Accepted", "False", "LWSNotInstalled")
    assert "spec.nodes" in refused["message"]

    try:
        site.server.install_crds(definitions)
        site.wait_for_condition("grouped", "Accepted", "True")
        (group,) = site.all("LeaderWorkerSet")
        assert group["spec"]["replicas"] == 1
        assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
        assert operator.metric("kvoy_operator_api_errors_total", code="403") == 0
    finally:
        for definition in definitions:
            site.server.api.request("DELETE", f"{_CRDS}/{definition['metadata']['name']}")
    site.wait_for_condition("grouped", "Accepted", "False", "LWSNotInstalled")
    assert site.condition("single", "Ready")["status"] == "True"


def test_one_operator_serves_all_namespaces(
    api_server: ApiServer, kvoy_crds: None, tmp_path: Path
) -> None:
    site = Site(api_server, tmp_path, is_cluster_wide=True)
    elsewhere = Site(api_server, tmp_path)
    try:
        operator = site.start_operator()
        site.start_kubelet()

        site.apply("qwen")
        elsewhere.apply("qwen")

        site.wait_for_condition("qwen", "Ready", "True")
        elsewhere.wait_for_condition("qwen", "Accepted", "True")
        path = DEPLOYMENT.path(elsewhere.namespace, "qwen-router")
        site.wait_until(lambda: site.server.api.exists(path), "router in the other namespace")
        assert operator.metric("kvoy_operator_api_errors_total", code="403") == 0
        assert not operator.lines("watch refused")
    finally:
        site.close()
        elsewhere.close()
