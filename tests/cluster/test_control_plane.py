"""The second layer of the test cluster: scheduling onto nodes without kubelets, and groups."""

from __future__ import annotations

from typing import Any

import pytest

from kvoy_cluster.api import ApiError
from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.waiting import wait_for

pytestmark = pytest.mark.slow


def pod(name: str, gpus: int) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)}
    container = {"name": "main", "image": "localhost/none:1", "resources": {"limits": limits}}
    return {"metadata": {"name": name}, "spec": {"containers": [container]}}


def test_pods_are_scheduled_where_their_gpus_are(control_plane: ControlPlane) -> None:
    namespace = control_plane.create_namespace()
    path = f"/api/v1/namespaces/{namespace}/pods"
    api = control_plane.api
    control_plane.add_fake_node("plain", {"cpu": "8", "memory": "32Gi"})
    control_plane.add_fake_node("gpus", {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4"})

    api.request("POST", path, pod("fits", gpus=4))
    api.request("POST", path, pod("too-many", gpus=1))

    fitting = f"{path}/fits"
    wait_for(lambda: api.get(fitting)["spec"].get("nodeName") == "gpus", "a node for the pod")
    message = wait_for(lambda: _unschedulable(api.get(f"{path}/too-many")), "the other's reason")
    assert "Insufficient nvidia.com/gpu" in message
    for node in ("plain", "gpus"):
        control_plane.remove_fake_node(node)


def test_a_group_gets_a_leader_and_its_webhooks_refuse_nonsense(
    control_plane: ControlPlane,
) -> None:
    namespace = control_plane.create_namespace()
    groups = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets"
    template = {"spec": {"containers": [{"name": "main", "image": "localhost/none:1"}]}}
    spec = {"replicas": 2, "leaderWorkerTemplate": {"size": 2, "workerTemplate": template}}
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "group"},
        "spec": spec,
    }

    control_plane.api.request("POST", groups, group)

    pods = f"/api/v1/namespaces/{namespace}/pods"
    wait_for(lambda: control_plane.api.exists(f"{pods}/group-1"), "the second leader")
    leader = control_plane.api.get(f"{pods}/group-0")
    environment = {
        variable["name"]: variable.get("value")
        for variable in leader["spec"]["containers"][0]["env"]
    }
    assert environment["LWS_LEADER_ADDRESS"] == f"group-0.group.{namespace}"
    group["metadata"] = {"name": "1-is-no-dns-label"}
    with pytest.raises(ApiError, match=r'admission webhook \\"vleaderworkerset'):
        control_plane.api.request("POST", groups, group)


def _unschedulable(pod: dict[str, Any]) -> str:
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition["message"])
    return ""
