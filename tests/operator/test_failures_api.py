"""Reasons read from what a real scheduler and real controllers say, not from our own texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvoy_cluster.control_plane import ControlPlane
from kvoy_cluster.waiting import wait_for
from kvoy_contract.names import SERVING_POOL
from kvoy_operator.failures import Failure, FailureReason, pod_failure, workload_failure
from kvoy_operator.identity import Manifest
from kvoy_operator.kinds import DEPLOYMENT, POD, kind_of
from kvoy_operator.manifests import render_workload
from kvoy_operator.render_testing import make_options, make_service
from kvoy_operator.views import pod_view, workload_view

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0
NATIVE = {"kind": "native"}
"""Mounts its model, which a simulated engine does not."""


@pytest.fixture(scope="module", autouse=True)
def node(control_plane: ControlPlane) -> Iterator[None]:
    """With processors and memory, but no GPU."""
    control_plane.add_fake_node("failures", {"cpu": "8", "memory": "32Gi"})
    yield
    control_plane.remove_fake_node("failures")


@pytest.fixture
def namespace(control_plane: ControlPlane) -> str:
    return control_plane.create_namespace()


def _deploy(plane: ControlPlane, namespace: str, spec: dict[str, Any]) -> Manifest:
    service = make_service({"engine": {"kind": "sim"}, **spec}, namespace=namespace)
    workload = render_workload(service, SERVING_POOL, "bcdfgh", make_options())
    metadata = workload["metadata"]
    # Its owner is nowhere: garbage collection would take the workload away.
    del metadata["ownerReferences"]
    plane.api.apply(kind_of(workload["kind"]).path(namespace, metadata["name"]), workload)
    return workload


def _failure_of_pod(plane: ControlPlane, namespace: str) -> Failure:
    def first() -> Failure | None:
        pods = plane.api.get(POD.path(namespace))["items"]
        failures = (pod_failure(pod_view(pod)) for pod in pods)
        return next((failure for failure in failures if failure), None)

    return wait_for(first, "a pod fails", TIMEOUT_S)


def _failure_of_workload(plane: ControlPlane, namespace: str, name: str) -> Failure:
    def failure() -> Failure | None:
        body = plane.api.get(DEPLOYMENT.path(namespace, name))
        return workload_failure(workload_view("Deployment", body))

    return wait_for(failure, "the workload cannot make pods", TIMEOUT_S)


def test_the_scheduler_finds_no_gpu(control_plane: ControlPlane, namespace: str) -> None:
    _deploy(control_plane, namespace, {"gpus": 1})

    failure = _failure_of_pod(control_plane, namespace)

    assert failure.reason is FailureReason.GPU_INSUFFICIENT
    assert "nvidia.com/gpu" in failure.message


def test_the_scheduler_finds_no_memory(control_plane: ControlPlane, namespace: str) -> None:
    _deploy(control_plane, namespace, {"resources": {"requests": {"memory": "900Gi"}}})

    failure = _failure_of_pod(control_plane, namespace)

    assert failure.reason is FailureReason.UNSCHEDULABLE
    assert "Insufficient memory" in failure.message


def test_the_scheduler_misses_a_claim(control_plane: ControlPlane, namespace: str) -> None:
    _deploy(control_plane, namespace, {"engine": NATIVE, "model": {"uri": "pvc://models/llama"}})

    failure = _failure_of_pod(control_plane, namespace)

    assert failure.reason is FailureReason.MISSING_PVC
    assert "models" in failure.message


def test_a_group_that_finds_no_gpu_says_so(control_plane: ControlPlane, namespace: str) -> None:
    _deploy(control_plane, namespace, {"nodes": 2, "gpus": 1})

    assert _failure_of_pod(control_plane, namespace).reason is FailureReason.GPU_INSUFFICIENT


def test_a_quota_refuses_pods(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kubectl("create", "quota", "none", "--hard=pods=0", "-n", namespace)
    # Until then pods are refused because the quota's use is unknown.
    quota = f"/api/v1/namespaces/{namespace}/resourcequotas/none"
    wait_for(
        lambda: control_plane.api.get(quota)["status"]["hard"],
        "the quota's use is known",
        TIMEOUT_S,
    )
    workload = _deploy(control_plane, namespace, {})

    failure = _failure_of_workload(control_plane, namespace, workload["metadata"]["name"])

    assert failure.reason is FailureReason.QUOTA_EXCEEDED
    assert "exceeded quota: none" in failure.message


def test_pod_security_refuses_pods(control_plane: ControlPlane) -> None:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = control_plane.create_namespace(level)
    cache = {"hostPath": {"path": "/var/models"}}
    model = {"uri": "hf://Qwen/Qwen3-0.6B", "cache": cache}
    workload = _deploy(control_plane, namespace, {"engine": NATIVE, "model": model})

    failure = _failure_of_workload(control_plane, namespace, workload["metadata"]["name"])

    assert failure.reason is FailureReason.POD_SECURITY_FORBIDDEN
    assert "hostPath" in failure.message
