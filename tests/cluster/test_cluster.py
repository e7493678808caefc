"""The third layer of the test cluster: containers on two nodes, Services, DNS, groups, GPUs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from kvoy_cluster.api_server import KubectlError
from kvoy_cluster.cluster import Cluster
from kvoy_cluster.images import PROBE_IMAGE
from kvoy_cluster.waiting import wait_for

pytestmark = pytest.mark.slow

_ROLLOUT_TIMEOUT = "--timeout=90s"


def container(*command: str, **more: object) -> dict[str, Any]:
    return {"name": "main", "image": PROBE_IMAGE, "args": list(command), **more}


def pod_spec(*command: str, **more: object) -> dict[str, Any]:
    return {"terminationGracePeriodSeconds": 1, "containers": [container(*command, **more)]}


def web_objects(namespace: str) -> str:
    """Two servers on different nodes, and their Service."""
    labels = {"app": "web"}
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    spec = pod_spec("serve", readinessProbe=probe)
    spread = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    spec["affinity"] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [spread]}
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [deployment, service]})


@pytest.fixture(scope="module")
def web(cluster: Cluster) -> str:
    """The namespace of a rolled-out deployment `web` with its Service."""
    namespace = cluster.create_namespace()
    cluster.kubectl("apply", "-f", "-", input=web_objects(namespace))
    cluster.kubectl("rollout", "status", "-n", namespace, "deployment/web", _ROLLOUT_TIMEOUT)
    return namespace


def test_a_deployment_runs_on_both_nodes_and_is_reached_by_name(cluster: Cluster, web: str) -> None:
    pods = cluster.api.get(f"/api/v1/namespaces/{web}/pods")["items"]
    names = {pod["metadata"]["name"] for pod in pods}
    client = pods[0]["metadata"]["name"]

    def answering_pods() -> set[str]:
        answers = cluster.exec_in_pod(web, client, ["/probe", "get", f"http://web.{web}.svc/"])
        answered.add(answers.split()[0])
        return answered if answered == names else set()

    answered: set[str] = set()
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2"}
    # From one node to both, itself included, by the cluster's DNS.
    wait_for(answering_pods, "answers of both pods")


def test_a_forwarded_service_is_reached_from_this_machine(cluster: Cluster, web: str) -> None:
    port = cluster.forward_service(web, "web", 80)

    with urlopen(f"http://127.0.0.1:{port}/hello", timeout=10) as answer:
        text = answer.read().decode()

    assert text.startswith("web-")
    assert text.endswith(" /hello\n")


def test_names_outside_of_the_cluster_do_not_exist(cluster: Cluster, web: str) -> None:
    pod = cluster.kubectl("get", "pod", "-n", web, "-o", "name").split()[0]

    with pytest.raises(KubectlError, match=r"example\.com.*: no such host"):
        cluster.exec_in_pod(web, pod, ["/probe", "resolve", "example.com"])


def test_logs_and_termination_messages_come_back(cluster: Cluster) -> None:
    namespace = cluster.create_namespace()
    spec = {**pod_spec("exit", "3", "the model is missing"), "restartPolicy": "Never"}
    pods = f"/api/v1/namespaces/{namespace}/pods"

    cluster.api.request("POST", pods, {"metadata": {"name": "failing"}, "spec": spec})

    ended = wait_for(lambda: _terminated(cluster.api.get(f"{pods}/failing")), "the pod's end")
    assert (ended["exitCode"], ended["message"]) == (3, "the model is missing")


def test_a_changed_secret_shows_in_its_mount(cluster: Cluster) -> None:
    namespace = cluster.create_namespace()
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "fleet"}}
    cluster.api.apply(f"{secrets}/fleet", {**secret, "stringData": {"fleet": "old"}})
    spec = pod_spec("pause", volumeMounts=[{"name": "fleet", "mountPath": "/fleet"}])
    spec["volumes"] = [{"name": "fleet", "secret": {"secretName": "fleet"}}]
    run_pod(cluster, namespace, "reader", spec)
    show = ["/probe", "show", "/fleet/fleet"]
    assert cluster.exec_in_pod(namespace, "reader", show) == "old"

    cluster.api.apply(f"{secrets}/fleet", {**secret, "stringData": {"fleet": "new"}})

    wait_for(lambda: cluster.exec_in_pod(namespace, "reader", show) == "new", "the new secret", 60)


def test_a_group_spans_both_nodes_and_is_recreated_as_one(cluster: Cluster) -> None:
    namespace = cluster.create_namespace()
    template = {"spec": pod_spec("env", "LWS_")}
    placement = {
        "labelSelector": {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": "group"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    template["spec"]["affinity"] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [placement]}
    }
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "group"},
        "spec": {"leaderWorkerTemplate": {"size": 2, "workerTemplate": template}},
    }
    groups = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets"

    cluster.api.request("POST", groups, group)

    leader = wait_for_running(cluster, namespace, "group-0")
    worker = wait_for_running(cluster, namespace, "group-0-1")
    assert {leader["spec"]["nodeName"], worker["spec"]["nodeName"]} == {"n1", "n2"}
    assert set(cluster.kubectl("logs", "-n", namespace, "group-0-1").split()) == {
        f"LWS_LEADER_ADDRESS=group-0.group.{namespace}",
        "LWS_GROUP_SIZE=2",
        "LWS_WORKER_INDEX=1",
    }
    resolve = ["/probe", "resolve", f"group-0.group.{namespace}"]
    address = leader["status"]["podIP"]
    wait_for(
        lambda: address in cluster.exec_in_pod(namespace, "group-0-1", resolve), "leader's name"
    )

    cluster.kubectl("delete", "pod", "-n", namespace, "group-0-1", "--wait=false")

    path = f"/api/v1/namespaces/{namespace}/pods/group-0"
    uid = leader["metadata"]["uid"]
    wait_for(lambda: cluster.api.get(path)["metadata"]["uid"] != uid, "another leader", 60)
    wait_for_running(cluster, namespace, "group-0")


def test_gpus_are_counted_and_handed_out(cluster: Cluster, tmp_path: Path) -> None:
    namespace = cluster.create_namespace()
    (tmp_path / "libcuda.txt").write_text("a driver")
    tmp_path.chmod(0o755)
    cluster.add_gpus("n2", 2, mounts={str(tmp_path): "/driver"})
    two = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}

    pod = run_pod(cluster, namespace, "first", pod_spec("env", "NVIDIA_", **two))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    cluster.api.request(
        "POST", pods, {"metadata": {"name": "second"}, "spec": pod_spec("pause", **two)}
    )

    assert pod["spec"]["nodeName"] == "n2"
    visible = cluster.kubectl("logs", "-n", namespace, "first").strip().partition("=")[2]
    assert sorted(visible.split(",")) == ["gpu-0", "gpu-1"]
    shown = cluster.exec_in_pod(namespace, "first", ["/probe", "show", "/driver/libcuda.txt"])
    assert shown == "a driver"
    wait_for(
        lambda: "Insufficient nvidia.com/gpu" in str(cluster.api.get(f"{pods}/second")["status"]),
        "the second pod's reason",
    )


def test_gpus_come_back_with_a_killed_kubelet(cluster: Cluster) -> None:
    cluster.add_gpus("n1", 1)
    path = "/api/v1/nodes/n1"

    def condition(status: str) -> bool:
        conditions = cluster.api.get(path)["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == status for c in conditions)

    cluster.kill_node_process("n1", "kubelet")
    wait_for(lambda: condition("Unknown"), "n1 unready", 90)
    cluster.restart_node_process("n1", "kubelet")

    ended = partial(cluster.processes.ended, "kubelet-n1")
    wait_for(lambda: condition("True"), "n1 ready", 90, unless=ended)
    wait_for(
        lambda: cluster.api.get(path)["status"]["allocatable"]["nvidia.com/gpu"] == "1", "its GPU"
    )


def run_pod(cluster: Cluster, namespace: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Creates a pod, and returns it when it runs."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    cluster.api.request("POST", pods, {"metadata": {"name": name}, "spec": spec})
    return wait_for_running(cluster, namespace, name)


def wait_for_running(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"

    def running() -> dict[str, Any] | None:
        pod: dict[str, Any] = cluster.api.get(path)
        statuses = pod["status"].get("containerStatuses", [])
        is_running = statuses and all(status["ready"] for status in statuses)
        return pod if is_running and "deletionTimestamp" not in pod["metadata"] else None

    return wait_for(running, f"pod {name} running", 90)


def _terminated(pod: dict[str, Any]) -> dict[str, Any] | None:
    statuses = pod["status"].get("containerStatuses", [{"state": {}}])
    ended: dict[str, Any] | None = statuses[0]["state"].get("terminated")
    return ended
