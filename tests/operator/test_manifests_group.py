"""Groups of pods: what is rendered, and what the real LeaderWorkerSet controller makes of it."""

from __future__ import annotations

import pytest

from kvoy_cluster.api import APPLY_PATCH
from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.fixtures import apply_kvoy_crds
from kvoy_cluster.waiting import wait_for
from kvoy_contract.names import GROUP_PORT, PREFILL_POOL, SERVING_POOL
from kvoy_operator.identity import Manifest
from kvoy_operator.kinds import LEADER_WORKER_SET, LLM_SERVICE, POD
from kvoy_operator.manifests import render_workload
from kvoy_operator.manifests.workload import EXCLUSIVE_TOPOLOGY_ANNOTATION
from kvoy_operator.render_testing import (
    LONGEST_NAME,
    make_options,
    make_service,
    service_body,
)
from kvoy_operator.resources import parse_service

_SIM = {"engine": {"kind": "sim"}}
_GROUP_LABELS = "leaderworkerset.sigs.k8s.io"


def _render(spec: Manifest, pool: str = SERVING_POOL) -> Manifest:
    return render_workload(make_service(spec), pool, "bcdfg", make_options())


def _container(template: Manifest) -> Manifest:
    container: Manifest = template["spec"]["containers"][0]
    return container


def test_one_node_is_a_deployment_and_more_are_a_group_of_that_size() -> None:
    single = _render({**_SIM, "nodes": 1})
    group = _render({**_SIM, "nodes": 4})

    assert single["kind"] == "Deployment"
    assert group["kind"] == "LeaderWorkerSet"
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 4


def test_each_pool_is_a_group_only_if_it_spans_nodes_itself() -> None:
    spec = {**_SIM, "nodes": 2, "prefill": {}}

    assert _render(spec, SERVING_POOL)["kind"] == "LeaderWorkerSet"
    assert _render(spec, PREFILL_POOL)["kind"] == "Deployment"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_workload_is_rendered_without_its_number_of_replicas(nodes: int) -> None:
    assert "replicas" not in _render({**_SIM, "nodes": nodes, "replicas": 3})["spec"]


def test_leader_and_workers_differ_in_readiness_alone() -> None:
    parts = _render({**_SIM, "nodes": 2})["spec"]["leaderWorkerTemplate"]
    leader, worker = _container(parts["leaderTemplate"]), _container(parts["workerTemplate"])

    assert leader.pop("readinessProbe")["httpGet"]["path"] == "/ready"
    assert "readinessProbe" not in worker
    assert parts["leaderTemplate"] == parts["workerTemplate"]
    assert worker["startupProbe"]["httpGet"]["path"] == "/started"


def test_a_group_restarts_as_a_whole_and_its_leader_listens_for_the_others() -> None:
    parts = _render({**_SIM, "nodes": 2})["spec"]["leaderWorkerTemplate"]
    ports = {port["containerPort"] for port in _container(parts["leaderTemplate"])["ports"]}

    assert parts["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert GROUP_PORT in ports


def test_the_pods_of_a_group_are_not_spread() -> None:
    parts = _render({**_SIM, "nodes": 2})["spec"]["leaderWorkerTemplate"]

    assert "topologySpreadConstraints" not in parts["leaderTemplate"]["spec"]


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    apply_kvoy_crds(control_plane)
    return control_plane


@pytest.mark.slow
def test_all_that_the_controller_makes_of_the_longest_name_is_created(
    plane: ControlPlane,
) -> None:
    namespace = plane.create_namespace()
    num_groups = 11  # so that numbers have more than one digit

    lws = _create_group(plane, namespace, LONGEST_NAME, num_groups)

    pods = wait_for(
        lambda: _pods(plane, namespace, at_least=2 * num_groups), "pods of all groups", 120
    )
    names = {pod["metadata"]["name"] for pod in pods}
    assert {f"{lws}-10", f"{lws}-10-1"} <= names
    assert max(map(len, names)) <= 63
    for pod in pods:
        labels = pod["metadata"]["labels"]
        assert max(map(len, labels.values())) <= 63
        assert labels["kvoy.dev/service"] == LONGEST_NAME
        assert labels["kvoy.dev/pool"] == SERVING_POOL
        assert labels["kvoy.dev/component"] == "engine"
        assert labels["kvoy.dev/revision"] == "bcdfg"


@pytest.mark.slow
def test_every_pod_of_a_group_learns_its_leader_and_its_place(plane: ControlPlane) -> None:
    namespace = plane.create_namespace()

    lws = _create_group(plane, namespace, "qwen", 1)

    pods = wait_for(lambda: _pods(plane, namespace, at_least=2), "pods of the group", 60)
    places = set()
    for pod in pods:
        given = {v["name"]: v.get("value", "") for v in _container(pod)["env"]}
        assert given["LWS_LEADER_ADDRESS"] == f"{lws}-0.{lws}.{namespace}"
        assert given["LWS_GROUP_SIZE"] == "2"
        places.add(pod["metadata"]["labels"][f"{_GROUP_LABELS}/worker-index"])
    assert places == {"0", "1"}


@pytest.mark.slow
def test_a_topology_key_keeps_a_group_together_and_alone(plane: ControlPlane) -> None:
    namespace = plane.create_namespace()

    _create_group(plane, namespace, "qwen", 1, topologyKey="example.com/rack")

    (leader,) = wait_for(lambda: _pods(plane, namespace, at_least=1), "the leader", 60)
    affinity = leader["spec"]["affinity"]
    for kind in ("podAffinity", "podAntiAffinity"):
        (term,) = affinity[kind]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "example.com/rack"
    assert leader["metadata"]["annotations"][EXCLUSIVE_TOPOLOGY_ANNOTATION] == "example.com/rack"


def _create_group(
    plane: ControlPlane, namespace: str, name: str, replicas: int, **pool: object
) -> str:
    """Name of the LeaderWorkerSet; a service owns it, as the garbage collector demands."""
    body = service_body({**_SIM, "nodes": 2, **pool}, name=name)
    body["metadata"] = {"name": name, "namespace": namespace}
    stored = plane.api.request("POST", LLM_SERVICE.path(namespace), body)
    service = parse_service(stored)
    workload = render_workload(service, SERVING_POOL, "bcdfg", make_options())
    workload["spec"]["replicas"] = replicas
    lws: str = workload["metadata"]["name"]
    query = "fieldManager=kvoy-operator&force=true&fieldValidation=Strict"
    path = f"{LEADER_WORKER_SET.path(namespace, lws)}?{query}"
    plane.api.request("PATCH", path, workload, APPLY_PATCH)
    return lws


def _pods(plane: ControlPlane, namespace: str, at_least: int) -> list[Manifest]:
    """Empty while there are fewer."""
    pods: list[Manifest] = plane.api.get(POD.path(namespace))["items"]
    return pods if len(pods) >= at_least else []
